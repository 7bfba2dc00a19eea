"""What lies in the folder of a GPTQ checkpoint: its files, its tensors by name and shape, and its quantized layers.

Only headers are read. Whatever does not fit together is refused here, before a model is built.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from foak.quantized_peft.gptq.errors import CheckpointError
from foak.quantized_peft.gptq.settings import LayerSettings, Settings, read_settings

__all__ = ["Checkpoint", "StoredLayer", "open_checkpoint"]

_QWEIGHT = ".qweight"
_PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")
_INDEX = ".index.json"
_PICKLED = (".bin", ".pt")
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class _Header:
    """Shape and dtype (in safetensors' names) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer as it is stored."""

    in_features: int
    out_features: int
    settings: LayerSettings
    scale_dtype: torch.dtype
    has_g_idx: bool
    has_bias: bool


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers fit together.

    Attributes:
        folder: where it lies.
        weights: the file of weights or the index of several, by its name in the folder.
        settings: how it is stored.
        layers: the quantized layers by the names that they have in the file.
        dense: the names of all other tensors.
    """

    folder: Path
    weights: str
    settings: Settings
    layers: Mapping[str, StoredLayer]
    dense: frozenset[str]

    @property
    def pickled(self) -> bool:
        """Whether the weights are in files of `torch.save`."""
        return self.weights.removesuffix(_INDEX).endswith(_PICKLED)


def open_checkpoint(folder: Path, config: Mapping[str, Any] | None) -> Checkpoint:
    """Reads the settings and the headers of a checkpoint, and checks them against each other.

    Args:
        folder: the checkpoint's.
        config: `quantization_config` of its `config.json`, if that has one.

    Raises:
        CheckpointError: something is missing, cut off, or does not fit.
        UnsupportedError: it is stored in a way that is not served.
    """
    settings = _settings(folder, config)
    weights = _weights(folder, settings)
    headers: dict[str, _Header] = {}
    for file in _files(folder, weights):
        headers.update(_headers(file))
    _check_index(folder, weights, headers)
    layers = {}
    for name in sorted(headers):
        if name.endswith(_QWEIGHT):
            layer = name.removesuffix(_QWEIGHT)
            layers[layer] = _stored_layer(layer, headers, settings, folder / weights)
    if not layers:
        raise CheckpointError(f"{folder / weights}: no tensor is called …{_QWEIGHT}, so no layer is quantized")
    parts = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    for name in headers:
        if name not in parts and name.endswith((".qzeros", ".scales", ".g_idx")):
            layer = name.rpartition(".")[0]
            raise CheckpointError(f"{folder / weights}: {layer}{_QWEIGHT} is missing, but {name} is there")
    return Checkpoint(folder, weights, settings, layers, frozenset(headers) - parts)


def _settings(folder: Path, config: Mapping[str, Any] | None) -> Settings:
    own = folder / "quantize_config.json"
    if not own.is_file():
        if config is None:
            raise CheckpointError(
                f"{folder}: neither quantize_config.json nor quantization_config in config.json says how it is "
                "quantized; peft.quantization.auto_gptq loads GPTQ checkpoints only"
            )
        return read_settings(config, f"{folder / 'config.json'}: quantization_config")
    settings = read_settings(_json(own), str(own))
    if config is not None:
        other = read_settings(config, f"{folder / 'config.json'}: quantization_config")
        if (other.default, other.zero_offset) != (settings.default, settings.zero_offset):
            raise CheckpointError(
                f"{own} says {settings.default}, zero offset {settings.zero_offset}; {other.origin} says "
                f"{other.default}, zero offset {other.zero_offset}"
            )
    return settings


def _weights(folder: Path, settings: Settings) -> str:
    """The file, or the index of files, that holds the weights; safetensors before older ones."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    base = settings.written.get("model_file_base_name")
    usual = [f"{name}.safetensors" for name in (base, "model") if name] + ["pytorch_model.bin"]
    for name in usual:
        for candidate in (name + _INDEX, name):
            if candidate in names:
                return candidate
    # AutoGPTQ's own name for its file, such as gptq_model-4bit-128g.
    own = [name for name in names if name.startswith("gptq_model") and "-of-" not in name]
    found = [name for name in own if name.endswith((f".safetensors{_INDEX}", ".safetensors"))]
    if len(found) == 1 or (found and found[1] == found[0] + _INDEX):
        return found[-1]
    if found:
        raise CheckpointError(f"{folder}: {' and '.join(found)} could each be the weights; keep one")
    older = [name for name in own if name.endswith(_PICKLED)]
    if older:
        raise CheckpointError(
            f"{folder}: rename {older[0]} to pytorch_model.bin, the name under which it is looked for"
        )
    raise CheckpointError(f"{folder}: there is no file of weights (model.safetensors or its index)")


def _files(folder: Path, weights: str) -> list[Path]:
    if not weights.endswith(_INDEX):
        return [folder / weights]
    index = _index(folder / weights)
    files = [folder / name for name in sorted(set(index.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder / weights} names {file.name}, which is missing")
    return files


def _index(path: Path) -> dict[str, str]:
    found = _json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is no file of this folder")
    return found


def _check_index(folder: Path, weights: str, headers: Mapping[str, _Header]) -> None:
    if not weights.endswith(_INDEX):
        return
    for name, file in _index(folder / weights).items():
        if name not in headers:
            raise CheckpointError(f"{folder / weights} says that {name} is in {file}, but it is not")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def _headers(file: Path) -> dict[str, _Header]:
    if file.suffix in _PICKLED:
        names = {torch.int32: "I32", **{dtype: name for name, dtype in _SCALES.items()}}
        return {
            name: _Header(tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
            for name, tensor in _unpickled(file).items()
        }
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: _Header(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is cut off or is no safetensors file: {error}") from error


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        # torch's own text advises to load it in a way that runs code from the file.
        raise CheckpointError(f"{file} is cut off, or holds more than tensors") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise CheckpointError(f"{file} is not a state dict of tensors")
    return found


def _stored_layer(layer: str, headers: Mapping[str, _Header], settings: Settings, file: Path) -> StoredLayer:
    chosen = settings.of(layer)
    if chosen is None:
        raise CheckpointError(
            f"{file}: {layer}{_QWEIGHT} is there, but by `dynamic` in {settings.origin} the layer is not quantized"
        )
    found = {part: headers.get(f"{layer}.{part}") for part in _PARTS}
    for part in ("qzeros", "scales", *(("g_idx",) if chosen.desc_act else ())):
        if found[part] is None:
            raise CheckpointError(f"{file}: {layer}.{part} is missing")
    qweight, scales, g_idx = found["qweight"], found["scales"], found["g_idx"]
    assert qweight is not None
    assert scales is not None
    where = f"({chosen.bits} bits, group_size {chosen.group_size}, by {settings.origin})"
    if len(qweight.shape) != 2 or len(scales.shape) != 2:
        raise CheckpointError(f"{file}: {layer}: qweight and scales must have two dimensions")
    rows, out_features = qweight.shape
    # At a number of inputs that fills no word, g_idx alone says it.
    in_features = g_idx.shape[0] if g_idx is not None and g_idx.shape else rows * 32 // chosen.bits
    size = in_features if chosen.group_size == -1 else chosen.group_size
    groups = -(-in_features // max(size, 1))
    wanted = {
        "qweight": _Header((-(-in_features * chosen.bits // 32), out_features), "I32"),
        "qzeros": _Header((groups, -(-out_features * chosen.bits // 32)), "I32"),
        "scales": _Header((groups, out_features), scales.dtype if scales.dtype in _SCALES else "F16"),
        "g_idx": _Header((in_features,), "I32"),
        "bias": _Header((out_features,), ""),
    }
    for part, header in wanted.items():
        stored = found[part]
        if stored is None:
            continue
        if stored.shape != header.shape or (header.dtype and stored.dtype != header.dtype):
            raise CheckpointError(
                f"{file}: {layer}.{part} is {stored.dtype} {list(stored.shape)}; a layer of {in_features} inputs and "
                f"{out_features} outputs has {header.dtype or stored.dtype} {list(header.shape)} {where}"
            )
    return StoredLayer(
        in_features, out_features, chosen, _SCALES[scales.dtype], g_idx is not None, found["bias"] is not None
    )
