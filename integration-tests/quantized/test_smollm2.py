"""A LoRA on SmolLM2-135M-Instruct through `foak train`, on a CPU, in NF4 and in GPTQ: the example's run, shortened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gptq_folder import write_gptq
from peft import PeftModel
from rich.console import Console

from foak.core.train.job import Job
from foak.core.train.model import load_model
from foak.core.train.runfile import RunFile, read_run_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "nf4.yaml"


SHORT = (
    "training.max_steps=8",
    "training.per_device_train_batch_size=2",
    "training.eval_on_start=false",
    "data.eval=null",
)


def run_file(base: str, folder: Path) -> RunFile:
    """The example's run with fused LoRA: in NF4, or with the base `auto_gptq` on a checkpoint written for it."""
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    content["data"] = {"train": str(EXAMPLE.parent / "train.jsonl")}
    quantization = content["acceleration"]["plugins"]["peft"]["quantization"]
    quantization["fused_ops_and_kernels"] |= {"base_layer": base, "fused_lora": True, "fast_activation": True}
    if base == "auto_gptq":
        del quantization["bitsandbytes"]
        quantization["auto_gptq"] = {"kernel": "triton_v2", "from_quantized": True}
        dense = load_model(read_run_file(EXAMPLE, ["acceleration=null"]), None)
        # 64 divides the inputs of every layer, which are 576 and 1536.
        write_gptq(dense.model, dense.tokenizer, folder / "base", group_size=64)
        content["model"]["name_or_path"] = str(folder / "base")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return read_run_file(path, [f"training.output_dir={folder / 'out'}", *SHORT])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bitsandbytes", "auto_gptq"])
def test_smollm2_learns_and_its_adapter_is_reloaded(base: str, tmp_path: Path) -> None:
    run = run_file(base, tmp_path)
    job = Job(run, Console(quiet=True))
    job.train()
    result = job.save()
    losses = result.report["loss"]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.3
    fused = [record for record in result.report["patches"]["records"] if record["rule"] == "fused_lora"]
    assert [record["outcome"] for record in fused] == ["patched"] * 210
    ids = torch.arange(1000, 1024)[None]
    with torch.no_grad():
        trained = job.trainer.model.train()(input_ids=ids).logits
        plain = load_model(run, job.framework).model
        untrained = plain.train()(input_ids=ids).logits
        reloaded = PeftModel.from_pretrained(plain, result.folder, autocast_adapter_dtype=False)
        found = reloaded.train()(input_ids=ids).logits
    # Kernels and plain layers sum in another order; the adapter's own effect is hundreds of times larger.
    assert (found - trained).norm() < 0.01 * (found - untrained).norm()
