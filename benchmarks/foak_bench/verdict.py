"""Whether a row's speed counts: its loss must be as near to a float32 run's as plain Hugging Face's is.

The runs that are compared have the same data, seed, and first weights. They are the rows' own, or those of the group's
check: a smaller work, because an 8B model is seldom trained in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from foak_bench.records import MEASURED, Record
from foak_bench.scenarios import FP32

__all__ = ["ROUNDING", "Verdict", "distance", "judge"]

ROUNDING = 1e-3
"""How much farther than plain's a loss may be from float32's, relative to that loss.

Two right computations in bf16 differ too: a logit is rounded to 8 bits, by 2⁻⁹ = 2·10⁻³ of itself at most, half of that
on average. A loss that plain happens to hit exactly is not to fail the others.
"""


@dataclass(frozen=True)
class Verdict:
    """What the losses say about a row.

    Attributes:
        counts: True, False, or None where a run that is needed for it is missing, or gave no numbers.
        distance: the largest distance of a step's loss from float32's.
        plain: the same of plain Hugging Face.
        grad_norm: the largest relative distance of a step's gradient norm from float32's.
        reason: why there is no verdict.
    """

    counts: bool | None
    distance: float | None = None
    plain: float | None = None
    grad_norm: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.distance is None:
            return f"unchecked: {self.reason}"
        text = f"{self.distance:.4f} ({self.grad_norm:.1%})"
        if self.counts is None:
            return f"{text}, unchecked: {self.reason}"
        return text if self.counts else f"{text}, does not count: plain is {self.plain:.4f} off"


def judge(record: Record, records: Mapping[str, Record]) -> Verdict:
    """Holds the losses of a row, or of its check, against those in float32.

    Args:
        record: a timed row.
        records: all records of its run, by name.
    """
    group, row = record.scenario.group, record.scenario.row
    label = row.label.replace("+multipack", "")  # which changes who meets in a batch, and nothing of what is computed
    if row.by == "trl-packed":
        return Verdict(None, reason="trains other samples at each step")
    precise = _measured(records, group, FP32, check=True)
    if precise is None:
        return Verdict(None, reason="no float32 run")
    if not all(map(math.isfinite, [*precise.loss, *precise.grad_norm])) or 0 in precise.grad_norm:
        return Verdict(None, reason="float32's losses or gradient norms are nothing to hold others against")
    own, plain = (_beside(records, group, name, precise) for name in (label, "plain"))
    if own is None:
        return Verdict(None, reason="not run beside the float32 one")
    off = distance(own.loss, precise.loss)
    norms = zip(own.grad_norm, precise.grad_norm, strict=True)
    apart = max(abs(norm - exact) / exact for norm, exact in norms)
    if plain is None:
        return Verdict(None, off, None, apart, "plain did not run")
    allowed = distance(plain.loss, precise.loss)
    if not math.isfinite(allowed):
        return Verdict(None, off, None, apart, "plain's loss is not finite")
    near = math.isfinite(off) and off <= allowed + ROUNDING * max(precise.loss)
    return Verdict(near, off, allowed, apart)


def distance(loss: list[float], precise: list[float]) -> float:
    """The largest difference of two loss curves; infinite where one has no number."""
    found = [abs(a - b) for a, b in zip(loss, precise, strict=True)]
    return math.inf if any(map(math.isnan, found)) else max(found)


def _measured(records: Mapping[str, Record], group: str, label: str, *, check: bool) -> Record | None:
    found = records.get(f"{group}/{'check/' if check else ''}{label}")
    return found if found is not None and found.status == MEASURED else None


def _beside(records: Mapping[str, Record], group: str, label: str, precise: Record) -> Record | None:
    """The run of a row that trained the same thing as the float32 one: its check's, or its own."""
    found = _measured(records, group, label, check=True) or _measured(records, group, label, check=False)
    if found is None:
        return None
    works = [{**side.scenario.to_dict()["work"], "precision": ""} for side in (found, precise)]
    return found if works[0] == works[1] else None
