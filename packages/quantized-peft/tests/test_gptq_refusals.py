"""A GPTQ checkpoint that is damaged, or does not fit itself or the model, is refused by name before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from foak.core import AccelerationFramework, ConfigError, UnsupportedError
from foak.quantized_peft.gptq.errors import CheckpointError
from foak.quantized_peft.plugin import QuantizedPeftPlugin

UP = "model.layers.1.mlp.up_proj"


def framework(section: dict[str, Any] | None = None) -> AccelerationFramework:
    tree = {"plugins": {"peft": {"quantization": {"auto_gptq": {} if section is None else section}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


@dataclass(frozen=True)
class Damage:
    """What is wrong, and what the message must say.

    Attributes:
        message: a pattern.
        tensors: what is done to the tensors.
        settings: what is different in the settings.
        config: what is different in `config.json`, after everything has been written.
        files: what is done to the folder afterwards.
        stored_as: see `write_gptq`.
        error: the class of the refusal.
    """

    message: str
    tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda tensors: None
    settings: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    files: Callable[[Path], Any] = lambda folder: None
    stored_as: str = "safetensors"
    error: type[Exception] = CheckpointError


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


def set_group(index: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.g_idx"][7] = index

    return change


def cut(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) * 2 // 3])

    return change


def rewrite(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def add_to_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.other"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index), encoding="utf-8")


DAMAGE = {
    "no scales": Damage(rf"model\.safetensors: {UP}\.scales is missing", drop(f"{UP}.scales")),
    "no zeros": Damage(rf"{UP}\.qzeros is missing", drop(f"{UP}.qzeros")),
    "no codes": Damage(rf"{UP}\.qweight is missing, but {UP}\.(g_idx|qzeros|scales) is there", drop(f"{UP}.qweight")),
    "no group index, with act-order": Damage(rf"{UP}\.g_idx is missing", drop(f"{UP}.g_idx"), {"desc_act": True}),
    "no norm": Damage(r"model\.norm\.weight is missing", drop("model.norm.weight")),
    "a norm of another shape": Damage(
        r"model\.norm\.weight is \[63\], but by config\.json it is \[64\]", put("model.norm.weight", torch.ones(63))
    ),
    "a model with a larger vocabulary": Damage(
        r"lm_head\.weight is \[96, 64\], but by config\.json it is \[100, 64\], and 1 more", config={"vocab_size": 100}
    ),
    "nothing of a layer": Damage(
        rf"{UP}\.weight is missing",
        lambda tensors: [tensors.pop(f"{UP}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")],
    ),
    "a model with one layer more": Damage(
        r"model\.layers\.2\.\w+\.weight is missing, and 8 more", config={"num_hidden_layers": 3}
    ),
    "a model with one layer fewer": Damage(
        r"model\.layers\.1\.mlp\.down_proj is quantized, but LlamaForCausalLM has no linear layer of that name",
        config={"num_hidden_layers": 1},
    ),
    "nothing quantized": Damage(
        "no layer is quantized", lambda tensors: tensors.clear() or put("a", torch.ones(1))(tensors)
    ),
    "another group size": Damage(
        r"qzeros is I32 \[3, 8\]; a layer of 96 inputs and 64 outputs has I32 \[2, 8\] \(4 bits, group_size 64, by",
        settings={"group_size": 64},
    ),
    "another width": Damage(r"q(weight|zeros) is I32 .* \(8 bits, group_size 32", settings={"bits": 8}),
    "an unknown width": Damage(
        r"quantization_config: bits is 5; there are layers of 2, 3, 4 and 8", settings={"bits": 5}
    ),
    "no width": Damage("bits is None", settings={"bits": None}),
    "an unknown group size": Damage(r"group_size is 0; it is at least 1, or -1", settings={"group_size": 0}),
    "a group size that is no number": Damage("group_size is '32'", settings={"group_size": "32"}),
    "a shape that disagrees": Damage(
        rf"{UP}\.scales is F16 \[2, 95\]; .* has F16 \[2, 96\]", put(f"{UP}.scales", torch.ones(2, 95).half())
    ),
    "a flat tensor": Damage(
        rf"{UP}: qweight and scales must have two dimensions", put(f"{UP}.qweight", torch.zeros(768, dtype=torch.int32))
    ),
    "a dtype that disagrees": Damage(
        rf"{UP}\.qweight is I64", put(f"{UP}.qweight", torch.zeros(8, 96, dtype=torch.int64))
    ),
    "scales that are no floats": Damage(
        rf"{UP}\.scales is I32", put(f"{UP}.scales", torch.ones(2, 96, dtype=torch.int32))
    ),
    "a group that is not there": Damage(rf"{UP}\.g_idx names group 2; there are 2, from 0 on", set_group(2)),
    "a negative group": Damage(rf"{UP}\.g_idx names group -1; there are 2", set_group(-1)),
    "scales that are not numbers": Damage(
        rf"{UP}\.scales has values that are infinite or not numbers",
        put(f"{UP}.scales", torch.full((2, 96), float("nan")).half()),
    ),
    "a layer that the model has not": Damage(
        r"model\.layers\.1\.mlp\.side_proj is quantized, but LlamaForCausalLM has no linear layer of that name",
        lambda tensors: [
            tensors.update({name.replace("up_proj", "side_proj"): tensor.clone()})
            for name, tensor in list(tensors.items())
            if name.startswith(UP)
        ],
    ),
    "a layer that is no linear layer": Damage(
        r"model\.norm is quantized and a LlamaRMSNorm in LlamaForCausalLM",
        lambda tensors: [
            tensors.update({name.replace(UP, "model.norm"): tensor.clone()})
            for name, tensor in list(tensors.items())
            if name.startswith(UP)
        ],
        error=UnsupportedError,
    ),
    "a model of another size": Damage(
        r"mlp\.down_proj has 96 inputs and 64 outputs at 4 bits; config\.json makes it 128 and 64",
        config={"intermediate_size": 128},
    ),
    "a file that is cut off": Damage(r"model\.safetensors is cut off", files=cut("model.safetensors")),
    "a file that is none": Damage(r"is cut off or is no safetensors", files=rewrite("model.safetensors", "git-lfs")),
    "an index that names a missing file": Damage(
        r"model\.safetensors\.index\.json names model-00002-of-00002\.safetensors, which is missing",
        files=lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
        stored_as="sharded",
    ),
    "an index that names a missing tensor": Damage(
        r"says that model\.norm\.other is in model-00001-of-00002\.safetensors, but it is not",
        files=add_to_index,
        stored_as="sharded",
    ),
    "an index that names a file elsewhere": Damage(
        r"names '\.\./a\.safetensors', which is no file of this folder",
        files=rewrite("model.safetensors.index.json", '{"weight_map": {"a": "../a.safetensors"}}'),
        stored_as="sharded",
    ),
    "an index without a map": Damage(
        "weight_map is missing or empty", files=rewrite("model.safetensors.index.json", "{}"), stored_as="sharded"
    ),
    "an index that is no JSON": Damage(
        r"index\.json cannot be read", files=rewrite("model.safetensors.index.json", "{"), stored_as="sharded"
    ),
    "an older file that is cut off": Damage(
        r"pytorch_model\.bin is cut off, or holds more than tensors", files=cut("pytorch_model.bin"), stored_as="bin"
    ),
    "an older file that holds more than tensors": Damage(
        r"pytorch_model\.bin is cut off, or holds more than tensors",
        files=lambda folder: torch.save({"a": Path("x")}, folder / "pytorch_model.bin"),
        stored_as="bin",
    ),
    "an older file that holds no tensors": Damage(
        r"pytorch_model\.bin is not a state dict",
        files=lambda f: torch.save([1], f / "pytorch_model.bin"),
        stored_as="bin",
    ),
    "an older file under AutoGPTQ's name": Damage(
        r"rename gptq_model-4bit-32g\.bin to pytorch_model\.bin",
        files=lambda folder: (folder / "pytorch_model.bin").rename(folder / "gptq_model-4bit-32g.bin"),
        stored_as="bin",
    ),
    "no weights": Damage("there is no file of weights", files=lambda folder: (folder / "model.safetensors").unlink()),
    "two files of weights": Damage(
        r"gptq_model-4bit-32g\.safetensors and gptq_model-8bit-32g\.safetensors could each be the weights",
        files=lambda folder: (folder / "gptq_model-8bit-32g.safetensors").write_bytes(b""),
        stored_as="autogptq",
    ),
    "settings that are no JSON": Damage(
        r"quantize_config\.json cannot be read", files=rewrite("quantize_config.json", "bits: 4"), stored_as="autogptq"
    ),
    "settings that disagree": Damage(
        r"quantize_config\.json says .*bits=8.*config\.json: quantization_config says .*bits=4",
        files=rewrite("quantize_config.json", '{"bits": 8, "group_size": 32}'),
    ),
    "no settings": Damage(
        r"neither quantize_config\.json nor quantization_config in config\.json says how it is quantized",
        files=lambda folder: (folder / "quantize_config.json").unlink(),
        stored_as="autogptq",
    ),
    "no config": Damage("there is no config.json", files=lambda folder: (folder / "config.json").unlink()),
    "another method": Damage(
        "quant_method is 'awq', and peft.quantization.auto_gptq loads 'gptq' only",
        settings={"quant_method": "awq"},
        error=UnsupportedError,
    ),
    "another layout": Damage(
        "checkpoint_format is 'marlin', a layout for one kernel; served are 'gptq' and 'gptq_v2'",
        settings={"checkpoint_format": "marlin"},
        error=UnsupportedError,
    ),
    "Marlin's layout, as AutoGPTQ says it": Damage(
        "checkpoint_format is 'marlin'", settings={"is_marlin_format": True}, error=UnsupportedError
    ),
    "other words": Damage(
        "pack_dtype is 'int16'; only 'int32' is served", settings={"pack_dtype": "int16"}, error=UnsupportedError
    ),
    "rotated inputs": Damage("rotation is 'hadamard'", settings={"rotation": "hadamard"}, error=UnsupportedError),
    "an override that is not served": Damage(
        r"dynamic\['.*up_proj'\] changes format; served are changes of bits, desc_act, group_size, sym",
        settings={"dynamic": {".*up_proj": {"format": "marlin"}}},
        error=UnsupportedError,
    ),
    "an override that is no mapping": Damage(
        r"dynamic\['.*up_proj'\] is 8; it must be a mapping", settings={"dynamic": {".*up_proj": 8}}
    ),
    "a pattern that is none": Damage(
        r"dynamic has the pattern '\(', which is not one", settings={"dynamic": {"(": {}}}
    ),
    "an override with an unknown width": Damage("bits is 7", settings={"dynamic": {".*up_proj": {"bits": 7}}}),
    "an override that does not fit": Damage(
        r"up_proj\.q(weight|zeros) is I32 .* \(8 bits", settings={"dynamic": {".*up_proj": {"bits": 8}}}
    ),
    "a layer that should not be quantized": Damage(
        r"up_proj\.qweight is there, but by `dynamic` in .* the layer is not quantized",
        settings={"dynamic": {"-:.*up_proj": {}}},
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_with_a_checkpoint_is_named(name: str, write_gptq: Callable[..., Any]) -> None:
    damage = DAMAGE[name]
    written = write_gptq(stored_as=damage.stored_as, settings=damage.settings, edit=damage.tensors)
    if damage.config:
        path = written.path / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, **damage.config}), encoding="utf-8")
    damage.files(written.path)
    with pytest.raises(damage.error, match=damage.message):
        framework().load_model(written.path)


def test_a_checkpoint_error_is_one_of_foaks_own() -> None:
    assert issubclass(CheckpointError, ConfigError)


def test_a_quantized_head_that_is_tied_is_refused(write_gptq: Callable[..., Any]) -> None:
    written = write_gptq(head=True)
    path = written.path / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, "tie_word_embeddings": True}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="lm_head is quantized, and the model ties it to its embeddings"):
        framework().load_model(written.path)


def test_an_unquantized_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says how it is quantized; .* loads GPTQ checkpoints only"):
        framework().load_model(checkpoint)


@pytest.mark.parametrize("argument", ["gguf_file", "quantization_config", "load_in_4bit"])
def test_a_second_quantization_is_refused(argument: str, write_gptq: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=rf"auto_gptq cannot be combined with the argument {argument}"):
        framework().load_model(write_gptq().path, **{argument: "yes"})


def test_quantizing_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"auto_gptq\.from_quantized is false.*quantize the model with GPTQModel"):
        framework({"from_quantized": False})


def test_another_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"auto_gptq\.kernel.*triton_v2"):
        framework({"kernel": "exllama"})


def test_the_external_library_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gptqmodel", None)
    with pytest.raises(ConfigError, match=r"auto_gptq\.use_external_lib needs .*pip install gptqmodel optimum"):
        framework({"use_external_lib": True})


def test_a_model_without_an_adapter_is_refused(write_gptq: Callable[..., Any]) -> None:
    accelerated = framework()
    model = accelerated.load_model(write_gptq().path)
    with pytest.raises(UnsupportedError, match=r"GPTQ's format and it has no adapter.*add a LoRA"):
        accelerated.apply(model)
