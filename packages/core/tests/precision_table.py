"""The README's table of weights and mixed precision, made from `foak.core.precision`.

python packages/core/tests/precision_table.py           prints it
python packages/core/tests/precision_table.py --write   puts it into the README
"""

from __future__ import annotations

import sys
from pathlib import Path

from foak.core.precision import HEADER, rows

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- precision table: begin -->", "<!-- precision table: end -->"


def table() -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(text: str) -> str:
    """`text` with the table between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
