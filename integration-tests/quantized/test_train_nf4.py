"""`foak train` with a LoRA on an NF4 base: it learns, with kernels as without, and its adapter fits other loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from foak.core import AccelerationFramework
from foak.core.cli.explain import build_on_meta, find_model_config
from foak.core.merge import merge_adapter
from foak.core.train.job import Job
from foak.core.train.runfile import read_run_file
from foak.quantized_peft.bitsandbytes.layers import LINEAR_4BIT

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart" / "nf4.yaml"
KERNELS = {
    "base_layer": "bitsandbytes",
    "fused_lora": True,
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
    "fast_activation": True,
}
IDS = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(0))


def job(folder: Path, model: Path, quantization: dict[str, Any], *overrides: str) -> Job:
    """The example's run on the tiny model: its data, its adapter, six steps."""
    content = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    content["data"] = {"train": str(EXAMPLE.parent / "train.jsonl")}
    content["acceleration"] = {"plugins": {"peft": {"quantization": quantization}}}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    settings = {
        "model.name_or_path": model,
        "training.output_dir": folder / "out",
        "training.max_steps": 6,
        "training.max_length": 96,
        "training.eval_on_start": "false",
    }
    return Job(
        read_run_file(path, [*(f"{key}={value}" for key, value in settings.items()), *overrides]), Console(quiet=True)
    )


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.train()(input_ids=IDS).logits  # no dropout; in evaluation some CPUs repack 4-bit weights
    return found


def test_a_run_learns_and_its_adapter_goes_into_a_quantized_and_into_a_plain_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = job(tmp_path, tiny_model, {"bitsandbytes": {"quant_type": "nf4"}, "fused_ops_and_kernels": KERNELS})
    run.train()
    result = run.save()
    losses = result.report["loss"]
    assert losses[-1] < losses[0] - 0.05
    assert {parameter.dtype for parameter in run.trainer.model.parameters()} <= {
        torch.uint8,
        torch.float32,
        torch.bfloat16,  # the adapter, which TRL turns to bfloat16 on a quantized base
    }
    trained = logits(run.trainer.model)

    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {"quant_type": "nf4"}}}}}
    base = AccelerationFramework(tree).load_model(tiny_model, dtype=torch.float32)
    reloaded = PeftModel.from_pretrained(base, result.folder, autocast_adapter_dtype=False)
    # The kernels round a product with the adapter in other places: within a few units of the adapter's bfloat16.
    torch.testing.assert_close(logits(reloaded), trained, rtol=0, atol=8 * 2**-9 * trained.abs().max().item())

    # Into the plain model: the same as the adapter beside it, up to the rounding of a float32 weight.
    merged = merge_adapter(result.folder, str(tiny_model), tmp_path / "merged")
    assert merged.dtype == "float32"
    assert merged.layers == 14
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    unmerged = PeftModel.from_pretrained(plain, result.folder)
    found = logits(AutoModelForCausalLM.from_pretrained(merged.folder))
    torch.testing.assert_close(found, logits(unmerged), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_kernels_leave_the_losses_as_they_are(tiny_model: Path, tmp_path: Path, quant_type: str) -> None:
    losses = []
    for kernels in (None, KERNELS):
        quantization: dict[str, Any] = {"bitsandbytes": {"quant_type": quant_type}}
        if kernels is not None:
            quantization["fused_ops_and_kernels"] = kernels
        folder = tmp_path / ("plain" if kernels is None else "kernels")
        folder.mkdir()
        run = job(folder, tiny_model, quantization)
        run.train()
        losses.append(run.save().report["loss"])
    # The adapter is in bfloat16: its products are rounded by a relative 2^-9, in other places by the kernels.
    assert losses[1] == pytest.approx(losses[0], rel=2**-9)


def test_fused_lora_takes_every_layer_of_an_nf4_base(tiny_model: Path, tmp_path: Path) -> None:
    run = job(tmp_path, tiny_model, {"bitsandbytes": {"quant_type": "nf4"}, "fused_ops_and_kernels": KERNELS})
    assert run.patches is not None
    taken = [record for record in run.patches.patched if "lora" in record.rule]
    assert sum(record.module.endswith(("_proj",)) for record in taken) == 14


def test_int8_is_recognised_and_kept_with_the_reason(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, quantization_config=BitsAndBytesConfig(load_in_8bit=True), dtype=torch.float32
    )
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    tree = {"plugins": {"training": {"fused_ops_and_kernels": {"fused_lora": "auto"}}}}
    report = AccelerationFramework(tree).apply(adapted)
    kept = [record for record in report.kept if record.module.endswith("_proj")]
    assert len(kept) == 14
    assert all("rounds the inputs to 8 bits" in record.reason for record in kept)
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02


def test_a_model_on_the_meta_device_is_explained_under_the_same_configuration(tiny_model: Path) -> None:
    # Without `base_layer`, which asks for a model that is quantized already.
    kernels = {name: value for name, value in KERNELS.items() if name != "base_layer"}
    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {}, "fused_ops_and_kernels": kernels}}}}
    model = build_on_meta(find_model_config(str(tiny_model)))
    report = AccelerationFramework(tree).apply(model, strict=False)
    assert {record.rule for record in report.patched} >= {"rms_norm", "rope", "swiglu"}


def test_the_example_is_a_run_file_that_trains(tiny_model: Path, tmp_path: Path) -> None:
    settings = [
        f"model.name_or_path={tiny_model}",
        f"training.output_dir={tmp_path / 'out'}",
        "training.max_steps=1",
        "training.max_length=64",
        "training.eval_on_start=false",
        "data.eval=null",
    ]
    run = Job(read_run_file(EXAMPLE, settings), Console(quiet=True))
    run.train()
    assert run.trainer.model.is_loaded_in_4bit
    assert run.save().report["loss"][0] > 0


def test_a_gguf_file_is_dequantized_and_then_quantized(tmp_path: Path) -> None:
    model = _gguf(tmp_path / "tiny.gguf")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=model.name)
    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {"quant_type": "nf4"}}}}}
    found = AccelerationFramework(tree).load_model(tmp_path, gguf_file=model.name, dtype=torch.bfloat16)
    assert found.is_loaded_in_4bit
    assert found.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(found.model.embed_tokens.weight, dense.model.embed_tokens.weight.bfloat16())
    layer, original = found.model.layers[0].mlp.up_proj, dense.model.layers[0].mlp.up_proj.weight
    weight = LINEAR_4BIT.decode(layer, torch.float32, None)
    # Half of nf4's widest step, of each block's largest value.
    assert (weight - original).abs().max() < 0.16 * original.abs().max()
    assert (weight - original).norm() < 0.15 * original.norm()


def _gguf(path: Path) -> Path:
    """A llama of one layer in GGUF, whose tensors are random."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_vocab_size, 64),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 64),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_rope_freq_base, 10000.0),
    ):
        add(value)
    shapes = {
        "token_embd.weight": (64, 64),
        "output.weight": (64, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (128, 64),
        "blk.0.ffn_up.weight": (128, 64),
        "blk.0.ffn_down.weight": (64, 128),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(scale=0.1, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
