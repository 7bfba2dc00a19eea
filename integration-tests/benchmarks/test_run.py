"""The smoke set on this machine: run, resumed, compared with itself and with doctored copies of itself."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from foak_bench.records import load_results
from foak_bench.runner import Runner
from foak_bench.scenarios import read_table
from foak_bench.verdict import judge

SMOKE = read_table().sets["smoke"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def command(script: Callable[[str], ModuleType], scratch: Path) -> Callable[..., int]:
    """`run.py --set smoke` with further options; its exit code."""
    main = script("run").main

    def call(out: Path, *options: str) -> int:
        code: int = main(["--set", "smoke", "--out", str(out), "--scratch", str(scratch), *options])
        return code

    return call


@pytest.fixture(scope="module")
def results(command: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run."""
    out = tmp_path_factory.mktemp("results")
    assert command(out, "--commit", "abc") == 0
    return out


@pytest.fixture
def doctor(results: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that copies the results with one row's figures changed."""

    def change(**figures: Any) -> Path:
        copied = tmp_path / "doctored"
        shutil.copytree(results, copied)
        path = copied / "tiny.full.bf16.2x32" / "foak.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["runs"][0].update(figures)
        path.write_text(json.dumps(content), encoding="utf-8")
        return copied

    return change


def test_every_scenario_has_a_record(results: Path) -> None:
    records = load_results(results)
    assert set(records) == {scenario.name for scenario in SMOKE.scenarios}
    assert {record.commit for record in records.values() if record.runs} == {"abc"}
    for record in records.values():
        if record.status != "measured":
            continue
        work, (figures,) = record.scenario.work, record.runs
        assert len(figures["loss"]) == len(figures["grad_norm"]) == work.warmup + work.steps
        assert figures["tokens"] == work.batch * work.seq * work.steps, "dense sequences are cut to their length"
        assert figures["tokens_per_second"] > 0
        assert figures["peak_allocated_bytes"] > 0
        spread = figures["step_seconds"]
        assert 0 < spread["min"] <= spread["p10"] <= spread["median"] <= spread["p90"] <= spread["max"]
        assert record.versions["torch"]
        assert record.device["type"] == "cpu"


def test_what_cannot_run_or_does_not_fit_has_a_reason_and_no_figures(results: Path) -> None:
    records = load_results(results)
    unsloth = records["tiny.full.bf16.2x32/unsloth"]
    assert (unsloth.status, unsloth.reason, unsloth.runs) == ("skipped", "unsloth is not installed", [])
    large = records["too-large.full.bf16.2x32.gc/plain"]
    assert (large.status, large.runs) == ("does not fit", [])
    assert "allocate" in large.reason


def test_foak_trains_what_plain_trains(results: Path) -> None:
    records = load_results(results)
    assert records["tiny.full.bf16.2x32/foak"].runs[0]["patched"] > 0
    assert records["tiny.full.bf16.2x32/plain"].runs[0]["patched"] is None
    for name, record in records.items():
        if record.runs and not record.scenario.check:
            assert judge(record, records).counts is True, name
            assert record.loss[-1] < record.loss[0]


def test_what_is_finished_is_not_measured_again(
    results: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.json") if path.stem != "unsloth"}
    assert command(results) == 0
    assert "0 measurements to make" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ([], []),
        (["tiny.full.bf16.2x32/plain"], ["tiny.full.bf16.2x32/plain"]),
        (["tiny.full.bf16.2x32/foak"], ["tiny.full.bf16.2x32/foak"]),
    ],
)
def test_a_broken_off_run_goes_on_with_what_is_left(
    results: Path, tmp_path: Path, options: list[str], due: list[str]
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(results, copied)
    for name in options:
        (copied / f"{name}.json").unlink()
    assert [item.scenario.name for item in runner(copied, tmp_path).plan(SMOKE.scenarios, again=False)] == due


def test_more_repeats_and_again_measure_more(results: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(results, copied)
    timed = [s.name for s in SMOKE.scenarios if not s.check and s.row.by != "unsloth" and s.work.model == "tiny"]
    found = runner(copied, tmp_path, repeats=2).plan(SMOKE.scenarios, again=False)
    assert [(item.scenario.name, item.repeat) for item in found] == [(name, 1) for name in timed]
    everything = [s.name for s in SMOKE.scenarios if s.row.by != "unsloth"]
    assert [item.scenario.name for item in runner(copied, tmp_path).plan(SMOKE.scenarios, again=True)] == everything


def runner(out: Path, scratch: Path, repeats: int = 1, timeout: float = 60) -> Runner:
    return Runner(
        out,
        scratch,
        repeats=repeats,
        share=True,
        timeout=timeout,
        devices=0,
        commit=None,
        report=lambda scenario, record: None,
    )


@pytest.mark.parametrize(
    ("worker", "status", "reason"),
    [
        ("raise SystemExit('it broke')", "failed", r"it broke \(exit code 1; its output is in .*plain.log\)"),
        ("import time; time.sleep(60)", "failed", "took longer than 2 s"),
        ("import os; os.kill(os.getpid(), 9)", "does not fit", "the system ended the process"),
    ],
)
def test_a_process_that_ends_badly_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, status: str, reason: str
) -> None:
    monkeypatch.setattr("foak_bench.runner._launcher", lambda gpus: [sys.executable, "-c", worker])
    chosen = [scenario for scenario in SMOKE.scenarios if scenario.name.startswith("tiny.full.bf16.2x32/plain")]
    chosen += [scenario for scenario in SMOKE.scenarios if scenario.name.startswith("tiny.lora-all.amp.2x32.gc/plain")]
    found = runner(tmp_path / "out", tmp_path, timeout=2)
    found.run(found.plan(chosen, again=False))
    records = load_results(tmp_path / "out")
    assert [record.status for record in records.values()] == [status, status]
    assert re.search(reason, records[chosen[0].name].reason)
    left = runner(tmp_path / "out", tmp_path).plan(chosen, again=False)
    assert len(left) == (2 if status == "failed" else 0), "a failure is tried again by the next run"


def test_a_set_or_filter_that_names_nothing_is_refused(
    tmp_path: Path, script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    main = script("run").main
    assert main(["--set", "smoky", "--out", str(tmp_path)]) == 2
    assert main(["--set", "smoke", "--filter", "loar", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "there is no 'smoky'; there are smoke, h200, ragged, full" in " ".join(printed.split())
    assert "no scenario is named like 'loar'" in " ".join(printed.split())


def test_a_filter_keeps_the_runs_that_judge_its_rows(script: Callable[[str], ModuleType]) -> None:
    chosen = script("run").select(read_table().sets["h200"].scenarios, "*.lora-qkvo.*/foak.fused_lora")
    labels = [scenario.name.partition("/")[2] for scenario in chosen]
    assert labels == ["check/fp32", "check/plain", "foak.fused_lora", "check/foak.fused_lora"]
    own = script("run").select(SMOKE.scenarios, "tiny.full*/foak")
    assert [scenario.row.label for scenario in own] == ["fp32", "plain", "foak"], "its check is the row itself"


def test_compared_with_itself_nothing_changed(
    results: Path, script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    assert script("compare").main([str(results), str(results), "--plots", str(tmp_path / "plots")]) == 0
    for name in ("throughput", "memory", "loss"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("figures", "code", "said"),
    [
        ({"tokens_per_second": 1.0}, 1, "regression: tiny.full.bf16.2x32/foak: throughput"),
        ({"peak_allocated_bytes": 2**40}, 1, "regression: tiny.full.bf16.2x32/foak: memory"),
        ({"loss": [6.3, 6.3, 6.9]}, 1, "regression: tiny.full.bf16.2x32/foak: loss"),
        ({"tokens_per_second": 1e9, "peak_allocated_bytes": 2**20}, 0, "better: tiny.full.bf16.2x32/foak: throughput"),
    ],
)
def test_a_regression_fails_and_an_improvement_does_not(
    results: Path,
    doctor: Callable[..., Path],
    script: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
    figures: dict[str, Any],
    code: int,
    said: str,
) -> None:
    assert script("compare").main([str(results), str(doctor(**figures))]) == code
    assert said in capsys.readouterr().out


def test_nothing_to_compare_is_an_error(results: Path, tmp_path: Path, script: Callable[[str], ModuleType]) -> None:
    (tmp_path / "empty").mkdir()
    assert script("compare").main([str(results), str(tmp_path / "empty")]) == 2
