"""Where fused ops read the dense weight of a GPTQ layer: the entries of the group `foak.dense_weights`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foak.kernels import dequantize_gptq
from foak.kernels.dense_weight import DenseWeight
from foak.kernels.gptq import BITS
from foak.quantized_peft.gptq.layer import GptqLinear

__all__ = ["GPTQMODEL", "OWN"]


def _decode(layer: nn.Module, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    assert isinstance(layer, GptqLinear)
    return layer.dequantize(dtype, out)


OWN = DenseWeight(
    refusal=lambda layer: None,
    decode=_decode,
    product_dtype=lambda layer, x: x.dtype,
)
"""foak's own layer."""


def _refuse_gptqmodel(layer: Any) -> str | None:
    if layer.bits not in BITS or getattr(layer, "planar", False) or layer.pack_dtype is not torch.int32:
        return "its GPTQModel layer stores words in another layout than 2, 3, 4 or 8 bits in int32"
    if layer.adapter is not None:
        return "its GPTQModel layer has an adapter of its own"
    if layer.online_full_had or layer.online_partial_had:
        return "its GPTQModel layer rotates its input"
    return None


def _decode_gptqmodel(layer: Any, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    # The layer rounds to the dtype of its scales first, and then to that of its input. In whatever way a checkpoint
    # stores zeros, the layer has brought them into the second version's when it was made ready.
    rounded: torch.dtype = layer.scales.dtype
    weight = dequantize_gptq(
        layer.qweight,
        layer.qzeros,
        layer.scales,
        layer.g_idx,
        layer.bits,
        zero_offset=0,
        dtype=rounded,
        out=out if dtype is rounded else None,
    )
    if dtype is rounded:
        return weight
    return weight.to(dtype) if out is None else out.copy_(weight)


GPTQMODEL = DenseWeight(
    refusal=_refuse_gptqmodel,
    decode=_decode_gptqmodel,
    product_dtype=lambda layer, x: x.dtype,
)
"""GPTQModel's layers that keep the format as it is (its other kernels repack it)."""
