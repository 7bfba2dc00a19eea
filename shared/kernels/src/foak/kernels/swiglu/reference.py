"""SwiGLU in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """See `foak.kernels.swiglu`; autograd gives the gradients."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return (F.silu(gate.to(compute)) * up.to(compute)).to(dtype)
