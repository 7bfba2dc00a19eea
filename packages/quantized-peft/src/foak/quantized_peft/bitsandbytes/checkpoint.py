"""Holds a checkpoint that is stored in 4 bits against what its tensors must be, before it is loaded.

transformers loads a weight whose nested scales are missing, or are too few, without a word, and decodes it wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from foak.core.errors import UnsupportedError
from foak.quantized_peft.bitsandbytes.layers import CODES

__all__ = ["Names", "check_stored"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_STATE = ".quant_state.bitsandbytes__"
_DTYPES = ("float32", "bfloat16", "float16")
_ITEMSIZE = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file: its shape, and its dtype as the file names it (`F32`, `U8`)."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Names:
    """What the files of a checkpoint hold.

    Attributes:
        tensors: the names of all tensors.
        weights: those of the weights that are stored in 4 bits.
    """

    tensors: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()


def check_stored(folder: Path) -> Names:
    """Checks the safetensors files of a folder; does nothing where there are none (older `.bin` files, a hub id).

    Raises:
        UnsupportedError: a file is missing or cut off, or a 4-bit weight lacks a tensor or has one of another size;
            the message names the file or tensor.
    """
    tensors: dict[str, _Stored] = {}
    states: dict[str, Any] = {}
    files, index = _files(folder)
    for file in files:
        _read(file, tensors, states)
    for name, where in index.items():
        if name not in tensors:
            raise UnsupportedError(f"{folder} cannot be loaded: {_INDEX} says that {name} is in {where}, but it is not")
    for weight, state in states.items():
        fault = next(_faults(weight, state, tensors), None)
        if fault is not None:
            raise UnsupportedError(f"{folder} cannot be loaded: {fault}")
    for name in tensors:
        weight = name.removesuffix(".absmax")
        if name.endswith(".absmax") and weight not in states:
            raise UnsupportedError(f"{folder} cannot be loaded: {weight}{_STATE}* is missing")
    return Names(frozenset(tensors), frozenset(states))


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of weights, and where their index says that each tensor is (empty where there is no index)."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        return [single] if single.is_file() else [], {}
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedError(f"{index} is not JSON: {error}") from error
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise UnsupportedError(f"{index}: weight_map is missing or empty")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedError(f"{index} names {name!r}, which is no file of this folder")
        if not (folder / name).is_file():
            raise UnsupportedError(f"{folder} cannot be loaded: {_INDEX} names {name}, which is not there")
    return [folder / name for name in sorted(set(found.values()))], found


def _read(file: Path, tensors: dict[str, _Stored], states: dict[str, Any]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                part = opened.get_slice(name)
                tensors[name] = _Stored(tuple(part.get_shape()), part.get_dtype())
                if _STATE in name:
                    states[name.partition(_STATE)[0]] = _json(bytes(opened.get_tensor(name).tolist()))
    except SafetensorError as error:
        raise UnsupportedError(f"{file} is cut off, or is no safetensors file: {error}") from error


def _json(content: bytes) -> Any:
    """What the bytes say; None if they say nothing."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _state_fault(state: Any) -> str | None:
    """What is wrong with how a weight is said to be stored."""
    if not isinstance(state, dict):
        return "is not a JSON object"
    shape = state.get("shape")
    if not isinstance(shape, list) or not shape or not all(map(_is_size, shape)):
        return f"has the shape {shape!r}"
    if state.get("quant_type") not in CODES:
        return f"has the type {state.get('quant_type')!r}; there are {' and '.join(CODES)}"
    if state.get("dtype") not in _DTYPES:
        return f"has the dtype {state.get('dtype')!r}; there are {', '.join(_DTYPES)}"
    if not _is_size(state.get("blocksize")):
        return f"has the blocksize {state.get('blocksize')!r}"
    if "nested_blocksize" in state:
        offset = state.get("nested_offset")
        if not _is_size(state["nested_blocksize"]):
            return f"has the nested_blocksize {state['nested_blocksize']!r}"
        if not isinstance(offset, int | float) or not isfinite(offset):
            return f"has the nested_offset {offset!r}"
    return None


def _faults(weight: str, state: Any, tensors: Mapping[str, _Stored]) -> Iterator[str]:
    """What is wrong with the tensors of one 4-bit weight, in the order in which a reader would look."""
    wrong = _state_fault(state)
    if wrong is not None:
        yield f"{weight}{_STATE}* {wrong}"
        return
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
