"""The dense weight of a layer stored in GPTQ's format."""

import torch
from torch import Tensor

from foak.kernels.backend import backend_for
from foak.kernels.gptq.reference import dequantize_gptq_reference

__all__ = ["BITS", "dequantize_gptq"]

BITS = (2, 3, 4, 8)
"""The widths of a code."""

_SCALES = (torch.float16, torch.bfloat16, torch.float32)


def dequantize_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    *,
    group_size: int | None = None,
    in_features: int | None = None,
    zero_offset: int = 1,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(code - zero) * scale`, in the layout of `torch.nn.Linear.weight`.

    Codes and zeros are packed into 32-bit words as one little-endian stream of fields: value `k` of a column (of a row
    of `qzeros`) begins at bit `k * bits` of its words. At 3 bits a value may lie across two words.

    Args:
        qweight: `[ceil(in_features * bits / 32), out_features]` int32: the codes, packed along the inputs.
        qzeros: `[groups, ceil(out_features * bits / 32)]` int32: the zeros, packed along the outputs.
        scales: `[groups, out_features]`, float16, bfloat16 or float32.
        g_idx: `[in_features]` int32, the group of each input (act-order). An entry that names no group is an error in
            the twin and gives NaN in the kernel, which could not tell without making the host wait. None: input `k`
            is of group `k // group_size`.
        bits: 2, 3, 4 or 8.
        group_size: the inputs of one group, -1 for a single group; read only where `g_idx` is None.
        in_features: where `g_idx` is None and the last word of a column is not full; otherwise it follows.
        zero_offset: what is added to a stored zero, modulo `2 ** bits`: 1 in the first version of the format, which
            stores zeros less one; 0 in the second (`checkpoint_format: gptq_v2`).
        dtype: of the result; that of `scales` if None.
        out: `[out_features, in_features]` in the result's dtype, with unit column stride and any row stride; it is
            written to and returned.

    Returns:
        `[out_features, in_features]`. The difference is an integer; its product with the scale is taken in fp32, where
        it is exact for scales of 16 bits, and rounded once. With scales and result in float16 these are, bit for bit,
        the weights that AutoGPTQ's and GPTQModel's own layers multiply with. No gradient flows; the host never waits.

    Raises:
        ValueError: a shape, dtype or stride is not the above; the message names it.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022;
    the layout of the words is that of AutoGPTQ's checkpoints.
    """
    if bits not in BITS:
        raise ValueError(f"dequantize_gptq: bits is {bits}; allowed are 2, 3, 4 and 8")
    if zero_offset not in (0, 1):
        raise ValueError(f"dequantize_gptq: zero_offset is {zero_offset}; allowed are 0 and 1")
    if scales.dim() != 2 or scales.dtype not in _SCALES:
        raise ValueError(
            f"dequantize_gptq: scales is {_describe(scales)}; it must be [groups, out_features] in float16, bfloat16 "
            "or float32"
        )
    groups, out_features = scales.shape
    if g_idx is not None:
        in_features = g_idx.shape[0]
        if g_idx.dim() != 1 or g_idx.dtype is not torch.int32:
            raise ValueError(f"dequantize_gptq: g_idx is {_describe(g_idx)}; it must be [in_features] in int32")
    else:
        if in_features is None:
            in_features = qweight.shape[0] * 32 // bits
        if group_size is None or group_size == 0 or group_size < -1:
            raise ValueError(f"dequantize_gptq: group_size is {group_size}; without g_idx it is at least 1, or -1")
        if group_size == -1:
            group_size = max(in_features, 1)
        if groups != -(-in_features // group_size):
            raise ValueError(
                f"dequantize_gptq: scales has {groups} groups; {in_features} inputs in groups of {group_size} make "
                f"{-(-in_features // group_size)}"
            )
    _check_words("qweight", qweight, (-(-in_features * bits // 32), out_features))
    _check_words("qzeros", qzeros, (groups, -(-out_features * bits // 32)))
    dtype = scales.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dequantize_gptq: dtype is {dtype}; it must be a floating-point dtype")
    shape = (out_features, in_features)
    if out is not None and (out.shape != shape or out.dtype is not dtype or (in_features > 1 and out.stride(1) != 1)):
        raise ValueError(
            f"dequantize_gptq: out is {_describe(out)} with strides {out.stride()}; it must be {shape} in {dtype} with "
            "unit column stride"
        )
    if dtype is torch.float64 or backend_for(qweight, qzeros, scales, g_idx, out) == "reference":
        with torch.no_grad():
            weight = dequantize_gptq_reference(
                qweight, qzeros, scales, g_idx, bits, group_size, in_features, zero_offset
            )
            return weight.to(dtype) if out is None else out.copy_(weight)
    from foak.kernels.gptq.triton import dequantize

    if out is None:
        out = torch.empty(shape, dtype=dtype, device=qweight.device)
    dequantize(qweight, qzeros, scales, g_idx, bits, group_size, zero_offset, out)
    return out


def _check_words(name: str, words: Tensor, shape: tuple[int, int]) -> None:
    if words.shape != shape or words.dtype is not torch.int32:
        raise ValueError(f"dequantize_gptq: {name} is {_describe(words)}; it must be {shape} in torch.int32")


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype}"
