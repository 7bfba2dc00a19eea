"""What a comparison calls a regression, an improvement, or neither; and which rows count."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
from foak_bench.comparison import Thresholds, compare
from foak_bench.records import Record
from foak_bench.scenarios import Row, Scenario, Work
from foak_bench.tables import full_table, kernel_contribution_table, lora_table
from foak_bench.verdict import ROUNDING, judge

WORK = Work(model="m", steps=2, warmup=1)
LOSS = (4.0, 3.0, 2.0)


def record(label: str, speed: float = 100.0, loss: Sequence[float] = LOSS, gib: float = 10.0) -> Record:
    by, _, kernel = label.partition(".")
    row = Row(label, "plain" if label == "fp32" else by, {kernel: True} if kernel else {})
    precision = "fp32" if label == "fp32" else "bf16"
    work = Work(model="m", steps=2, warmup=1, precision=precision)
    figures = {
        "tokens_per_second": speed,
        "step_seconds": dict.fromkeys(("median", "p10", "p90", "min", "max"), 1.0),
        "peak_allocated_bytes": gib * 2**30,
        "peak_reserved_bytes": gib * 2**30,
        "loss": list(loss),
        "grad_norm": [1.0, 1.0, 1.0],
    }
    return Record(
        Scenario(WORK.name, work, row, {"type": "llama"}, check=label == "fp32"),
        "measured",
        device={"name": "G", "processes": 1},
        versions={"torch": "1"},
        runs=[figures],
    )


def by_name(*records: Record) -> dict[str, Record]:
    return {found.scenario.name: found for found in records}


def doctored(change: Callable[[Record], None]) -> dict[str, Record]:
    found = record("foak")
    change(found)
    return by_name(found)


def faster(by: float) -> Callable[[Record], None]:
    return lambda found: found.runs[0].update(tokens_per_second=100.0 * by)


def larger(by: float) -> Callable[[Record], None]:
    return lambda found: found.runs[0].update(peak_allocated_bytes=10 * 2**30 * by)


def losing(*loss: float) -> Callable[[Record], None]:
    return lambda found: found.runs[0].update(loss=list(loss))


@pytest.mark.parametrize(
    ("change", "worse", "better"),
    [
        (faster(1.0), set(), set()),
        (faster(0.96), set(), set()),
        (faster(0.94), {"throughput"}, set()),
        (faster(1.06), set(), {"throughput"}),
        (larger(1.01), set(), set()),
        (larger(1.03), {"memory"}, set()),
        (larger(0.9), set(), {"memory"}),
        (losing(4.0, 3.0, 2.1), {"loss", "loss curve"}, set()),
        (losing(4.0, 3.1, 2.0), {"loss curve"}, set()),
        (losing(3.0, 2.0, 1.0), set(), {"loss", "loss curve"}),
        (losing(4.0, 3.0, math.nan), {"loss", "loss curve"}, set()),
        (losing(4.0, math.nan, 2.0), {"loss curve"}, set()),
    ],
)
def test_thresholds(change: Callable[[Record], None], worse: set[str], better: set[str]) -> None:
    found = compare(by_name(record("foak")), doctored(change), Thresholds())
    assert {d.metric for d in found.differences if d.outcome == "worse"} == worse
    assert {d.metric for d in found.differences if d.outcome == "better"} == better
    assert len(found.regressions) == len(worse)
    assert {d.metric for d in found.outliers} == worse | better


def test_a_threshold_is_an_option_and_is_checked() -> None:
    slower = doctored(faster(0.94))
    assert not compare(by_name(record("foak")), slower, Thresholds(throughput=0.1)).regressions
    with pytest.raises(ValueError, match="--memory must lie between 0 and 1"):
        Thresholds(memory=2.0)


def test_what_no_longer_fits_is_a_regression_and_what_is_missing_is_named() -> None:
    def fails(found: Record) -> None:
        found.status, found.reason, found.runs = "does not fit", "no memory", []

    both = by_name(record("plain"), record("foak"))
    found = compare(both, {**by_name(record("liger")), **doctored(fails)}, Thresholds())
    assert found.regressions == [
        f"{WORK.name}/foak: was measured in REF, and in NEW does not fit (no memory)",
    ]
    assert f"{WORK.name}/plain is missing in NEW" in found.notes
    assert f"{WORK.name}/liger is missing in REF" in found.notes


def test_other_devices_and_versions_are_named() -> None:
    new = record("foak")
    new.device, new.versions = {"name": "H", "processes": 1}, {"torch": "2", "extra": "3"}
    notes = compare(by_name(record("foak")), by_name(new), Thresholds()).notes
    assert notes == [
        "device differs: REF 1 × G, NEW 1 × H",
        "version of extra differs: REF absent, NEW 3",
        "version of torch differs: REF 1, NEW 2",
    ]


def test_a_changed_definition_is_not_compared() -> None:
    new = record("foak")
    new.scenario = copy.replace(new.scenario, geometry={}) if hasattr(copy, "replace") else _other_geometry(new)
    found = compare(by_name(record("foak")), by_name(new), Thresholds())
    assert found.differences == []
    assert "defined differently" in found.notes[0]


def _other_geometry(found: Record) -> Scenario:
    scenario = found.scenario
    return Scenario(scenario.group, scenario.work, scenario.row, {}, scenario.check)


def test_a_row_counts_if_its_loss_is_as_near_to_float32_as_plains() -> None:
    plain = record("plain", loss=(4.0, 3.0, 2.1))  # 0.1 off
    slack = ROUNDING * 4.0
    for step, counts in ((2.1, True), (1.9, True), (2.1 + 0.9 * slack, True), (2.1 + 1.1 * slack, False)):
        records = by_name(record("fp32"), plain, record("foak", loss=(4.0, 3.0, step)))
        assert judge(records[f"{WORK.name}/foak"], records).counts is counts
    records = by_name(record("fp32"), plain, record("foak", loss=(4.0, 3.0, math.nan)))
    assert judge(records[f"{WORK.name}/foak"], records).counts is False


def test_a_row_without_a_float32_run_is_unchecked() -> None:
    records = by_name(record("plain"), record("foak"))
    verdict = judge(records[f"{WORK.name}/foak"], records)
    assert (verdict.counts, str(verdict)) == (None, "unchecked: no float32 run")
    records = by_name(record("fp32"), record("foak", loss=(4.0, 3.0, 2.25)))
    verdict = judge(records[f"{WORK.name}/foak"], records)
    assert (verdict.counts, str(verdict)[:14]) == (None, "0.2500 (0.0%),"), "how far it is off is shown all the same"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_nothing_is_held_against_what_is_no_number(wrong: float) -> None:
    plain = record("plain", loss=(4.0, 3.0, wrong))
    records = by_name(record("fp32"), plain, record("foak"))
    for label in ("plain", "foak"):
        verdict = judge(records[f"{WORK.name}/{label}"], records)
        assert (verdict.counts, verdict.reason) == (None, "plain's loss is not finite")
    records = by_name(record("fp32", loss=(4.0, 3.0, wrong)), record("plain"), record("foak"))
    assert judge(records[f"{WORK.name}/foak"], records).reason.startswith("float32's losses")


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0])
def test_a_float32_gradient_norm_that_divides_nothing_gives_no_verdict(norm: float) -> None:
    precise = record("fp32")
    precise.runs[0]["grad_norm"][1] = norm
    records = by_name(precise, record("plain"), record("foak"))
    verdict = judge(records[f"{WORK.name}/foak"], records)
    assert verdict.counts is None
    assert str(verdict).startswith("unchecked: float32's losses or gradient norms")


def test_losing_the_right_loss_is_a_regression() -> None:
    plain = record("plain", loss=(4.0, 3.0, 2.001))
    reference = by_name(record("fp32"), plain, record("foak"))
    new = by_name(record("fp32"), plain, record("foak", loss=(4.0, 3.0, 1.985)))  # within 1 %, but off
    found = compare(reference, new, Thresholds())
    assert len(found.regressions) == 1
    assert "does not count" in found.regressions[0]


def test_tables_show_gains_only_of_rows_that_count() -> None:
    records = by_name(
        record("fp32"),
        record("plain"),
        record("foak", speed=150.0),
        record("liger", speed=200.0, loss=(5.0, 4.0, 3.0)),
        record("foak.fast_loss", speed=110.0, gib=9.0),
    )
    rows = {
        cells[2].strip(): [cell.strip() for cell in cells[3:]]
        for line in full_table({"g": records}).splitlines()
        if (cells := line.split("|"))[0] == "" and len(cells) > 2
    }
    assert rows["foak"][:2] == ["**150**", "+50.0%"]
    assert rows["liger"][:2] == ["200", "does not count"]
    assert "foak.fast_loss" not in rows, "one kernel by itself has a table of its own"
    assert rows["plain"][:2] == ["100", ""]
    contribution = kernel_contribution_table({"g": records})
    assert "| fast_loss | 110 | +10.0% | 9.0 | -10.0% |" in contribution
    assert "| none | 100 |  | 10.0 |  |" in contribution
    assert lora_table({"g": records}) == "There are no results for this table yet."
