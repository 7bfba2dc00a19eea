"""The benchmarks' README shows the results that are in the repository, and the script that measures kernels runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("report")


def test_the_readme_shows_the_results(report: ModuleType) -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.replaced(text) == text, "run: python benchmarks/report.py --write"


def test_a_missing_mark_is_named(report: ModuleType) -> None:
    begin, _ = report.marks("lora")
    text = report.README.read_text(encoding="utf-8").replace(begin, "")
    with pytest.raises(ValueError, match=begin):
        report.replaced(text)


def test_every_op_is_measured_and_none_was_too_far_from_fp64(report: ModuleType) -> None:
    result = json.loads(report.KERNEL_RESULTS.read_text(encoding="utf-8"))
    ours = {figure["op"] for figure in result["figures"] if figure["implementation"] == "foak"}
    assert {"rms_norm", "layer_norm", "rope", "swiglu", "geglu (tanh)", "cross_entropy"} <= ours
    assert any(op.startswith("linear_cross_entropy") for op in ours)
    assert result["faults"] == []


def test_the_kernels_script_runs_on_tiny_sizes(tmp_path: Path, report: ModuleType) -> None:
    out = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["faults"] == []
    for table in (report.kernel_table(result), report.host_table(result)):
        for op in ("rms_norm", "dequantize_nf4, double quantization", "dequantize_gptq, 4 bits"):
            assert f"| {op} | " in table


def test_a_call_that_costs_the_host_too_much_is_out_of_its_budget(report: ModuleType) -> None:
    figures = [
        {"op": op, "part": part, "implementation": "foak", "host": cost}
        for op, forward, both in (("quick", 40, 100), ("slow", 41, 100), ("slow backward", 40, 101))
        for part, cost in (("forward", forward), ("backward", None), ("both", both))
    ]
    table = report.host_table({"device": "x", "torch": "y", "figures": figures})
    verdicts = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in table.splitlines()[4:]}
    assert verdicts == {"quick": "yes |", "slow": "no |", "slow backward": "no |"}
