"""RMSNorm in plain PyTorch."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """See `foak.kernels.rms_norm`; autograd gives the gradients."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    scale = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if offset != 0.0:
        scale = scale + offset
    return (normed * scale).to(torch.promote_types(x.dtype, weight.dtype))
