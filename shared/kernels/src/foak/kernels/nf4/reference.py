"""The decoding of 4-bit weights in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foak.kernels.nf4 import NestedScales


def dequantize_nf4_reference(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    shape: Sequence[int],
    blocksize: int,
    nested: NestedScales | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `foak.kernels.dequantize_nf4`; `packed` is flat, in uint8."""
    numel = prod(shape)
    scales = absmax.reshape(-1)
    if nested is not None:
        groups = nested.absmax.reshape(-1).repeat_interleave(nested.blocksize)[: scales.numel()]
        scales = nested.code.reshape(-1)[scales.int()] * groups + nested.offset
    # Both values of each of the 256 bytes, seen as one of 8 bytes, so that one look-up decodes a byte.
    both = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1).view(torch.int64).reshape(-1)
    values = both.index_select(0, packed[: -(-numel // 2)].int()).view(torch.float32)[:numel]
    whole = numel - numel % blocksize
    values[:whole].view(-1, blocksize).mul_(scales[: whole // blocksize, None])
    values[whole:].mul_(scales[whole // blocksize :])
    return values.to(dtype).reshape(tuple(shape))
