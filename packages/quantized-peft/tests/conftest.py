"""Skips what needs a GPU where none is; a tiny model for the tests of both quantizations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from foak.kernels import dequantize_gptq
from foak.kernels.gptq.packing import PackedWeight, round_to_nearest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU a test marked `gpu` is skipped; the session `gpu` is the one that fails where none is."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny llama in float32: two layers, hidden size 64, tied embeddings off."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class GptqFolder:
    """A GPTQ checkpoint that was written for a test.

    Attributes:
        path: its folder.
        dense: the plain model (float32) that has the decoded weights in place of the quantized ones.
        packed: what was stored for each quantized layer.
    """

    path: Path
    dense: LlamaForCausalLM
    packed: dict[str, PackedWeight]


GptqWriter = Callable[..., GptqFolder]


@pytest.fixture
def write_gptq(tmp_path: Path) -> GptqWriter:
    """Writes a tiny llama as a GPTQ checkpoint; see `write` for what can be varied."""

    def write(
        bits: int = 4,
        group_size: int = 32,
        *,
        sym: bool = True,
        act_order: bool = False,
        version: int = 1,
        stored_as: str = "safetensors",
        head: bool = False,
        scale_dtype: torch.dtype = torch.float16,
        config: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        edit: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    ) -> GptqFolder:
        """
        Args:
            stored_as: safetensors; sharded: two files and an index; bin: what torch.save writes; sharded bin;
                autogptq: under AutoGPTQ's own name, with a bias of zeros beside each layer and its settings in a file.
            config: what is different in the architecture.
            settings: what is added to the settings.
            edit: changes the tensors before they are written.
        """
        architecture = LlamaConfig(
            **{
                "vocab_size": 96,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                **(config or {}),
            }
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LlamaForCausalLM(architecture)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_()
        layers = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and (head or n != "lm_head")}
        packed = {}
        for name, layer in layers.items():
            packed[name] = round_to_nearest(
                layer.weight.detach(),
                bits,
                group_size,
                sym=sym,
                act_order=act_order,
                zero_offset=2 - version,
                scale_dtype=scale_dtype,
            )
            one = packed[name]
            layer.weight.data = dequantize_gptq(
                one.qweight, one.qzeros, one.scales, one.g_idx, bits, zero_offset=2 - version, dtype=torch.float32
            )
        quantized = {f"{name}.weight" for name in layers}
        tied = architecture.tie_word_embeddings
        tensors = {
            name: tensor.contiguous()
            for name, tensor in model.state_dict().items()
            if name not in quantized and not (tied and name == "lm_head.weight")
        }
        for name, one in packed.items():
            tensors.update(one.named(name))
            if stored_as == "autogptq":
                tensors.setdefault(f"{name}.bias", torch.zeros(one.scales.shape[1], dtype=torch.float16))
        edit(tensors)
        written: dict[str, Any] = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": act_order}
        written |= {
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            **(settings or {}),
        }
        folder = tmp_path / f"gptq{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        if stored_as == "autogptq":
            (folder / "quantize_config.json").write_text(json.dumps(written), encoding="utf-8")
        else:
            architecture.quantization_config = written
        architecture.architectures = ["LlamaForCausalLM"]
        architecture.save_pretrained(folder)
        _write_weights(folder, tensors, stored_as)
        return GptqFolder(folder, model.eval(), packed)

    return write


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], stored_as: str) -> None:
    suffix, save = (".bin", torch.save) if stored_as.endswith("bin") else (".safetensors", save_file)
    base = "pytorch_model" if suffix == ".bin" else "model"
    if stored_as == "autogptq":
        base = "gptq_model-4bit-32g"
    if not stored_as.startswith("sharded"):
        save(tensors, folder / f"{base}{suffix}")
        return
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{base}-0000{number}-of-00002{suffix}"
        save({name: tensors[name] for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / f"{base}{suffix}.index.json").write_text(text, encoding="utf-8")
