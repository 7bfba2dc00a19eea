"""How the subcommands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_json", "print_line", "print_table"]

_PIPE_WIDTH = 200
"""Columns where the output is no terminal, so that a log does not wrap after 80."""


def print_json(value: Any) -> None:
    """Prints one JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(text: str = "") -> None:
    """Prints a line; nothing in it is read as markup."""
    _console().print(Text(text))


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table whose cells are taken literally."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
