"""`foak train` with the plugins that the quickstart names gives the losses of the same run without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from foak.core.train.job import Job
from foak.core.train.runfile import read_run_file

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.mark.parametrize("peft", ["lora", "full"])
@pytest.mark.parametrize("fast_loss", ["true", "fused_linear"])
def test_losses_agree_step_by_step(tiny_model: Path, tmp_path: Path, peft: str, fast_loss: str) -> None:
    overrides = [
        f"model.name_or_path={tiny_model}",
        "training.max_steps=6",
        "training.gradient_accumulation_steps=2",
        f"acceleration.plugins.training.fused_ops_and_kernels.fast_loss={fast_loss}",
        *(["peft=null"] if peft == "full" else []),
    ]
    reports = {}
    for name, extra in {"plain": ["acceleration=null"], "foak": []}.items():
        run = read_run_file(QUICKSTART / "run.yaml", [*overrides, *extra, f"training.output_dir={tmp_path / name}"])
        job = Job(run, Console(quiet=True))
        job.train()
        job.save()
        reports[name] = json.loads((tmp_path / name / "foak_report.json").read_text(encoding="utf-8"))
    assert reports["plain"]["patches"] is None
    assert reports["foak"]["patches"]["patched"] > 0
    assert reports["foak"]["loss"] == pytest.approx(reports["plain"]["loss"], abs=1e-5)
    assert reports["foak"]["grad_norm"] == pytest.approx(reports["plain"]["grad_norm"], rel=1e-3)
    held_out = [[entry["loss"] for entry in report["eval_loss"]] for report in reports.values()]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5)
    assert reports["foak"]["tokens"] == reports["plain"]["tokens"]


def test_the_quickstart_run_file_is_plain_yaml() -> None:
    content = yaml.safe_load((QUICKSTART / "run.yaml").read_text(encoding="utf-8"))
    assert list(content) == ["model", "data", "peft", "training", "acceleration"]
