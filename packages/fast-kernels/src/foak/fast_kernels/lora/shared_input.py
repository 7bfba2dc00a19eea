"""LoRA layers that are called with the same tensor, one after the other: query, key and value; gate and up.

The first that is called computes the thin products of all in one pass over the input, and keeps a promise for each of
the others, which they take when they are called with that very tensor. Which layers share an input is read from the
source of the forward that calls them. Where the source misleads, a promise is not taken: that costs a thin product, and
changes no result.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ATTRIBUTE = "_foak_shared_input"
"""Where a layer finds its group: a plain attribute of the instance."""

LARGEST = 3
"""Layers of a group: as many as one kernel takes."""


class SharedInput:
    """A group of layers, and the promises that have not been taken yet."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Refers to the layers weakly: they refer to the group, and may be copied one without another."""
        self._layers = tuple(weakref.ref(layer) for layer in layers)
        self._input: Tensor | None = None
        self._circumstances: tuple[Any, ...] = ()
        self._promises: dict[int, tuple[Hashable, Any]] = {}

    def others(self, layer: nn.Module) -> Iterator[nn.Module]:
        """The group without `layer`."""
        for reference in self._layers:
            other = reference()
            if other is not None and other is not layer:
                yield other

    def keep(self, x: Tensor, promises: Sequence[tuple[nn.Module, Hashable, Any]]) -> None:
        """Keep promises for layers that will be called with `x`, each with the state in which its layer was.

        What was left of an earlier input is dropped.
        """
        self._promises = {id(layer): (state, promise) for layer, state, promise in promises}
        self._input = x if promises else None
        self._circumstances = _circumstances(x) if promises else ()

    def take(self, layer: nn.Module, x: Tensor, state: Hashable) -> Any | None:
        """The promise for a layer, if it was kept for this very input, in this state and these circumstances."""
        if self._input is not x or id(layer) not in self._promises or self._circumstances != _circumstances(x):
            return None
        kept_in, promise = self._promises.pop(id(layer))
        if not self._promises:
            self._input = None
        return promise if kept_in == state else None

    def clear(self) -> None:
        """Forget every promise, and with it the input and the graph that it holds."""
        self._promises, self._input, self._circumstances = {}, None, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput(())  # the copies stand for themselves

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, ((),)


def _circumstances(x: Tensor) -> tuple[Any, ...]:
    version = None if x.is_inference() else x._version
    return version, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def groups_of(parent: nn.Module, layers: dict[str, nn.Module]) -> list[list[nn.Module]]:
    """Which of a module's children `layers` (by name) its forward calls with one and the same variable.

    Only layers of equal input size are put together, at most `LARGEST`, in the order of the calls. Empty where the
    source cannot be read.
    """
    found: list[list[nn.Module]] = []
    for names in _called_together(parent):
        group: list[nn.Module] = []
        for name in dict.fromkeys(names):
            layer: Any = layers.get(name)
            if layer is None:
                continue
            if group and (len(group) == LARGEST or layer.in_features != group[0].in_features):
                found.append(group)
                group = []
            group.append(layer)
        found.append(group)
    return [group for group in found if len(group) > 1]


def _called_together(parent: nn.Module) -> list[list[str]]:
    """Names of children, grouped by the variable that they are called with, as long as it is not assigned anew."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(parent).forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return []
    calls: dict[tuple[str, int], list[str]] = {}
    assigned: dict[str, int] = {}
    for statement in _simple_statements(tree):
        for node in ast.walk(statement):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=variable)], keywords=[]
                ):
                    calls.setdefault((variable, assigned.get(variable, 0)), []).append(name)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assigned[node.id] = assigned.get(node.id, 0) + 1
    return [names for names in calls.values() if len(names) > 1]


def _simple_statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node in the order of the source; of compound ones their parts."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and hasattr(child, "body"):
            yield from _simple_statements(child)
        elif isinstance(child, ast.stmt | ast.expr):
            yield child
