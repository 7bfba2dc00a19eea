"""Rotary position embedding in plain PyTorch."""

import torch
from torch import Tensor


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """See `foak.kernels.rope`; autograd gives the gradients."""
    return _rotate(q, cos, sin, unsqueeze_dim), _rotate(k, cos, sin, unsqueeze_dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    cos = cos.to(compute).unsqueeze(unsqueeze_dim)
    sin = sin.to(compute).unsqueeze(unsqueeze_dim)
    rotated = cos.shape[-1]
    turning = x[..., :rotated].to(compute)
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-high, low), dim=-1) * sin
    if rotated == x.shape[-1]:
        return turned.to(dtype)
    return torch.cat((turned.to(dtype), x[..., rotated:].to(dtype)), dim=-1)
