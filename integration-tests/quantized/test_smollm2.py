"""A LoRA on SmolLM2-135M-Instruct in NF4 through `foak train`, on a CPU: the example's run, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console

from foak.core.train.job import Job
from foak.core.train.model import load_model
from foak.core.train.runfile import read_run_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "nf4.yaml"


@pytest.mark.slow
def test_smollm2_learns_in_nf4_and_its_adapter_is_reloaded(tmp_path: Path) -> None:
    run = read_run_file(
        EXAMPLE,
        [
            f"training.output_dir={tmp_path}",
            "training.max_steps=8",
            "training.per_device_train_batch_size=2",
            "training.eval_on_start=false",
            "data.eval=null",
        ],
    )
    job = Job(run, Console(quiet=True))
    job.train()
    result = job.save()
    losses = result.report["loss"]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.3
    ids = torch.arange(1000, 1024)[None]
    with torch.no_grad():
        trained = job.trainer.model.train()(input_ids=ids).logits
        base = load_model(run, job.framework).model
        untrained = base.train()(input_ids=ids).logits
        reloaded = PeftModel.from_pretrained(base, result.folder, autocast_adapter_dtype=False)
        found = reloaded.train()(input_ids=ids).logits
    # Kernels and plain layers sum in another order; the adapter's own effect is hundreds of times larger.
    assert (found - trained).norm() < 0.01 * (found - untrained).norm()
