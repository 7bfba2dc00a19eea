"""The messages that the troubleshooting page quotes are messages that foak prints."""

from __future__ import annotations

import ast
import re

from blocks import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^> `(.+?)`$", PAGE, re.MULTILINE)


def printed() -> str:
    """Every text of the packages' code, with `…` for what is filled in; texts that differ in a place stand apart."""
    found: list[str] = []
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("shared/kernels/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_quoted_message_is_one_that_is_printed() -> None:
    texts = printed()
    assert len(QUOTED) > 25
    for message in QUOTED:
        pieces = [piece.strip(" ,;:.()`") for piece in re.split(r"…|[;:] |already ", message)]
        pieces = [piece for piece in pieces if len(piece) > 3]
        assert pieces, message
        for piece in pieces:
            assert piece in texts, f"{message!r}: nothing prints {piece!r}"
