"""`foak merge`: the merged model computes what the adapted one does; what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from foak.core.cli import app as cli

IDS = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def base(folder: Path, tiny_model: Path, dtype: torch.dtype, **changes: Any) -> Path:
    """The tiny model's configuration, changed, with random weights in `dtype`, and its tokenizer."""
    config = LlamaForCausalLM.from_pretrained(tiny_model).config
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def adapter(folder: Path, model: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """An adapter whose every tensor is random, so that it changes what the model says."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=dtype), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)
    adapted.save_pretrained(folder)
    return folder


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields})


def merge(*argv: str | Path) -> int:
    return cli.main(["merge", *(str(item) for item in argv)])


def assert_same_outputs(merged: Path, model: Path, trained: Path, dtype: torch.dtype) -> None:
    """Against the unmerged model in float64, so that only the merged weights' rounding is between the two.

    Each weight is rounded once, by half a unit in the last place: a relative error of u a weight, independent of each
    other, so that of an output is near u as well; 8 u leaves room for what two layers make of it.
    """
    unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), trained)
    found = AutoModelForCausalLM.from_pretrained(merged)
    assert found.dtype is dtype
    expected, actual = logits(unmerged.double()), logits(found.double())
    plain = logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64))
    error = (actual - expected).norm() / expected.norm()
    assert error < 8 * torch.finfo(dtype).eps / 2
    assert (plain - expected).norm() / expected.norm() > 20 * error  # the adapter matters


CASES: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "lora bias": lambda: lora(lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "ranks": lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 16}),
    "head": lambda: lora(target_modules=["q_proj", "lm_head"]),
    "saved head": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": lambda: IA3Config(task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_model_computes_what_the_adapted_one_does(
    name: str, tied: bool, tiny_model: Path, tmp_path: Path
) -> None:
    model = base(tmp_path / "model", tiny_model, torch.bfloat16, tie_word_embeddings=tied, attention_bias=True)
    trained = adapter(tmp_path / "adapter", model, CASES[name](), torch.bfloat16)
    out = tmp_path / "merged" / "model"
    assert merge(trained, "--into", model, out) == 0
    assert_same_outputs(out, model, trained, torch.bfloat16)
    assert {file.suffix for file in out.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(out)("abc") == AutoTokenizer.from_pretrained(model)("abc")
    assert [entry.name for entry in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_of_the_merged_weights_can_be_chosen(dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    trained = adapter(tmp_path / "adapter", tiny_model, lora())
    out = tmp_path / "merged"
    assert merge(trained, "--into", tiny_model, out, "--dtype", dtype) == 0
    assert_same_outputs(out, tiny_model, trained, getattr(torch, dtype))


@pytest.fixture
def trained(tiny_model: Path, tmp_path: Path) -> Path:
    return adapter(tmp_path / "adapter", tiny_model, lora(target_modules=["q_proj", "v_proj"]))


def refused(capsys: pytest.CaptureFixture[str], code: int, *argv: str | Path) -> str:
    capsys.readouterr()
    assert merge(*argv) == code
    *progress, sentence = capsys.readouterr().err.strip().splitlines()  # transformers shows a bar while it loads
    assert sentence.startswith("foak: error: ")
    assert not any("rror" in line for line in progress)
    return sentence


def test_what_is_there_is_not_written_over(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    out.mkdir()
    assert "OUT is" in refused(capsys, 2, trained, "--into", tiny_model, out)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_without_its_files_is_refused(
    missing: str, trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / missing).unlink()
    assert f"a folder without {missing}" in refused(capsys, 2, trained, "--into", tiny_model, tmp_path / "out")


def test_files_that_are_cut_off_are_named(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = trained / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    assert "adapter_model.safetensors is cut off" in refused(capsys, 2, trained, "--into", tiny_model, tmp_path / "out")
    (trained / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not JSON" in refused(capsys, 2, trained, "--into", tiny_model, tmp_path / "out")


def test_models_that_do_not_fit_are_refused_by_the_name_of_the_tensor(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wider = base(tmp_path / "wider", tiny_model, torch.float32, hidden_size=64)
    sentence = refused(capsys, 1, trained, "--into", wider, tmp_path / "out")
    assert "does not fit MODEL" in sentence
    assert "size mismatch" in sentence
    shorter = base(tmp_path / "shorter", tiny_model, torch.float32, num_hidden_layers=1)
    sentence = refused(capsys, 1, trained, "--into", shorter, tmp_path / "out")
    assert "has no place for base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in sentence
    longer = base(tmp_path / "longer", tiny_model, torch.float32, num_hidden_layers=3)
    sentence = refused(capsys, 1, trained, "--into", longer, tmp_path / "out")
    assert "wants what is not there, base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight" in sentence
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_lost_a_tensor_is_refused(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(trained / "adapter_model.safetensors")
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, trained / "adapter_model.safetensors")
    assert lost in refused(capsys, 1, trained, "--into", tiny_model, tmp_path / "out")


def test_an_adapter_with_nan_is_refused(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(trained / "adapter_model.safetensors")
    tensors[min(tensors)].fill_(float("nan"))
    save_file(tensors, trained / "adapter_model.safetensors")
    assert "NaN" in refused(capsys, 1, trained, "--into", tiny_model, tmp_path / "out")


def test_a_quantized_model_is_no_place_to_merge_into(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = shutil.copytree(tiny_model, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    sentence = refused(capsys, 1, trained, "--into", quantized, tmp_path / "out")
    assert "whose weights are quantized: name the unquantized model" in sentence


def test_what_peft_cannot_merge_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = adapter(tmp_path / "prompt", tiny_model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    sentence = refused(capsys, 1, prompt, "--into", tiny_model, tmp_path / "out")
    assert "PROMPT_TUNING, which PEFT cannot merge" in sentence
    biased = adapter(tmp_path / "biased", tiny_model, lora(lora_bias=True))  # on layers that have no bias
    sentence = refused(capsys, 1, biased, "--into", tiny_model, tmp_path / "out")
    assert "which PEFT does not merge: Impossible to merge" in sentence


def test_names_that_lead_nowhere(
    trained: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert "there is no such folder" in refused(capsys, 2, trained, "--into", tmp_path / "nowhere", out)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither config.json nor a GGUF file" in refused(capsys, 2, trained, "--into", empty, out)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "MODEL is 'nobody/nothing', which cannot be loaded" in refused(
        capsys, 2, trained, "--into", "nobody/nothing", out
    )
    assert "allowed: auto, bfloat16" in refused(capsys, 2, trained, "--into", tiny_model, out, "--dtype", "int8")
