"""Two folders of results against each other: what became worse, what became better, what cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from foak_bench.records import MEASURED, Record
from foak_bench.verdict import judge

__all__ = ["METRICS", "Comparison", "Difference", "Metric", "Thresholds", "compare"]

Outcome = Literal["equal", "better", "worse"]


@dataclass(frozen=True)
class Thresholds:
    """How far a figure may move, relative to the reference, before it is called better or worse.

    Attributes:
        throughput: 5 %: room for clocks and neighbours that change between two runs; the spread of the steps in the
            records shows whether a machine allows for less.
        memory: 2 %: the same run allocates the same, but for what libraries keep for themselves.
        loss: 1 %: ten times what rounding may cost (`verdict.ROUNDING`), since differences grow from step to step.
    """

    throughput: float = 0.05
    memory: float = 0.02
    loss: float = 0.01

    def __post_init__(self) -> None:
        for name in ("throughput", "memory", "loss"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"--{name} must lie between 0 and 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Metric:
    """A figure of a record.

    Attributes:
        name: the threshold that it has.
        label: what plots and tables call it.
        value: reads it.
        more_is_better: of throughput.
    """

    name: str
    label: str
    value: Callable[[Record], float]
    more_is_better: bool = False


METRICS = (
    Metric("throughput", "tokens/s", lambda record: record.tokens_per_second, more_is_better=True),
    Metric("memory", "peak memory, GiB", lambda record: record.peak_bytes / 2**30),
    Metric("loss", "final loss", lambda record: record.loss[-1]),
)


@dataclass(frozen=True)
class Difference:
    """One figure of one scenario on both sides.

    Attributes:
        scenario: its name.
        metric: a name of `METRICS`, or `loss curve`: the step whose loss moved up most.
        reference, new: the figure on either side.
        change: relative to the reference; positive where the figure grew.
        outcome: against the threshold.
    """

    scenario: str
    metric: str
    reference: float
    new: float
    change: float
    outcome: Outcome


@dataclass
class Comparison:
    """All that was found.

    Attributes:
        differences: a figure each, of every scenario that both sides measured.
        regressions: a sentence each; any makes the comparison fail.
        notes: a sentence each on what cannot be compared, and on devices or versions that differ.
    """

    differences: list[Difference] = field(default_factory=list)
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def outliers(self) -> list[Difference]:
        """What moved beyond its threshold, either way."""
        return [found for found in self.differences if found.outcome != "equal"]


def compare(reference: Mapping[str, Record], new: Mapping[str, Record], thresholds: Thresholds) -> Comparison:
    """Compares two runs' records, scenario by scenario.

    Checks are compared by their losses alone: they are too small to be timed.
    """
    found = Comparison()
    for name in sorted({*reference, *new}):
        ours, theirs = new.get(name), reference.get(name)
        if ours is None or theirs is None:
            found.notes.append(f"{name} is missing in {'NEW' if ours is None else 'REF'}")
        elif theirs.status != MEASURED:
            found.notes.append(f"{name} has no figures in REF ({theirs.status}: {theirs.reason})")
        elif ours.status == "skipped":
            found.notes.append(f"{name} was skipped in NEW ({ours.reason})")
        elif ours.status != MEASURED:
            found.regressions.append(f"{name}: was measured in REF, and in NEW {ours.status} ({ours.reason})")
        elif theirs.scenario != ours.scenario:
            found.notes.append(f"{name} is defined differently on the two sides and is not compared")
        else:
            _compare_scenario(found, theirs, ours, thresholds)
            _compare_verdicts(found, reference, new, name)
    _note_environments(found, reference, new)
    return found


def _compare_scenario(found: Comparison, reference: Record, new: Record, thresholds: Thresholds) -> None:
    name = new.scenario.name
    for metric in METRICS:
        if new.scenario.check and metric.name != "loss":
            continue
        _add(found, name, metric.name, metric.value(reference), metric.value(new), thresholds, metric.more_is_better)
    pairs = zip(reference.loss, new.loss, strict=True)
    worst = max(pairs, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1] - pair[0])
    _add(found, name, "loss curve", *worst, thresholds)


def _add(
    found: Comparison,
    scenario: str,
    metric: str,
    reference: float,
    new: float,
    thresholds: Thresholds,
    more_is_better: bool = False,
) -> None:
    allowed = getattr(thresholds, metric.partition(" ")[0])
    change = new / reference - 1
    gain = change if more_is_better else -change
    # A loss that is not a number is worse than any.
    outcome: Outcome = "worse" if not gain >= -allowed else "better" if gain > allowed else "equal"
    found.differences.append(Difference(scenario, metric, reference, new, change, outcome))
    if outcome == "worse":
        text = f"{scenario}: {metric} went from {reference:,.4g} to {new:,.4g} ({change:+.1%}, allowed {allowed:.0%})"
        found.regressions.append(text)


def _compare_verdicts(found: Comparison, reference: Mapping[str, Record], new: Mapping[str, Record], name: str) -> None:
    if new[name].scenario.check:
        return
    before, after = judge(reference[name], reference), judge(new[name], new)
    if before.counts and after.counts is False:
        found.regressions.append(f"{name}: its loss was as near to float32's as plain's, and is now {after}")


def _note_environments(found: Comparison, reference: Mapping[str, Record], new: Mapping[str, Record]) -> None:
    for what, read in (
        ("device", lambda record: [("", f"{record.device['processes']} × {record.device['name']}")]),
        ("version of", lambda record: record.versions.items()),
    ):
        sides = []
        for records in (reference, new):
            side: dict[str, set[str]] = {}
            for record in records.values():
                for key, value in read(record) if record.runs else ():
                    side.setdefault(key, set()).add(value)
            sides.append(side)
        for key in sorted({*sides[0], *sides[1]}):
            before, after = (", ".join(sorted(side.get(key, {"absent"}))) for side in sides)
            if before != after:
                found.notes.append(f"{f'{what} {key}'.strip()} differs: REF {before}, NEW {after}")
