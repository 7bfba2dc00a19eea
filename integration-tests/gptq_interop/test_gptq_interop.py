"""Checkpoints of AutoGPTQ and GPTQModel: decoded bit for bit, equal in logits, trained on with an ordinary adapter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gptq_models import INPUT_IDS, TOLERANCE, dequantized, framework, layers_of, logits_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_weights_are_bit_for_bit_those_that_the_quantizer_decodes(quantized: Path) -> None:
    expected = load_file(quantized / "expected.safetensors")
    expected.pop("logits")
    model = framework().load_model(quantized)
    assert model.dtype is torch.float16
    layers = layers_of(model)
    assert {f"{name}.weight" for name in layers} == set(expected)
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(torch.float16), expected[f"{name}.weight"]), name
        assert layer.bias is None, f"{name}: the bias of zeros beside a layer without one is still there"


def test_logits_are_those_of_the_dequantized_model(quantized: Path) -> None:
    expected = load_file(quantized / "expected.safetensors")["logits"]
    model = framework().load_model(quantized, dtype=torch.float32)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=TOLERANCE)


def test_a_lora_trains_and_loads_in_plain_peft(quantized: Path, tmp_path: Path) -> None:
    accelerated = framework()
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(accelerated.load_model(quantized, dtype=torch.float32), config)
    accelerated.apply(model)
    stored = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 7 * 2
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(p, stored[name]) for name, p in model.named_parameters() if name in stored)

    model.eval()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert written["base_model_name_or_path"] == str(quantized)
    assert {name.rpartition(".")[2] for name in written["target_modules"]} == PROJECTIONS
    base = accelerated.load_model(quantized, dtype=torch.float32)
    plain = PeftModel.from_pretrained(dequantized(base), tmp_path).eval()
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=0, atol=TOLERANCE)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    torch.testing.assert_close(logits_of(again), logits_of(model), rtol=0, atol=TOLERANCE)
