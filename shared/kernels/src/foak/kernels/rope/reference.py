"""Rotary position embedding in plain PyTorch."""

import torch
from torch import Tensor


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """See `foak.kernels.rope`; autograd gives the gradients.

    `x * cos + rotate_half(x) * sin` with the sign of `rotate_half` moved to the (smaller) sine, so that what is left of
    it is a roll by half a head.
    """
    dtype = torch.promote_types(cos.dtype, sin.dtype)
    half = cos.shape[-1] // 2
    wide_cos = _widened(cos).unsqueeze(unsqueeze_dim)
    wide_sin = _widened(sin).unsqueeze(unsqueeze_dim)
    signed_sin = torch.cat((-wide_sin[..., :half], wide_sin[..., half:]), dim=-1)
    return _rotate(q, wide_cos, signed_sin, dtype), _rotate(k, wide_cos, signed_sin, dtype)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor, angle_dtype: torch.dtype) -> Tensor:
    dtype = torch.promote_types(x.dtype, angle_dtype)
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return _rotate_all(x, cos, signed_sin).to(dtype)
    turning, passing = torch.split(x, [rotated, x.shape[-1] - rotated], dim=-1)
    return torch.cat((_rotate_all(turning, cos, signed_sin).to(dtype), passing.to(dtype)), dim=-1)


def _rotate_all(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    wide = _widened(x)
    return torch.addcmul(wide * cos, wide.roll(cos.shape[-1] // 2, -1), signed_sin)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
