"""A 4-bit checkpoint that is damaged, or does not fit itself or the model, is refused by name before training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from foak.core import AccelerationFramework, UnsupportedError
from foak.quantized_peft.plugin import QuantizedPeftPlugin

Tensors = dict[str, Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


def framework(**section: object) -> AccelerationFramework:
    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {"quant_type": "nf4", **section}}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


@pytest.fixture(scope="module")
def stored(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, stored in nf4 with nested scales."""
    folder = tmp_path_factory.mktemp("nf4")
    framework().load_model(checkpoint, dtype=torch.float32).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Damage:
    """What is wrong, and what the message must say.

    Attributes:
        message: a pattern.
        tensors: what is done to the tensors.
        state: what is different in how `UP` is said to be stored; None takes a field away.
        config: what is different in `config.json`.
        quantization: what is different in its `quantization_config`.
        files: what is done to the folder afterwards.
        section: keys of the run.
    """

    message: str
    tensors: Callable[[Tensors], Any] = lambda tensors: None
    state: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    files: Callable[[Path], Any] = lambda folder: None
    section: dict[str, Any] | None = None


def without(*beginnings: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return change


def shortened(name: str, values: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-values].clone()})


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_index(content: object) -> Callable[[Path], None]:
    """The weights under a shard's name, and an index that says that."""

    def change(folder: Path) -> None:
        (folder / FILE).rename(folder / SHARD)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / INDEX).write_text(text, encoding="utf-8")

    return change


def with_index_and(more: dict[str, str]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / FILE), SHARD)
        with_index({"metadata": {}, "weight_map": {**names, **more}})(folder)

    return change


