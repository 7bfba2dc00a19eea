"""`foak train` with a LoRA on a GPTQ base: it learns, and its adapter is loaded again."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from gptq_folder import write_gptq
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from foak.core import AccelerationFramework
from foak.core.merge import merge_adapter
from foak.core.train.job import Job
from foak.core.train.runfile import read_run_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "nf4.yaml"
LOADER = {"kernel": "triton_v2", "from_quantized": True}
KERNELS = {
    "base_layer": "auto_gptq",
    "fused_lora": True,
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
    "fast_activation": True,
}


def run_file(base: Path, folder: Path) -> Path:
    """The quickstart's run in 4 bits, on a GPTQ checkpoint."""
    content = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    content["model"]["name_or_path"] = str(base)
    content["data"] = {"train": str(EXAMPLE.parent / "train.jsonl")}
    content["training"] |= {"output_dir": str(folder / "out"), "eval_on_start": False}
    content["acceleration"] = {"plugins": {"peft": {"quantization": {"auto_gptq": LOADER}}}}
    content["acceleration"]["plugins"]["peft"]["quantization"]["fused_ops_and_kernels"] = KERNELS
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_a_run_learns_and_its_adapter_is_reloaded_and_merged(tiny_model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_gptq(AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model), base)
    job = Job(
        read_run_file(run_file(base, tmp_path), ["training.max_steps=6", "training.max_length=96"]), Console(quiet=True)
    )
    job.train()
    result = job.save()
    losses = result.report["loss"]
    assert losses[-1] < losses[0] - 0.05
    assert job.patches is not None
    assert sum(record.rule == "fused_lora" for record in job.patches.patched) == 14

    ids = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    tree = {"plugins": {"peft": {"quantization": {"auto_gptq": LOADER}}}}
    plain = AccelerationFramework(tree).load_model(base, dtype=torch.float32)
    reloaded = PeftModel.from_pretrained(plain, result.folder).eval()
    with torch.no_grad():
        trained = job.trainer.model.eval()(input_ids=ids).logits
        found = reloaded(input_ids=ids).logits
        with reloaded.disable_adapter():
            untrained = reloaded(input_ids=ids).logits
    # Kernels and plain layers sum in another order; the adapter's own effect is hundreds of times larger.
    assert (found - trained).norm() < 0.01 * (found - untrained).norm()

    # Into the model that was quantized: the same as the adapter beside it, up to the rounding of a float32 weight.
    merged = merge_adapter(result.folder, str(tiny_model), tmp_path / "merged")
    assert merged.layers == 14
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), result.folder).eval()
    with torch.no_grad():
        into = AutoModelForCausalLM.from_pretrained(merged.folder).eval()(input_ids=ids).logits
        torch.testing.assert_close(into, beside(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
