"""The benchmarks' README shows the results that are in the repository, and the script that makes them runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foak_benchmarks_report", BENCHMARKS / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_the_results(report: ModuleType) -> None:
    text = report.README.read_text(encoding="utf-8")
    assert report.BEGIN in text
    assert report.replaced(text) == text, "run: python benchmarks/report.py --write"


def test_every_op_is_measured_and_none_was_too_far_from_fp64(report: ModuleType) -> None:
    result = json.loads(report.RESULTS.read_text(encoding="utf-8"))
    ours = {figure["op"] for figure in result["figures"] if figure["implementation"] == "foak"}
    assert {"rms_norm", "layer_norm", "rope", "swiglu", "geglu (tanh)", "cross_entropy"} <= ours
    assert any(op.startswith("linear_cross_entropy") for op in ours)
    assert result["faults"] == []


def test_the_script_runs_on_tiny_sizes(tmp_path: Path, report: ModuleType) -> None:
    out = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--tiny", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert "rms_norm" in report.kernel_table(json.loads(out.read_text(encoding="utf-8")))
