"""A copy of a function that sees another object under a global name, the function itself left as it is.

A model's attention calls ``apply_rotary_pos_emb`` by a name in its module's globals. Replacing that global would
change every model of the process; reloading the module would undo earlier changes. Instead one instance gets a copy of
its forward, made of the same code object and a copy of the globals with that one name replaced. Decorators keep the
function they wrap in a closure cell, so the copy is followed through the cells.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The global names that a code object and the functions defined inside it load."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return frozenset(names)


def inner_functions(function: types.FunctionType) -> list[types.FunctionType]:
    """The function and the functions that its decorators wrap (found in closure cells), outermost first."""
    found: list[types.FunctionType] = []

    def visit(candidate: types.FunctionType) -> None:
        if any(candidate is seen for seen in found):
            return
        found.append(candidate)
        for cell in candidate.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell: a name that is not assigned yet
                continue
            if isinstance(content, types.FunctionType):
                visit(content)

    visit(function)
    return found


def called_global(function: Callable[..., Any], name: str) -> Any | None:
    """The object that a function, or one that it decorates, calls by a global name; None where none does."""
    if not isinstance(function, types.FunctionType):
        return None
    for candidate in inner_functions(function):
        if name in candidate.__globals__ and name in global_names(candidate.__code__):
            return candidate.__globals__[name]
    return None


def rebind(function: types.FunctionType, replacements: Mapping[str, Any]) -> types.FunctionType:
    """Copy a function so that it, and what it decorates, sees other objects under some global names.

    Args:
        function: the function, which is not changed; decorated ones are followed through their closure cells.
        replacements: global name to the object that the copy shall see.

    Returns:
        The copy, with the original's defaults, signature, names and attributes.
    """
    copies: dict[int, types.FunctionType] = {}

    def needs_copy(candidate: types.FunctionType) -> bool:
        return any(replacements.keys() & global_names(inner.__code__) for inner in inner_functions(candidate))

    def copy(candidate: types.FunctionType) -> types.FunctionType:
        if id(candidate) in copies:
            return copies[id(candidate)]
        names = replacements.keys() & global_names(candidate.__code__) & candidate.__globals__.keys()
        namespace = {**candidate.__globals__, **{n: replacements[n] for n in names}} if names else candidate.__globals__
        cells = []
        for cell in candidate.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                cells.append(cell)
                continue
            swap = isinstance(content, types.FunctionType) and content is not candidate and needs_copy(content)
            cells.append(types.CellType(copy(content)) if swap else cell)
        clone = types.FunctionType(
            candidate.__code__, namespace, candidate.__name__, candidate.__defaults__, tuple(cells) or None
        )
        clone.__kwdefaults__ = dict(candidate.__kwdefaults__) if candidate.__kwdefaults__ else None
        functools.update_wrapper(clone, candidate)
        wrapped = candidate.__dict__.get("__wrapped__")
        if wrapped is None:
            del clone.__dict__["__wrapped__"]
        else:
            clone.__dict__["__wrapped__"] = wrapped
        copies[id(candidate)] = clone
        return clone

    return copy(function)
