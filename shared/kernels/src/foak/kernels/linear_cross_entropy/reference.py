"""The plain twin of the linear cross entropy: the full logits, ordinary autograd, fp32 or wider."""

import torch.nn.functional as F
from torch import Tensor

from foak.kernels.cross_entropy.options import LossOptions, wide_dtype
from foak.kernels.cross_entropy.reference import cross_entropy_reference
from foak.kernels.cross_entropy.stats import TokenStats


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    num_items_in_batch: int | Tensor | None = None,
    wanted: tuple[str, ...] = (),
) -> tuple[Tensor, TokenStats]:
    """The loss and the `wanted` statistics of `hidden` [N, H], `weight` [V, H], `labels` [N] and `bias` [V]."""
    dtype = wide_dtype(hidden.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return cross_entropy_reference(logits, labels, options, num_items_in_batch, wanted)
