"""How a plugin declares the configuration keys that it reads, and how a value is held against such a declaration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Key"]

_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class Key:
    """One key inside the section of a plugin; the core refuses every key and every value that no `Key` allows.

    Attributes:
        name: the key as written inside the section, without dots.
        allowed: what the value may be. Each entry is a value (`True`, `"auto"`, `"nf4"`, `4`), compared without mixing
            up `True` and `1`, or a type (`bool`, `int`, `float`, `str`, `list`, `dict`). `int` takes no booleans,
            `float` takes whole numbers too.
        help: one line that says what the key does.
        default: the value that the plugin sees when the key is absent or null.
        under: the dotted paths (below `plugins:`) under which the key may be written; empty means every path of the
            plugin.

    A kernel switch that allows the value `"auto"` is part of what `foak explain` shows when no configuration is given.
    """

    name: str
    allowed: tuple[Any, ...]
    help: str = ""
    default: Any = None
    under: tuple[str, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Whether `value` (as read from YAML) is one that this key allows."""
        return any(_accepts(entry, value) for entry in self.allowed)

    def describe_allowed(self) -> str:
        """What is allowed, for a message: `true, false, auto or a whole number`."""
        words = [_TYPE_NAMES[entry] if isinstance(entry, type) else _as_yaml(entry) for entry in self.allowed]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _accepts(entry: Any, value: Any) -> bool:
    if isinstance(entry, type):
        if entry in (int, float) and isinstance(value, bool):
            return False
        return isinstance(value, (int, float) if entry is float else entry)
    # `True == 1` and `1 == 1.0` in Python; a configuration must not mix them up.
    return type(entry) is type(value) and bool(entry == value)


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)
