"""Holds a checkpoint that is stored in 4 bits against what its tensors must be, before it is loaded.

transformers loads a weight whose nested scales are missing, or are too few, without a word, and decodes it wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from foak.core.errors import UnsupportedError

__all__ = ["check_stored"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_STATE = ".quant_state.bitsandbytes__"
_ITEMSIZE = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file: its shape, and its dtype as the file names it (`F32`, `U8`)."""

    shape: tuple[int, ...]
    dtype: str


def check_stored(folder: Path) -> None:
    """Checks the safetensors files of a folder; does nothing where there are none (older `.bin` files, a hub id).

    Raises:
        UnsupportedError: a file is missing or cut off, or a 4-bit weight lacks a tensor or has one of another size;
            the message names the file or tensor.
    """
    tensors: dict[str, _Stored] = {}
    states: dict[str, dict[str, Any]] = {}
    for file in _files(folder):
        _read(file, tensors, states)
    for weight, state in states.items():
        fault = next(_faults(weight, state, tensors), None)
        if fault is not None:
            raise UnsupportedError(f"{folder} cannot be loaded: {fault}")
    for name in tensors:
        weight = name.removesuffix(".absmax")
        if name.endswith(".absmax") and weight not in states:
            raise UnsupportedError(f"{folder} cannot be loaded: {weight}{_STATE}* is missing")


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        return [single] if single.is_file() else []
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise UnsupportedError(f"{folder} cannot be loaded: {_INDEX} names {name}, which is not there")
    return [folder / name for name in names]


def _read(file: Path, tensors: dict[str, _Stored], states: dict[str, dict[str, Any]]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                part = opened.get_slice(name)
                tensors[name] = _Stored(tuple(part.get_shape()), part.get_dtype())
                if _STATE in name:
                    states[name.partition(_STATE)[0]] = json.loads(bytes(opened.get_tensor(name).tolist()))
    except SafetensorError as error:
        raise UnsupportedError(f"{file} is cut off, or is no safetensors file: {error}") from error


def _faults(weight: str, state: Mapping[str, Any], tensors: Mapping[str, _Stored]) -> Iterator[str]:
    """What is wrong with the tensors of one 4-bit weight, in the order in which a reader would look."""
    numel = prod(state["shape"])
    blocks = -(-numel // state["blocksize"])
    nested = "nested_blocksize" in state
    wanted = {
        "absmax": (blocks, "U8" if nested else "F32"),
        "quant_map": (16, "F32"),
    }
    if nested:
        wanted["nested_absmax"] = (-(-blocks // state["nested_blocksize"]), "F32")
        wanted["nested_quant_map"] = (256, "F32")
    if weight not in tensors:
        yield f"{weight} is missing"
    else:
        held = prod(tensors[weight].shape) * _ITEMSIZE.get(tensors[weight].dtype, 1)
        if held < -(-numel // 2):
            yield f"{weight} holds {held} bytes, but its {numel} values take {-(-numel // 2)}"
    for name, (count, dtype) in wanted.items():
        found = tensors.get(f"{weight}.{name}")
        if found is None:
            yield f"{weight}.{name} is missing"
        elif prod(found.shape) != count or found.dtype != dtype:
            yield f"{weight}.{name} has {prod(found.shape)} values in {found.dtype}, but must have {count} in {dtype}"
