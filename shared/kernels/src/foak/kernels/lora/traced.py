"""LoRA's layers as plain differentiable operations, for `torch.compile` to trace without a break.

The operands are concatenated, so that the sum is rounded once here too; dropout is PyTorch's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from foak.kernels.lora.autograd import LoraMember


def lora_linear(x: Tensor, member: LoraMember, dtype: torch.dtype) -> Tensor:
    """See `foak.kernels.lora_linear`; the factors are rounded to `dtype`."""
    x = x.to(dtype)
    z = F.linear(F.dropout(x, member.dropout_p), member.a.to(dtype)) * member.scaling
    operands = torch.cat((x, z.to(dtype)), dim=-1), torch.cat((member.weight(dtype), member.b.to(dtype)), dim=-1)
    return F.linear(*operands, None if member.bias is None else member.bias.to(dtype))
