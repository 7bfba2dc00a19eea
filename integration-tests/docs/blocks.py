"""The code blocks of every page and README: found by the parser of Markdown that rich uses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = ["ROOT", "Block", "blocks_of", "pages"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what language it names ("" is a shell's), and what is in it."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page of docs/ and every README that git knows or would take, from the root."""
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(page for page in listed if "/changelog.d/" not in page and Path(page).name != "CHANGELOG.md")


def blocks_of(page: str) -> Iterator[Block]:
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            yield Block(page, token.map[0] + 1, token.info.strip().lower(), token.content)
