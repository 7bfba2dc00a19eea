"""Decoding of 4-bit weights that are scaled by block: NF4, FP4 and any other code of 16 values."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from foak.kernels.backend import backend_for
from foak.kernels.nf4.reference import dequantize_nf4_reference

__all__ = ["NestedScales", "dequantize_nf4"]

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NestedScales(NamedTuple):
    """How scales that are themselves quantized ("double quantization") are read.

    The scale of block b is `code[absmax8[b]] * absmax[b // blocksize] + offset`, each operation rounded to fp32.

    Attributes:
        absmax: `[ceil(blocks / blocksize)]`, fp32.
        code: `[256]`, fp32.
        offset: `[]`, fp32.
        blocksize: how many scales share one value of `absmax`.
    """

    absmax: Tensor
    code: Tensor
    offset: Tensor
    blocksize: int


def dequantize_nf4(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    shape: Sequence[int],
    *,
    blocksize: int = 64,
    nested: NestedScales | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """The dense values of a tensor that is stored in 4 bits: `code[nibble] * scale of its block`.

    Blocks run over the flattened tensor. A byte holds two values, the first in its upper half.

    Args:
        packed: the nibbles, at least `ceil(prod(shape) / 2)` bytes, in any contiguous shape, seen as any dtype.
        absmax: the scale of each block, `[ceil(prod(shape) / blocksize)]`: fp32, or uint8 with `nested`.
        code: `[16]`, fp32, the value of each nibble before scaling: that of NF4, FP4 or another code.
        shape: shape of the result, such as `[out_features, in_features]`.
        blocksize: how many values share a scale: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
        nested: how `absmax` is read where it is quantized itself; decoded in the same launch.
        dtype: dtype of the result: float32, bfloat16 or float16.
        out: where to write, `shape` in `dtype`; contiguous, or for two dimensions rows of unit stride at any distance.

    Returns:
        The values: the product in fp32, rounded once to `dtype`. It has no gradient. Nothing is synchronised. The bits
        are those of bitsandbytes' `dequantize_4bit` (the README says which zero is not).

    Raises:
        ValueError: a shape, dtype, block size or memory layout is not one of those above.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.
    """
    numel = prod(shape)
    _check(packed, absmax, code, numel, blocksize, nested, dtype)
    if out is not None:
        _check_out(out, shape, dtype)
    if nested is None:
        backend = backend_for(packed, absmax, code, out)
    else:
        backend = backend_for(packed, absmax, code, out, nested.absmax, nested.code, nested.offset)
    if backend == "reference":
        with torch.no_grad():
            stored = packed.reshape(-1).view(torch.uint8)
            values = dequantize_nf4_reference(stored, absmax, code, shape, blocksize, nested, dtype)
            return values if out is None else out.copy_(values)
    from foak.kernels.nf4.triton import decode

    if out is None:
        out = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
    decode(packed, absmax, code, numel, blocksize, nested, out)
    return out


def _check(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    numel: int,
    blocksize: int,
    nested: NestedScales | None,
    dtype: torch.dtype,
) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dequantize_nf4: dtype is {dtype}; allowed are {', '.join(map(str, DTYPES))}")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"dequantize_nf4: blocksize is {blocksize}; allowed are {', '.join(map(str, BLOCKSIZES))}")
    if code.shape != (16,) or code.dtype is not torch.float32:
        raise ValueError(f"dequantize_nf4: code is {tuple(code.shape)} in {code.dtype}; it must be (16,) in float32")
    held = packed.numel() * packed.element_size()
    if held < -(-numel // 2):
        raise ValueError(f"dequantize_nf4: packed holds {held} bytes; {numel} values need {-(-numel // 2)}")
    blocks = -(-numel // blocksize)
    wanted = torch.float32 if nested is None else torch.uint8
    if absmax.numel() != blocks or absmax.dtype is not wanted:
        raise ValueError(
            f"dequantize_nf4: absmax has {absmax.numel()} values in {absmax.dtype}; {numel} values in blocks of "
            f"{blocksize} need {blocks} in {wanted}{'' if nested is None else ' with nested scales'}"
        )
    if nested is None:
        return
    if nested.blocksize < 1 or nested.absmax.numel() != -(-blocks // nested.blocksize):
        raise ValueError(
            f"dequantize_nf4: nested.absmax has {nested.absmax.numel()} values; {blocks} scales in blocks of "
            f"{nested.blocksize} need another number"
        )
    if nested.code.numel() != 256 or nested.offset.numel() != 1:
        raise ValueError("dequantize_nf4: nested.code must have 256 values, nested.offset one")
    for name, tensor in (("absmax", nested.absmax), ("code", nested.code), ("offset", nested.offset)):
        if tensor.dtype is not torch.float32:
            raise ValueError(f"dequantize_nf4: nested.{name} is in {tensor.dtype}; it must be in float32")


def _check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if out.shape != tuple(shape) or out.dtype is not dtype:
        raise ValueError(
            f"dequantize_nf4: out is {tuple(out.shape)} in {out.dtype}; it must be {tuple(shape)} in {dtype}"
        )
    if out.is_contiguous() or (out.ndim == 2 and out.stride(1) == 1 and out.stride(0) >= out.shape[1]):
        return
    raise ValueError(
        f"dequantize_nf4: out has strides {out.stride()}; it must be contiguous, or two-dimensional with a column "
        "stride of 1 and rows that do not overlap"
    )
