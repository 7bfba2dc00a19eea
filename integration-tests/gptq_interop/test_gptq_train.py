"""`foak train` on a GPTQ checkpoint learns what plain `foak train` learns on the dequantized model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gptq_models import TOLERANCE, dequantized, framework, logits_of
from peft import PeftModel
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from foak.core.train.job import FINAL_FOLDER, Job
from foak.core.train.runfile import read_run_file

STEPS = 10
FUSED = {
    "base_layer": "auto_gptq",
    "fused_lora": True,
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
}


@pytest.fixture
def bases(quantized: Path, tmp_path: Path) -> dict[str, Path]:
    """The checkpoint, and the dequantized model that it stands for, each with a tokenizer of whole words."""
    folders = {"gptq": tmp_path / "gptq", "plain": tmp_path / "plain"}
    shutil.copytree(quantized, folders["gptq"])
    dequantized(framework().load_model(quantized, dtype=torch.float32)).save_pretrained(folders["plain"])
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(160)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2", pad_token="w0")
    for folder in folders.values():
        fast.save_pretrained(folder)
    rows = [{"text": " ".join(f"w{3 + k * k % 20}" for k in range(12 + n % 5))} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folders


def run_job(folder: Path, base: Path, quantization: dict[str, Any] | None, output: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "model": {"name_or_path": str(base), "dtype": "float32"},
        "data": {"train": "train.jsonl"},
        "peft": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"},
        "training": {
            "output_dir": str(folder / output),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 2e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": False,
            "gradient_checkpointing": True,
        },
    }
    if quantization is not None:
        content["acceleration"] = {"plugins": {"peft": {"quantization": quantization}}}
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    job = Job(read_run_file(path), Console(quiet=True))
    job.train()
    report: dict[str, Any] = job.save().report
    return report


@pytest.mark.parametrize("fused", [False, True])
def test_a_run_learns_what_the_dequantized_model_learns(bases: dict[str, Path], fused: bool, tmp_path: Path) -> None:
    section: dict[str, Any] = {"auto_gptq": {"kernel": "triton_v2", "from_quantized": True}}
    if fused:
        section["fused_ops_and_kernels"] = FUSED
    report = run_job(tmp_path, bases["gptq"], section, "foak")
    plain = run_job(tmp_path, bases["plain"], None, "dense")
    assert report["loss"][-1] < report["loss"][0] - 0.2
    # float32 on both sides; ten steps of AdamW make a little more of it.
    assert report["loss"] == pytest.approx(plain["loss"], abs=2e-4)
    if fused:
        lora = [record for record in report["patches"]["records"] if record["rule"] == "fused_lora"]
        assert len(lora) == 7
        assert {record["outcome"] for record in lora} == {"patched"}

    adapter = tmp_path / "foak" / FINAL_FOLDER
    model = PeftModel.from_pretrained(framework().load_model(bases["gptq"], dtype=torch.float32), adapter)
    dense = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases["plain"]), adapter)
    assert any(parameter.abs().max() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    torch.testing.assert_close(logits_of(model.eval()), logits_of(dense.eval()), rtol=0, atol=TOLERANCE)
