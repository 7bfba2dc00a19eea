"""The plugin loads 4-bit weights through transformers, trains a LoRA on them, and refuses what it does not serve."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from foak.core import AccelerationFramework, ConfigError, UnsupportedError
from foak.quantized_peft.plugin import QuantizedPeftPlugin

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def framework(section: dict[str, object] | None = None, name: str = "bitsandbytes") -> AccelerationFramework:
    tree = {"plugins": {"peft": {"quantization": {name: {"quant_type": "nf4"} if section is None else section}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_loads_four_bit_weights_of_the_type_asked_for(checkpoint: Path, quant_type: str, double_quant: bool) -> None:
    model = framework({"quant_type": quant_type, "double_quant": double_quant}).load_model(
        checkpoint, dtype=torch.bfloat16
    )
    projections = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(projections) == 2 * 7
    for projection in projections:
        assert projection.weight.dtype == torch.uint8
        assert projection.weight.quant_state.quant_type == quant_type
        assert projection.weight.quant_state.nested is double_quant
        assert projection.compute_dtype == torch.bfloat16
    assert type(model.lm_head) is torch.nn.Linear
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_dequantized_weights_are_near_the_originals(checkpoint: Path) -> None:
    # A 4-bit code with a scale per 64 values is off by at most half its widest step: for nf4 0.152 of the block's
    # largest value. A wrong code or scale is off by several times that.
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = framework().load_model(checkpoint, dtype=torch.float32)
    weight = model.model.layers[0].mlp.up_proj.weight
    back = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).float()
    original = plain.model.layers[0].mlp.up_proj.weight
    assert (back - original).abs().max() < 0.16 * original.abs().max()
    assert not torch.equal(back, original)


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
def test_compute_and_storage_dtype_are_those_asked_for(checkpoint: Path, storage: str) -> None:
    section = {"compute_dtype": "float32", "storage_dtype": storage}
    model = framework(section).load_model(checkpoint, dtype=torch.bfloat16)
    projection = model.model.layers[0].mlp.up_proj
    assert projection.weight.dtype == getattr(torch, storage)
    assert projection.compute_dtype == torch.float32


def test_the_compute_dtype_is_the_checkpoints_where_none_is_given(checkpoint: Path) -> None:
    model = framework().load_model(checkpoint)
    assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32


def test_a_lora_trains_on_the_quantized_base(checkpoint: Path) -> None:
    accelerated = framework()
    model = get_peft_model(accelerated.load_model(checkpoint, dtype=torch.float32), LORA)
    accelerated.apply(model)
    model.train()  # in evaluation mode bitsandbytes repacks the weights for some CPUs
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)


def test_apply_refuses_a_quantized_model_without_adapter_and_says_what_to_do(checkpoint: Path) -> None:
    accelerated = framework()
    model = accelerated.load_model(checkpoint)
    with pytest.raises(UnsupportedError, match=r"no adapter.*plugins\.peft\.quantization\.bitsandbytes\.no_peft_model"):
        accelerated.apply(model)
    accelerated.apply(model, peft_config=LORA)
    meant = framework({"no_peft_model": True})
    meant.apply(meant.load_model(checkpoint))


def test_a_checkpoint_that_is_stored_in_four_bits_is_loaded_only_as_what_it_is(
    checkpoint: Path, tmp_path: Path
) -> None:
    framework({"quant_type": "fp4"}).load_model(checkpoint).save_pretrained(tmp_path)
    loaded = framework({"quant_type": "fp4", "compute_dtype": "bfloat16"}).load_model(tmp_path)
    projection = loaded.model.layers[0].mlp.up_proj
    assert projection.weight.quant_state.quant_type == "fp4"
    assert projection.compute_dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match=r"quant_type fp4.*bitsandbytes\.quant_type is nf4"):
        framework({"quant_type": "nf4"}).load_model(tmp_path)
    with pytest.raises(UnsupportedError, match=r"double_quant True.*bitsandbytes\.double_quant is False"):
        framework({"quant_type": "fp4", "double_quant": False}).load_model(tmp_path)


def test_a_checkpoint_quantized_in_another_way_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(checkpoint)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"already quantized \(gptq\)"):
        framework().load_model(tmp_path)


def test_a_second_quantization_is_refused(checkpoint: Path) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(UnsupportedError, match="quantization_config"):
        framework().load_model(checkpoint, quantization_config=BitsAndBytesConfig(load_in_4bit=True))


def test_two_quantizations_of_one_model_are_refused_naming_both_sections() -> None:
    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {}, "auto_gptq": {}}}}}
    with pytest.raises(ConfigError, match=r"quantization\.bitsandbytes and plugins\.peft\.quantization\.auto_gptq"):
        AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_type": "int4"}, r"bitsandbytes\.quant_type is the text 'int4'; allowed: nf4 or fp4"),
        ({"no_peft_model": "yes"}, r"no_peft_model is the text 'yes'; allowed: true or false"),
        ({"kernel": "x"}, r"bitsandbytes\.kernel is not a known key"),
    ],
)
def test_wrong_keys_and_values_are_named(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        framework(section)
