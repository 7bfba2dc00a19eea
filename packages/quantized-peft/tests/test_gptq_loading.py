"""GPTQ checkpoints in every form that they come in, loaded as what they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from foak.core import AccelerationFramework
from foak.kernels.gptq.packing import pack_gptq
from foak.quantized_peft.gptq.layer import GptqLinear
from foak.quantized_peft.plugin import QuantizedPeftPlugin

Writer = Callable[..., Any]

INPUT_IDS = torch.arange(40).reshape(2, 20) * 7 % 96

# Sums of at most 96 float32 terms in another order, over logits of about 0.5.
TOLERANCE = 2e-6


def load(path: Path | str, section: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    tree = {"plugins": {"peft": {"quantization": {"auto_gptq": section or {"kernel": "triton_v2"}}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin]).load_model(path, **kwargs)


def layers_of(model: nn.Module) -> dict[str, GptqLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GptqLinear)}


def assert_equal_logits(model: nn.Module, dense: LlamaForCausalLM) -> None:
    with torch.no_grad():
        found, expected = (one.eval()(INPUT_IDS).logits for one in (model, dense))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_variant_gives_the_dequantized_models_logits(
    bits: int, version: int, sym: bool, act_order: bool, write_gptq: Writer
) -> None:
    written = write_gptq(bits, sym=sym, act_order=act_order, version=version)
    model = load(written.path, dtype=torch.float32)
    assert set(layers_of(model)) == set(written.packed)
    assert_equal_logits(model, written.dense)


@pytest.mark.parametrize("group_size", [16, 48, 64, 128, -1])
def test_every_group_size(group_size: int, write_gptq: Writer) -> None:
    written = write_gptq(4, group_size)
    assert_equal_logits(load(written.path, dtype=torch.float32), written.dense)


@pytest.mark.parametrize("stored_as", ["safetensors", "sharded", "bin", "sharded bin", "autogptq"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_form_of_file(stored_as: str, tied: bool, write_gptq: Writer) -> None:
    written = write_gptq(stored_as=stored_as, config={"tie_word_embeddings": tied})
    model = load(written.path, dtype=torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert all(layer.bias is None for layer in layers_of(model).values())
    assert not hasattr(model.config, "transformers_weights")
    assert_equal_logits(model, written.dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_not_quantized_has_the_dtype_asked_for_and_scales_keep_theirs(
    dtype: torch.dtype, tied: bool, write_gptq: Writer
) -> None:
    written = write_gptq(config={"tie_word_embeddings": tied, "attention_bias": True})
    model = load(written.path, dtype=dtype)
    for name, parameter in model.named_parameters():
        kept = {"qweight": torch.int32, "qzeros": torch.int32, "g_idx": torch.int32, "scales": torch.float16}
        assert parameter.dtype is kept.get(name.rpartition(".")[2], dtype), name
    assert model.dtype is dtype
    assert {layer.compute_dtype for layer in layers_of(model).values()} == {dtype}
    assert model(INPUT_IDS).logits.dtype is dtype


def test_without_a_dtype_it_is_the_checkpoints(write_gptq: Writer) -> None:
    written = write_gptq(config={"dtype": "bfloat16"})
    assert load(written.path).dtype is torch.bfloat16


def test_scales_in_bfloat16_stay_so(write_gptq: Writer) -> None:
    written = write_gptq(scale_dtype=torch.bfloat16)
    model = load(written.path, dtype=torch.float32)
    assert {layer.scales.dtype for layer in layers_of(model).values()} == {torch.bfloat16}
    assert_equal_logits(model, written.dense)


def test_a_device_map_is_followed(write_gptq: Writer) -> None:
    written = write_gptq()
    model = load(written.path, dtype=torch.float32, device_map={"": "cpu"})
    assert_equal_logits(model, written.dense)


def test_on_the_meta_device_it_has_shapes(write_gptq: Writer) -> None:
    model = load(write_gptq(act_order=True).path, dtype=torch.bfloat16, device_map={"": "meta"})
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model(INPUT_IDS.to("meta")).logits.shape == (2, 20, 96)


@pytest.mark.parametrize("stored_as", ["safetensors", "bin"])
def test_a_name_on_the_hub_is_looked_up_without_older_files_where_there_are_newer(
    stored_as: str, write_gptq: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_gptq(stored_as=stored_as)
    calls: list[tuple[str, list[str], str]] = []

    def snapshot_download(name: str, allow_patterns: list[str], revision: str) -> str:
        calls.append((name, allow_patterns, revision))
        return str(written.path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = load("someone/model-gptq", dtype=torch.float32, revision="main")
    assert [("*.bin" in patterns) for _, patterns, _ in calls] == [False] + [True] * (stored_as == "bin")
    assert {(name, revision) for name, _, revision in calls} == {("someone/model-gptq", "main")}
    assert model.name_or_path == "someone/model-gptq"
    assert_equal_logits(model, written.dense)


@pytest.mark.gpu
def test_a_device_map_to_a_gpu_is_followed(write_gptq: Writer) -> None:
    written = write_gptq()
    model = load(written.path, dtype=torch.float32, device_map={"": 0})
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    with torch.no_grad():
        found, expected = model(INPUT_IDS.cuda()).logits.cpu(), written.dense(INPUT_IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_biases_of_the_architecture_are_kept(write_gptq: Writer) -> None:
    written = write_gptq(config={"attention_bias": True}, stored_as="autogptq")
    model = load(written.path, dtype=torch.float32)
    assert {name for name, layer in layers_of(model).items() if layer.bias is not None} == {
        name for name in layers_of(model) if "self_attn" in name
    }
    assert not any(p.requires_grad for layer in layers_of(model).values() for p in layer.parameters())
    assert_equal_logits(model, written.dense)


def test_a_bias_that_the_quantizer_added_is_applied_unless_it_is_zero(write_gptq: Writer) -> None:
    name, added = "model.layers.0.mlp.up_proj", torch.linspace(-1, 1, 96)
    written = write_gptq(edit=lambda tensors: tensors.update({f"{name}.bias": added.half()}))
    model = load(written.path, dtype=torch.float32)
    plain = written.dense.get_submodule(name)
    plain.bias = nn.Parameter(added.half().float())
    assert_equal_logits(model, written.dense)


def test_a_quantized_head_is_loaded(write_gptq: Writer) -> None:
    written = write_gptq(head=True)
    model = load(written.path, dtype=torch.float32)
    assert isinstance(model.lm_head, GptqLinear)
    assert_equal_logits(model, written.dense)


def test_layers_that_are_not_quantized_stay_plain(write_gptq: Writer) -> None:
    name = "model.layers.1.self_attn.v_proj"

    def make_plain(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = torch.full((32, 64), 0.01)

    for settings in ({"modules_to_not_convert": ["v_proj"]}, {"dynamic": {r"-:model\.layers\.1\..*v_proj": {}}}):
        written = write_gptq(edit=make_plain, settings=settings)
        model = load(written.path, dtype=torch.float32)
        assert type(model.get_submodule(name)) is nn.Linear
        written.dense.get_submodule(name).weight.data.fill_(0.01)
        assert_equal_logits(model, written.dense)


def test_layers_with_settings_of_their_own(write_gptq: Writer) -> None:
    """GPTQModel's `dynamic`: the first pattern that matches decides."""
    name = "model.layers.0.mlp.down_proj"
    other = write_gptq(8, 16)
    dynamic = {r"+:.*\.down_proj$": {"bits": 8, "group_size": 16, "mse": 2.0}, r".*\.mlp\..*": {"bits": 4}}

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (name, name.replace("0", "1")):
            tensors.update(other.packed[layer].named(layer))

    written = write_gptq(4, 32, settings={"dynamic": dynamic}, edit=exchange)
    model = load(written.path, dtype=torch.float32)
    assert (model.get_submodule(name).bits, model.get_submodule(name).group_size) == (8, 16)
    for layer in (name, name.replace("0", "1")):
        written.dense.get_submodule(layer).weight.data = other.dense.get_submodule(layer).weight.data
    assert_equal_logits(model, written.dense)