def cut(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[: len(whole) // 2])


DAMAGE = {
    "no scales": Damage(rf"{UP}\.absmax is missing", without(f"{UP}.absmax")),
    "no scales of scales": Damage(rf"{UP}\.nested_absmax is missing", without(f"{UP}.nested_absmax")),
    "no code": Damage(rf"{UP}\.quant_map is missing", without(f"{UP}.quant_map")),
    "no code of scales": Damage(rf"{UP}\.nested_quant_map is missing", without(f"{UP}.nested_quant_map")),
    "no packed values": Damage(rf"{UP} is missing", lambda tensors: tensors.pop(UP)),
    "no state": Damage(rf"{UP}\.quant_state\.bitsandbytes__\* is missing", without(STATE)),
    "nothing of a weight": Damage(rf"cannot be loaded: {UP} is missing", without(UP)),
    "nothing of a decoder layer": Damage(
        r"model\.layers\.1\.self_attn\.q_proj\.weight is missing", without("model.layers.1.")
    ),
    "no norm": Damage(r"model\.norm\.weight is missing", without("model.norm")),
    "no norms of a layer": Damage(
        r"model\.layers\.0\.input_layernorm\.weight is missing, and 1 more",
        without("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"),
    ),
    "no embeddings": Damage(r"model\.embed_tokens\.weight is missing", without("model.embed_tokens")),
    "no head": Damage(r"lm_head\.weight is missing", without("lm_head")),
    "too few scales": Damage(
        rf"{UP}\.absmax has 127 values in U8, but must have 128 in U8", shortened(f"{UP}.absmax", 1)
    ),
    "too few values": Damage(rf"{UP} holds 4032 bytes, but its 8192 values take 4096", shortened(UP, 64)),
    "scales of scales that are not numbers": Damage(
        r"layers\.0\.mlp\.up_proj: its scales have values that are infinite or not numbers",
        changed(f"{UP}.nested_absmax", lambda values: values * float("nan")),
    ),
    "a code of its own": Damage(
        r"layers\.0\.mlp\.up_proj: its quant_map is not the code nf4",
        changed(f"{UP}.quant_map", lambda values: values.flip(0)),
    ),
    "a norm of another shape": Damage(
        r"model\.norm\.weight is \[63\], but by config\.json it is \[64\]",
        changed("model.norm.weight", lambda values: values[:-1].clone()),
    ),
    "a bias that the model has not": Damage(
        r"up_proj\.bias is there, but by config\.json the model has none",
        lambda tensors: tensors.update({UP.replace("weight", "bias"): torch.ones(128)}),
    ),
    "another block size": Damage(rf"{UP}\.absmax has 128 values in U8, but must have 64", state={"blocksize": 128}),
    "no block size": Damage("has the blocksize None", state={"blocksize": None}),
    "a block size of 0": Damage("has the blocksize 0", state={"blocksize": 0}),
    "another nested block size": Damage(
        r"nested_absmax has 1 values in F32, but must have 2", state={"nested_blocksize": 64}
    ),
    "no nested block size": Damage("has the nested_blocksize 'x'", state={"nested_blocksize": "x"}),
    "no offset": Damage("has the nested_offset None", state={"nested_offset": None}),
    "an offset that is no number": Damage("has the nested_offset nan", state={"nested_offset": float("nan")}),
    "another shape": Damage(r"up_proj: its weight was quantized as \(64, 128\)", state={"shape": [64, 128]}),
    "no shape": Damage("has the shape None", state={"shape": None}),
    "an unknown type": Damage("has the type 'nf3'; there are nf4 and fp4", state={"quant_type": "nf3"}),
    "an unknown dtype": Damage("has the dtype 'float99'; there are float32", state={"dtype": "float99"}),
    "a state that is no JSON": Damage(
        r"bitsandbytes__\* is not a JSON object",
        lambda tensors: tensors.update({STATE: torch.tensor([1, 2], dtype=torch.uint8)}),
    ),
    "another code than the configuration says": Damage(
        r"its weight is stored in nf4, not in fp4",
        quantization={"bnb_4bit_quant_type": "fp4"},
        section={"quant_type": "fp4"},
    ),
    "neither 4 nor 8 bits": Damage(
        r"already quantized \(bitsandbytes\)", quantization={"load_in_4bit": False, "_load_in_4bit": False}
    ),
    "no settings": Damage(
        r"is stored in 4 bits, but config\.json has no quantization_config", config={"quantization_config": None}
    ),
    "a model with other layers": Damage(
        r"gate_proj: its weight was quantized as \(128, 64\)", config={"intermediate_size": 96}
    ),
    "a model with a larger vocabulary": Damage(
        r"lm_head\.weight is \[96, 64\], but by config\.json it is \[100, 64\], and 1 more", config={"vocab_size": 100}
    ),
    "a model with one layer more": Damage(
        r"model\.layers\.2\.self_attn\.q_proj\.weight is missing", config={"num_hidden_layers": 3}
    ),
    "a model with one layer fewer": Damage(
        r"model\.layers\.1\.mlp\.down_proj\.weight is there, but by config\.json the model has none, and 6 more",
        config={"num_hidden_layers": 1},
    ),
    "a file that is cut off": Damage(r"model\.safetensors is cut off", files=cut),
    "an empty file": Damage(r"model\.safetensors is cut off", files=lambda folder: (folder / FILE).write_bytes(b"")),
    "an index that names a missing file": Damage(
        r"names model-00002-of-00002\.safetensors, which is not there",
        files=with_index_and({"model.x": "model-00002-of-00002.safetensors"}),
    ),
    "an index that names a missing tensor": Damage(
        rf"says that model\.x is in {SHARD}, but it is not", files=with_index_and({"model.x": SHARD})
    ),
    "an index that names a file elsewhere": Damage(
        r"names '\.\./a\.safetensors', which is no file of this folder",
        files=with_index({"weight_map": {"a": "../a.safetensors"}}),
    ),
    "an index without a map": Damage("weight_map is missing or empty", files=with_index({})),
    "an index that is no JSON": Damage(r"index\.json is not JSON", files=with_index("{")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_with_a_checkpoint_is_named(name: str, stored: Path, tmp_path: Path) -> None:
    damage = DAMAGE[name]
    folder = shutil.copytree(stored, tmp_path / "damaged")
    tensors = load_file(folder / FILE)
    damage.tensors(tensors)
    if damage.state:
        state = {**json.loads(bytes(tensors[STATE].tolist())), **damage.state}
        text = json.dumps({field: value for field, value in state.items() if value is not None})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= damage.quantization or {}
    (folder / "config.json").write_text(json.dumps({**config, **(damage.config or {})}), encoding="utf-8")
    damage.files(folder)
    with pytest.raises(UnsupportedError, match=damage.message):
        framework(**(damage.section or {})).load_model(folder)


def test_an_undamaged_checkpoint_is_not_refused(stored: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stored, tmp_path / "whole")
    with_index_and({})(folder)
    framework().load_model(folder)


def test_an_unquantized_checkpoint_that_lacks_a_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "dense")
    tensors = load_file(folder / FILE)
    without("lm_head")(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    AutoModelForCausalLM.from_pretrained(folder)  # which only warns
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is missing"):
        framework().load_model(folder)


def test_other_shapes_are_taken_where_the_call_allows_them(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}), encoding="utf-8")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, quantization_config=quantization)
    model = framework().load_model(folder, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == plain.lm_head.weight.shape
