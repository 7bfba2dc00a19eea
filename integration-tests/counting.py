"""The table of counts in the README, between two marks: written by runs, read nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "<!-- counts: begin -->", "<!-- counts: end -->"
HEADER = ("| folder | in its last recorded run |", "|---|---|")


def folder_of(nodeid: str) -> str:
    """The folder of integration-tests that a test lies in."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[parts.index("integration-tests") + 1] if "integration-tests" in parts else parts[0]


def rows_of(text: str) -> dict[str, str]:
    """What the table says, by folder."""
    return dict(re.findall(r"^\| `([^`]+)/` \| (.*) \|$", text, re.MULTILINE))


def record(counted: Mapping[str, Mapping[str, int]], readme: Path) -> None:
    """Puts the counts of a run into their rows; those of folders that did not run stay as they were.

    Args:
        counted: folder to what was counted to its number.
        readme: the file with the two marks.
    """
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin
    assert end
    rows = rows_of(table)
    for folder, counts in counted.items():
        rows[folder] = ", ".join(f"{number:,} {name}" for name, number in sorted(counts.items()))
    lines = [*HEADER, *(f"| `{folder}/` | {text} |" for folder, text in sorted(rows.items()))]
    readme.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")
