"""Holds values that were read from YAML against the type hints of a dataclass, and names the key when they differ."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from foak.core.catalog import nearest
from foak.core.config import describe_kind
from foak.core.errors import ConfigError

__all__ = ["Origin", "did_you_mean", "read_fields"]

# What YAML 1.2 takes for a float and YAML 1.1 (PyYAML) for a text: 1e-4, 5E3, 1.5e3.
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
# The same, but surely no text such as an abbreviated commit (12e4567): only with a sign in the exponent.
_SIGNED_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]\d+")

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}


class Origin:
    """Where the values of a run come from, for messages.

    Args:
        path: the run file.
        overridden: the dotted keys that `--set` gave, which are named in its place.
    """

    def __init__(self, path: Path, overridden: Collection[str] = ()) -> None:
        self.path = path
        self.overridden = frozenset(overridden)

    def error(self, key: str, text: str) -> ConfigError:
        """An error about a dotted key: `run.yaml: training.seed must be a whole number, not 'x'`."""
        by_option = any(
            key == given or given.startswith(f"{key}.") or key.startswith(f"{given}.") for given in self.overridden
        )
        return ConfigError(f"{'--set' if by_option else self.path}: {key} {text}")


class _Mismatch(Exception):
    """A value does not fit a type hint."""


def read_fields(values: Mapping[str, Any], hints: Mapping[str, Any], section: str, origin: Origin) -> dict[str, Any]:
    """Checks each value of a section against the type hint of its key.

    Args:
        values: key to value as read from YAML.
        hints: the allowed keys and their resolved type hints.
        section: the dotted name of the section, for messages.
        origin: where the values come from, for messages.

    Returns:
        The values, with whole numbers and texts like `1e-4` made floats where the hint wants a float, and mappings made
        dataclasses where it wants one.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a value of the wrong type.
    """
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            hint = did_you_mean(f"{section}.{key}", (f"{section}.{known}" for known in hints))
            raise origin.error(f"{section}.{key}", f"is no known key{hint}")
        try:
            read[key] = _convert(value, hints[key])
        except _Mismatch:
            raise origin.error(
                f"{section}.{key}", f"must be {_describe(hints[key])}, but is {describe_kind(value)}"
            ) from None
    return read


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """`; did you mean training.seed?` or, where nothing is near, nothing."""
    found = nearest(key, known)
    return f"; did you mean {found}?" if found else ""


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the type hint wants it; `_Mismatch` if it does not fit."""
    if hint is Any:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        if any(type(value) is type(allowed) and value == allowed for allowed in arguments):
            return value
        # An annotation may list a pattern in the place of values, as PEFT does with `pissa_niter_[number of iters]`.
        if isinstance(value, str) and any(
            isinstance(a, str) and "[" in a and value.startswith(a.split("[")[0]) for a in arguments
        ):
            return value
        raise _Mismatch
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _Mismatch
        items = [_convert(item, arguments[0] if arguments else Any) for item in value]
        return items if origin is list else tuple(items)
    if origin is dict or hint is dict:
        if not isinstance(value, dict):
            raise _Mismatch
        inner = arguments[1] if arguments else Any
        return {key: _convert(_float_in_mapping(item), inner) for key, item in value.items()}
    return _convert_plain(value, hint)


def _convert_union(value: Any, arguments: tuple[Any, ...]) -> Any:
    """The first member that takes the value as it is wins over one that would convert it."""
    if isinstance(value, str) and str in arguments:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and int in arguments:
        return value
    if isinstance(value, bool):
        # YAML 1.1 reads `save_strategy: no` as false.
        word = "yes" if value else "no"
        if any(word in {member.value for member in _members(argument)} for argument in arguments):
            return word
    for argument in arguments:
        try:
            return _convert(value, argument)
        except _Mismatch:
            continue
    raise _Mismatch


def _convert_plain(value: Any, hint: Any) -> Any:
    if hint is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            return float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise _Mismatch
    if hint is int and isinstance(value, bool):
        raise _Mismatch
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        inner = typing.get_type_hints(hint)
        if not set(value) <= set(inner):
            raise _Mismatch
        return hint(**{key: _convert(item, inner[key]) for key, item in value.items()})
    if hint is list and isinstance(value, list):
        return value
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _Mismatch


def _float_in_mapping(value: Any) -> Any:
    """Free-form mappings (`lr_scheduler_kwargs`) have no hints: `1e-5` is made a float, `12e4567` stays a text."""
    return float(value) if isinstance(value, str) and _SIGNED_EXPONENT.fullmatch(value) else value


def _members(hint: Any) -> list[enum.Enum]:
    """The members of an enumeration; nothing for any other type hint."""
    return list(hint) if isinstance(hint, enum.EnumType) else []


def _describe(hint: Any) -> str:
    """What a type hint allows, in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = dict.fromkeys(_describe(argument) for argument in arguments)
        # typing may give the members of an equal union in another order: simple ones first, null last.
        return " or ".join(sorted(words, key=lambda word: (word == "null", word.startswith("a list of"))))
    if origin is Literal:
        return " or ".join(str(allowed) for allowed in arguments)
    if origin in (list, tuple) or hint is list:
        return f"a list of {_describe(arguments[0])}" if arguments else "a list"
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "a mapping"
    if hint in _WORDS:
        return _WORDS[hint]
    if members := _members(hint):
        return " or ".join(str(member.value) for member in members)
    return str(getattr(hint, "__name__", hint))
