"""How fused ops read the weights of bitsandbytes' linear layers; see `foak.kernels.dense_weight`.

A layer is read through its attributes, so that nothing here imports bitsandbytes.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from foak.kernels import NestedScales, dequantize_nf4
from foak.kernels.dense_weight import DenseWeight
from foak.kernels.nf4 import BLOCKSIZES, DTYPES

__all__ = ["CODES", "LINEAR_4BIT", "LINEAR_8BIT", "decode_4bit", "quant_state_of"]

CODES = ("nf4", "fp4")
"""The 4-bit codes."""


def quant_state_of(layer: nn.Module) -> Any | None:
    """The `QuantState` of a 4-bit layer's weight; None where the weight is not quantized (yet).

    FSDP replaces the parameter by a plain one; bitsandbytes keeps a reference on the layer for that case.
    """
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def decode_4bit(packed: Tensor, state: Any, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The dense weight of a 4-bit one.

    Args:
        packed: the parameter's data, in any storage dtype.
        state: its `QuantState`.
        dtype: dtype of the result, whatever `state.dtype` is: the value in fp32 is rounded once, to this one. In
            float64 it is the exact value in fp32.
        out: where to write `[out_features, in_features]` in `dtype`; see `foak.kernels.dequantize_nf4`.
    """
    if dtype not in DTYPES:
        wider = decode_4bit(packed, state, torch.float32).to(dtype)
        return wider if out is None else out.copy_(wider)
    nested = None
    if state.nested:
        second = state.state2
        nested = NestedScales(second.absmax, second.code, state.offset, second.blocksize)
    return dequantize_nf4(
        packed, state.absmax, state.code, state.shape, blocksize=state.blocksize, nested=nested, dtype=dtype, out=out
    )


def _refusal_4bit(layer: nn.Module) -> str | None:
    state = quant_state_of(layer)
    if state is None:
        return "its weight is not quantized yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has packed its weight for inference on this CPU (call train() before the first forward)"
    if state.quant_type not in CODES:
        return f"its weight is of the unknown 4-bit type {state.quant_type}"
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return f"its weight was quantized as {tuple(state.shape)}, not as [out_features, in_features]"
    if state.blocksize not in BLOCKSIZES:
        return f"its weight has blocks of {state.blocksize} values"
    return _wrong_scales(state)


def _wrong_scales(state: Any) -> str | None:
    """Why the scales do not fit the weight; None if they do."""
    count = -(-prod(state.shape) // state.blocksize)
    scales = state.absmax
    if state.nested:
        if scales.dtype is not torch.uint8 or scales.numel() != count:
            return f"its weight has {_described(scales)} for nested scales, but must have {count} in uint8"
        count, scales = -(-count // state.state2.blocksize), state.state2.absmax
    if scales.dtype is not torch.float32 or scales.numel() != count:
        return f"its weight has {_described(scales)} for scales, but must have {count} in float32"
    return None


def _described(tensor: Tensor) -> str:
    return f"{tensor.numel()} values in {str(tensor.dtype).removeprefix('torch.')}"


def _decode_layer(layer: nn.Module, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    weight = cast("Tensor", layer.weight)
    return decode_4bit(weight.detach(), quant_state_of(layer), dtype, out)


def _product_dtype_4bit(layer: nn.Module, x: Tensor) -> torch.dtype:
    """What `Linear4bit.forward` computes in: the dtype given, else that of the first input (float16 is not trusted)."""
    if not layer.compute_type_is_set and x.dtype in (torch.float32, torch.bfloat16):
        return x.dtype
    given = cast("torch.dtype | None", layer.compute_dtype)
    return x.dtype if given is None else given


def _refusal_8bit(layer: nn.Module) -> str:
    return "bitsandbytes int8 rounds the inputs to 8 bits as well, which is no product with a dense weight"


def _no_dense_weight(layer: nn.Module, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    raise AssertionError(_refusal_8bit(layer))


LINEAR_4BIT = DenseWeight(refusal=_refusal_4bit, decode=_decode_layer, product_dtype=_product_dtype_4bit)

LINEAR_8BIT = DenseWeight(refusal=_refusal_8bit, decode=_no_dense_weight, product_dtype=lambda layer, x: x.dtype)
"""Recognised, so that a report can say why the layer is left as it is."""
