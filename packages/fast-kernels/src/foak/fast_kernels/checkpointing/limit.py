"""How a budget is written in a configuration, and what it means in bytes."""

from __future__ import annotations

import re

AUTO = "auto"

ALLOWED = 'auto, a number of GiB, or a text such as "56 GiB" or "60 GB"'

_UNITS = {"": 2**30, "gib": 2**30, "mib": 2**20, "gb": 10**9, "mb": 10**6}


def parse_limit(value: float | str) -> int | None:
    """The budget in bytes; None for ``auto``.

    Raises:
        ValueError: it is neither ``auto`` nor an amount of memory above zero.
    """
    if isinstance(value, str):
        if value.strip().lower() == AUTO:
            return None
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"not an amount of memory: {value!r}")
        limit = float(match[1]) * _UNITS[match[2]]
    else:
        limit = value * _UNITS[""]
    if not 0 < limit < float("inf"):
        raise ValueError(f"not an amount of memory above zero: {value!r}")
    return int(limit)


def show_bytes(amount: float) -> str:
    """An amount for a message: GiB, or MiB below one."""
    return f"{amount / 2**30:.2f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"
