"""The decoder of GPTQ's format in plain PyTorch."""

import torch
from torch import Tensor


def dequantize_gptq_reference(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group_size: int | None,
    in_features: int,
    zero_offset: int,
) -> Tensor:
    """See `foak.kernels.dequantize_gptq`; the result is `[out_features, in_features]` float32, not yet rounded."""
    codes = _fields(qweight.t(), bits, in_features)
    zeros = (_fields(qzeros, bits, scales.shape[1]) + zero_offset).bitwise_and_(2**bits - 1)
    if g_idx is None:
        assert group_size is not None
        g_idx = torch.arange(in_features, device=qweight.device) // group_size
    return (codes - zeros.t().index_select(1, g_idx)).float().mul_(scales.t().float().index_select(1, g_idx))


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` values of `bits` bits in each row of `words` [rows, W] int32: [rows, count] int32."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
        found = words.contiguous().unsqueeze(2).bitwise_right_shift(shifts).flatten(1)[:, :count]
    else:
        first = torch.arange(count, device=words.device) * bits
        shifts = (first % 32).to(torch.int32)
        # Where a value crosses into the next word, its upper bits come from there; elsewhere that is the same word.
        last = words.index_select(1, (first + bits - 1) // 32)
        below = (32 - shifts).clamp(max=31)
        found = words.index_select(1, first // 32).bitwise_right_shift(shifts)
        lower = found.bitwise_and(torch.ones_like(below).bitwise_left_shift(below) - 1)
        found = torch.where(shifts + bits > 32, lower | last.bitwise_left_shift(below), found)
    return found.bitwise_and(2**bits - 1)  # without the copies of the sign that were shifted in
