"""Writing GPTQ's format, for tests and benchmarks: to quantize a model for use is the work of GPTQModel."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PackedWeight", "pack_gptq", "round_to_nearest"]


@dataclass(frozen=True)
class PackedWeight:
    """The tensors of one layer, as `foak.kernels.dequantize_gptq` takes them and as checkpoints hold them."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under the names of a checkpoint."""
        return {f"{prefix}.{name}": getattr(self, name) for name in ("qweight", "qzeros", "scales", "g_idx")}


def pack_gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, g_idx: Tensor, bits: int, zero_offset: int = 1
) -> PackedWeight:
    """Packs integers into words.

    Args:
        codes: `[out_features, in_features]`, 0 to `2 ** bits - 1`.
        zeros: `[groups, out_features]`, likewise; stored less `zero_offset`, modulo `2 ** bits`.
        scales: `[groups, out_features]`.
        g_idx: `[in_features]`.
    """
    return PackedWeight(
        qweight=_words(codes, bits).t().contiguous(),
        qzeros=_words((zeros - zero_offset) % 2**bits, bits),
        scales=scales.contiguous(),
        g_idx=g_idx.to(torch.int32),
    )


def round_to_nearest(
    weight: Tensor,
    bits: int,
    group_size: int,
    *,
    sym: bool = True,
    act_order: bool = False,
    zero_offset: int = 1,
    scale_dtype: torch.dtype = torch.float16,
) -> PackedWeight:
    """Quantizes `weight` [out_features, in_features] without calibration: each value goes to the nearest of its grid.

    Args:
        weight: the dense weight.
        bits: the width of a code.
        group_size: inputs that share a scale and a zero; -1 for all of them.
        sym: the zero is the middle code, else the group's least value (or zero, if that is less) has code 0.
        act_order: groups are made of inputs in the order of their magnitude, so `g_idx` is in no order.
        zero_offset: see `pack_gptq`.
        scale_dtype: of the stored scales.
    """
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    groups = -(-in_features // size)
    order = weight.abs().sum(0).argsort(descending=True) if act_order else torch.arange(in_features)
    g_idx = torch.empty(in_features, dtype=torch.int32)
    g_idx[order] = (torch.arange(in_features) // size).to(torch.int32)
    zeros = torch.empty(groups, out_features, dtype=torch.int32)
    scales = torch.empty(groups, out_features, dtype=scale_dtype)
    top = 2**bits - 1
    for group in range(groups):
        values = weight[:, g_idx == group].float()
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).clamp(min=1e-6).to(scale_dtype)
        scales[group] = scale
        zeros[group] = 2 ** (bits - 1) if sym else (-low / scale.float()).round().clamp(0, top).to(torch.int32)
    index = g_idx.long()
    steps = (weight.float() / scales.float().t()[:, index]).round().to(torch.int32)
    codes = (steps + zeros.t()[:, index]).clamp(0, top)
    return pack_gptq(codes, zeros, scales, g_idx, bits, zero_offset)


def _words(values: Tensor, bits: int) -> Tensor:
    """Each row of `values` [R, C] as one little-endian stream of fields, in int32 words [R, ceil(C * bits / 32)]."""
    rows, count = values.shape
    stream = ((values.unsqueeze(2).long() >> torch.arange(bits)) & 1).reshape(rows, count * bits)
    stream = torch.nn.functional.pad(stream, (0, -count * bits % 32)).reshape(rows, -1, 32)
    words = (stream << torch.arange(32)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