def test_without_g_idx_groups_are_in_order(write_gptq: Writer) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    written = write_gptq(edit=without)
    assert_equal_logits(load(written.path, dtype=torch.float32), written.dense)


def test_settings_in_a_file_and_in_the_config_may_agree(write_gptq: Writer) -> None:
    written = write_gptq()
    settings = json.loads((written.path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    del settings["checkpoint_format"]  # as AutoGPTQ and older files leave it out
    (written.path / "quantize_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert_equal_logits(load(written.path, dtype=torch.float32), written.dense)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_zero_that_gptqmodel_stored_borrow_from_their_neighbours(bits: int, write_gptq: Writer) -> None:
    """It takes 1 off each field of a word by one subtraction, so a field of 0 takes another 1 from the field above."""
    name = "model.layers.0.mlp.up_proj"
    ones = sum(1 << shift for shift in range(0, 32, bits))
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (96, 64), generator=draw)
    zeros = torch.randint(min(2**bits, 3), (2, 96), generator=draw)
    scales = torch.full((2, 96), 0.01, dtype=torch.float16)
    true = pack_gptq(codes, zeros, scales, torch.arange(64) // 32, bits, zero_offset=0)
    words = (true.qzeros.long() - ones) % 2**32
    stored = torch.where(words >= 2**31, words - 2**32, words).int()
    by_field = pack_gptq(codes, zeros, scales, torch.arange(64) // 32, bits, zero_offset=1)
    assert not torch.equal(stored, by_field.qzeros)

    def exchange(tensors: dict[str, torch.Tensor], qzeros: torch.Tensor) -> None:
        tensors.update({**true.named(name), f"{name}.qzeros": qzeros})

    expected = (codes - zeros.t().repeat_interleave(32, 1)) * scales[0, 0].float()
    meta = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    model = load(write_gptq(bits, sym=False, settings=meta, edit=lambda t: exchange(t, stored)).path)
    assert torch.equal(model.get_submodule(name).dequantize(torch.float32), expected)
    other = load(write_gptq(bits, sym=False, edit=lambda t: exchange(t, by_field.qzeros)).path)
    assert torch.equal(other.get_submodule(name).dequantize(torch.float32), expected)


def test_the_name_that_it_was_loaded_by_is_kept(write_gptq: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_gptq()
    monkeypatch.chdir(written.path.parent)
    model = load(written.path.name)
    assert model.name_or_path == model.config._name_or_path == written.path.name


def test_a_loaded_model_can_be_saved_and_loaded(write_gptq: Writer, tmp_path: Path) -> None:
    written = write_gptq(act_order=True)
    model = load(written.path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    stored = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (stored["quant_method"], stored["bits"], stored["checkpoint_format"]) == ("gptq", 4, "gptq")
    assert_equal_logits(load(tmp_path / "again", dtype=torch.float32), written.dense)


def test_a_copy_of_the_model_is_independent(write_gptq: Writer) -> None:
    written = write_gptq(act_order=True)
    model = load(written.path, dtype=torch.float32)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_equal_logits(twin, written.dense)


def test_a_given_config_is_followed_and_left_alone(write_gptq: Writer) -> None:
    from transformers import AutoConfig

    written = write_gptq()
    config = AutoConfig.from_pretrained(written.path)
    before = copy.deepcopy(config.to_dict())
    config.use_cache = False
    model = load(written.path, dtype=torch.float32, config=config)
    assert model.config.use_cache is False
    assert {**config.to_dict(), "use_cache": True} == before
    assert_equal_logits(model, written.dense)
