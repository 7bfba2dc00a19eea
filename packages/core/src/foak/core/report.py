"""What was patched in a model, what was kept, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["patched", "kept"]


@dataclass(frozen=True)
class PatchRecord:
    """One rule's look at one module.

    Attributes:
        module: the module's dotted name in the model (``""`` is the model itself).
        module_class: the name of its class.
        rule: the rule that looked at it.
        kernel: what runs now (patched) or would have run (kept).
        outcome: ``"patched"`` or ``"kept"``.
        reason: why the rule matched and stayed, or why the original was kept.
    """

    module: str
    module_class: str
    rule: str
    kernel: str
    outcome: Outcome
    reason: str


@dataclass
class PatchReport:
    """Every module that a rule looked at, in the model's order."""

    records: list[PatchRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[PatchRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def patched(self) -> list[PatchRecord]:
        """The records of what was replaced."""
        return [record for record in self.records if record.outcome == "patched"]

    @property
    def kept(self) -> list[PatchRecord]:
        """The records of what stayed as it was."""
        return [record for record in self.records if record.outcome == "kept"]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values: counts, notes and one mapping for each record."""
        return {
            "patched": len(self.patched),
            "kept": len(self.kept),
            "notes": list(self.notes),
            "records": [asdict(record) for record in self.records],
        }

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """The report in short: equal records of the layers of a stack are one row.

        Returns:
            Tuples of rule, module (numbers replaced by ``*``), class, how many, outcome and kernel, reason.
        """
        groups: dict[tuple[str, str, str, str, str, str], int] = {}
        for record in self.records:
            name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", record.module) or "(model)"
            key = (record.rule, name, record.module_class, record.outcome, record.kernel, record.reason)
            groups[key] = groups.get(key, 0) + 1
        return [
            (rule, name, cls, str(count), f"patched: {kernel}" if outcome == "patched" else "kept", reason)
            for (rule, name, cls, outcome, kernel, reason), count in groups.items()
        ]

    def __str__(self) -> str:
        header = ("rule", "module", "class", "n", "outcome", "reason")
        rows = [header, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = ["  ".join([cell.ljust(w) for cell, w in zip(row, widths, strict=False)] + [row[-1]]) for row in rows]
        lines.insert(1, "  ".join("-" * width for width in [*widths, len(header[-1])]))
        if not self.records:
            lines = ["nothing was patched: no rule is switched on, or none found a module of its kind"]
        return "\n".join([*lines, *self.notes])
