"""GeGLU in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def geglu_reference(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """See `foak.kernels.geglu`; autograd gives the gradients."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return (F.gelu(gate.to(compute), approximate=approximate) * up.to(compute)).to(dtype)
