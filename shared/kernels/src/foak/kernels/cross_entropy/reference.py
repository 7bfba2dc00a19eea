"""The plain twin of the cross entropy: full logits, ordinary autograd, fp32 or wider."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foak.kernels.cross_entropy.options import LossOptions, reduce_loss, wide_dtype
from foak.kernels.cross_entropy.stats import TokenStats


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    num_items_in_batch: int | Tensor | None = None,
    wanted: tuple[str, ...] = (),
) -> tuple[Tensor, TokenStats]:
    """The loss and the `wanted` statistics of `logits` [..., V] for `labels` [...].

    With o the logsumexp of the other logits, the negative log-probability of the label's logit t is softplus(o - t)
    and its derivative sigmoid(o - t): nothing cancels when the label's probability is near one.
    """
    z = logits.to(wide_dtype(logits.dtype)) * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    kept = labels != options.ignore_index
    label = torch.where(kept, labels, 0).long().unsqueeze(-1)
    target = z.gather(-1, label).squeeze(-1)
    is_label = torch.arange(z.shape[-1], device=z.device) == label
    others = z.masked_fill(is_label, float("-inf")).logsumexp(-1)
    nll = F.softplus(others - target, threshold=50.0)
    lse = target + nll

    losses = (1.0 - options.label_smoothing) * nll
    if options.label_smoothing:
        losses = losses + options.label_smoothing * (lse - z.mean(-1))
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    losses = losses.masked_fill(~kept, 0.0)

    found: dict[str, Tensor] = {}
    if "log_probs" in wanted:
        found["log_probs"] = -nll
    if "entropy" in wanted:
        log_p = z - lse.unsqueeze(-1)
        found["entropy"] = -(log_p.exp() * log_p).sum(-1)
    if "is_top1" in wanted:
        found["is_top1"] = z.argmax(-1, keepdim=True).eq(label).squeeze(-1)
    if "log_sum_sq_probs" in wanted:
        found["log_sum_sq_probs"] = (2.0 * (z.detach() - lse.detach().unsqueeze(-1))).logsumexp(-1)
    if "mean_logits" in wanted:
        found["mean_logits"] = z.detach().mean(-1)
    stats = TokenStats(**{name: value.masked_fill(~kept, 0) for name, value in found.items()})
    total = losses if options.reduction == "none" else losses.sum()
    return reduce_loss(total, options, kept.sum(), num_items_in_batch), stats
