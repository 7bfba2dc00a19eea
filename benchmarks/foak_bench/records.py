"""The record of a scenario: one JSON file below the folder of results, and what its repeats come to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foak_bench.scenarios import Scenario

__all__ = ["DOES_NOT_FIT", "FAILED", "MEASURED", "SKIPPED", "Record", "load_record", "load_results", "path_of"]

MEASURED, DOES_NOT_FIT, SKIPPED, FAILED = "measured", "does not fit", "skipped", "failed"


@dataclass
class Record:
    """What is known about a scenario.

    Attributes:
        scenario: what was asked for.
        status: `measured`, `does not fit`, `skipped` (it cannot run here) or `failed`.
        reason: why it has no figures; empty for a measured one.
        device, versions, commit: where and with what the figures were taken.
        runs: the figures of each repeat.
    """

    scenario: Scenario
    status: str
    reason: str = ""
    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """The median over the repeats of tokens without padding, on all ranks, per second in steps."""
        return statistics.median(run["tokens_per_second"] for run in self.runs)

    @property
    def step_seconds(self) -> dict[str, float]:
        """The median over the repeats of each of median, p10 and p90; the extremes over all of them."""
        spreads = [run["step_seconds"] for run in self.runs]
        found = {name: statistics.median(spread[name] for spread in spreads) for name in ("median", "p10", "p90")}
        return {
            **found,
            "min": min(spread["min"] for spread in spreads),
            "max": max(spread["max"] for spread in spreads),
        }

    @property
    def peak_bytes(self) -> float:
        """The median over the repeats of the most memory allocated (on a CPU: the process's resident set)."""
        return statistics.median(run["peak_allocated_bytes"] for run in self.runs)

    @property
    def reserved_bytes(self) -> float | None:
        """The same of the memory that the allocator held; None on a CPU."""
        held = [run["peak_reserved_bytes"] for run in self.runs]
        return None if None in held else statistics.median(held)

    @property
    def loss(self) -> list[float]:
        """The loss of each step, warm-up included, of the first repeat; every repeat has the same data and seed."""
        return [float("nan") if value is None else value for value in self.runs[0]["loss"]]

    @property
    def grad_norm(self) -> list[float]:
        """The norm of the gradient at each step of the first repeat, before clipping."""
        return [float("nan") if value is None else value for value in self.runs[0]["grad_norm"]]

    def finished(self, repeats: int) -> bool:
        """Whether nothing is left to do: enough repeats, or known not to fit."""
        return self.status == DOES_NOT_FIT or (self.status == MEASURED and len(self.runs) >= repeats)

    def add(self, result: Mapping[str, Any]) -> None:
        """Takes in what a worker found; figures from another device or other versions are dropped first."""
        if result["status"] != MEASURED:
            if not self.runs:
                self.status, self.reason = result["status"], result["reason"]
            return
        if (self.device, self.versions) != (result["device"], result["versions"]):
            self.runs = []
        self.status, self.reason = MEASURED, ""
        self.device, self.versions = dict(result["device"]), dict(result["versions"])
        self.runs.append(dict(result["figures"]))

    def save(self, folder: Path) -> None:
        """Writes the record to its place below `folder`; a reader sees the old one or the new one."""
        path = path_of(folder, self.scenario)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "status": self.status,
            "reason": self.reason,
            "device": self.device,
            "versions": self.versions,
            "commit": self.commit,
            "scenario": self.scenario.to_dict(),
            "runs": self.runs,
        }
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def path_of(folder: Path, scenario: Scenario) -> Path:
    """Where the record of a scenario is kept."""
    return folder / f"{scenario.name}.json"


def load_record(path: Path) -> Record:
    """Reads one record."""
    content = json.loads(path.read_text(encoding="utf-8"))
    scenario = Scenario.from_dict(content.pop("scenario"))
    return Record(scenario=scenario, **content)


def load_results(folder: Path) -> dict[str, Record]:
    """All records below a folder, by name; in the order of their names."""
    records = [load_record(path) for path in sorted(folder.glob("*/**/*.json")) if not path.name.startswith(".")]
    return {record.scenario.name: record for record in records}
