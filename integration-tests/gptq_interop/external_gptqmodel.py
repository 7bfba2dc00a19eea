"""`use_external_lib: true`: GPTQModel's layers, trained on, and read by fused ops where they keep the format.

Runs in GPTQModel's own environment, by `nox -s gptq-interop`; its name keeps it out of the session `tests`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gptq_models import INPUT_IDS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from foak.core import AccelerationFramework, UnsupportedError
from foak.kernels.dense_weight import dense_weight_of

# On a CPU GPTQModel gives 4-bit layers a kernel that repacks them.
KEPT = "whose weight is not known to be a matrix"


def framework(**fused: object) -> AccelerationFramework:
    quantization: dict[str, object] = {"auto_gptq": {"use_external_lib": True}}
    if fused:
        quantization["fused_ops_and_kernels"] = {"base_layer": "auto_gptq", **fused}
    return AccelerationFramework({"plugins": {"peft": {"quantization": quantization}}})


def test_its_layers_are_read_bit_for_bit_or_not_at_all(quantized: Path) -> None:
    if quantized.name.endswith("dynamic"):
        with pytest.raises(UnsupportedError, match=r"settings for single layers.*use_external_lib to false"):
            framework().load_model(quantized, dtype=torch.float16)
        return
    expected = load_file(quantized / "expected.safetensors")
    model = framework().load_model(quantized, dtype=torch.float16)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    assert len(layers) == 7
    for name, layer in layers.items():
        how = dense_weight_of(layer)
        assert (how is None) == ("4bit" in quantized.name), type(layer)
        if how is not None:
            assert how.refusal(layer) is None
            found = how.decode(layer, torch.float16, None)
            assert torch.equal(found, type(layer).dequantize_weight(layer).t())
            assert torch.equal(found, expected[f"{name}.weight"])


def test_a_lora_trains_and_is_fused_where_the_weight_is_known(quantized: Path) -> None:
    if quantized.name.endswith("dynamic"):
        return
    accelerated = framework(fused_lora=True)
    base = accelerated.load_model(quantized, dtype=torch.float32)
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")).train()
    records = [record for record in accelerated.apply(model, strict=False).records if record.rule == "fused_lora"]
    assert len(records) == 7
    kept = [KEPT in record.reason for record in records]
    assert kept == ["4bit" in quantized.name] * 7
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
