"""LayerNorm in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional as F


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """See `foak.kernels.layer_norm`; autograd gives the gradients.

    PyTorch's own op, on fp32 (or fp64) copies of what is narrower: given mixed dtypes it refuses or rounds in between.
    """
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    dtype = x.dtype
    for tensor in given:
        dtype = torch.promote_types(dtype, tensor.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return F.layer_norm(
        x.to(compute),
        x.shape[-1:],
        None if weight is None else weight.to(compute),
        None if bias is None else bias.to(compute),
        eps,
    ).to(dtype)
