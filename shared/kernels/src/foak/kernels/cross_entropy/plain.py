"""The row functions in plain PyTorch: few passes over the logits, in place where that is allowed.

With p = softmax(z) and the label's entry taken out of p, the sum of the rest is `miss`, one minus the label's
probability, without the cancellation that 1 - p would bring. `rows.py` says what the functions are for.
"""

import torch
from torch import Tensor

from foak.kernels.cross_entropy.labels import assert_labels_async
from foak.kernels.cross_entropy.options import LossOptions, wide_dtype
from foak.kernels.cross_entropy.rows import RowBuffers, Upstream


def forward_rows(
    logits: Tensor,
    labels: Tensor,
    out: RowBuffers,
    options: LossOptions,
    gradient: Tensor | None = None,
    overwrite: bool = False,
) -> None:
    """Fills `out` from `logits` [n, V] and `labels` [n], none of them ignored; see `rows.py`."""
    if labels.device.type != "cpu":
        assert_labels_async(labels, logits.shape[1], options)
    z = _scaled(logits, options, overwrite or gradient is logits)
    slope = _slope(z, options) if gradient is not None else None
    label = labels.long().clamp(0, z.shape[1] - 1).unsqueeze(1)
    target = z.gather(1, label)
    peak = z.amax(1, keepdim=True)
    mean = z.mean(1, keepdim=True) if options.label_smoothing or "mean_logits" in out.fields else None
    if "is_top1" in out.fields:
        out.get("is_top1").copy_(z.argmax(1, keepdim=True).eq(label).squeeze(1))

    p = torch.softmax(z, 1, out=z)
    log_mass = -p.amax(1, keepdim=True).log()  # the largest probability is exp(0) / mass
    if "entropy" in out.fields:
        out.get("entropy").copy_(torch.special.entr(p).sum(1))
    if "log_sum_sq_probs" in out.fields:
        out.get("log_sum_sq_probs").copy_(torch.linalg.vector_norm(p, dim=1).log().mul_(2.0))
    p.scatter_(1, label, 0.0)
    miss = p.sum(1, keepdim=True)
    nll = torch.where(miss < 0.5, -torch.log1p(-miss.clamp(max=0.5)), peak + log_mass - target)
    lse = peak + log_mass

    loss = (1.0 - options.label_smoothing) * nll
    if options.label_smoothing:
        assert mean is not None
        loss = loss + options.label_smoothing * (lse - mean)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    for name, value in (("lse", lse), ("miss", miss), ("loss", loss), ("log_probs", -nll), ("mean_logits", mean)):
        if name in out.fields and value is not None:
            out.get(name).copy_(value.squeeze(1))
    if gradient is not None:
        if options.is_plain:
            p.scatter_(1, label, -miss)
        else:
            _loss_gradient(p, label, lse, miss, options)
        _finish(p, slope, options, gradient)


def gradient_rows(
    logits: Tensor, labels: Tensor, saved: RowBuffers, upstream: Upstream, options: LossOptions, gradient: Tensor
) -> None:
    """Writes the gradient of the weighted outputs with respect to `logits` [n, V] into `gradient`; see `rows.py`."""
    z = _scaled(logits, options, gradient is logits)
    slope = _slope(z, options)
    label = labels.long().clamp(0, z.shape[1] - 1).unsqueeze(1)
    lse, miss = saved.get("lse").unsqueeze(1), saved.get("miss").unsqueeze(1)
    spread = None
    if upstream.entropy is not None:
        log_p = z - lse
        nll = torch.where(miss < 0.5, -torch.log1p(-miss.clamp(max=0.5)), -log_p.gather(1, label))
        log_p.scatter_(1, label, -nll)
        spread = log_p.exp().mul_(log_p.clamp_(min=torch.finfo(z.dtype).min) + saved.get("entropy").unsqueeze(1))
        spread.mul_(upstream.entropy.unsqueeze(1))
    p = torch.softmax(z, 1, out=z)
    plain = torch.zeros_like(miss)
    if upstream.log_probs is not None:
        plain = plain - upstream.log_probs.unsqueeze(1)
    if upstream.loss is not None and options.is_plain:
        plain = plain + upstream.loss.unsqueeze(1)
    if upstream.loss is not None and not options.is_plain:
        rest = p * plain
        rest.scatter_(1, label, -miss * plain)
        p.scatter_(1, label, 0.0)
        _loss_gradient(p, label, lse, miss, options)
        p.mul_(upstream.loss.unsqueeze(1)).add_(rest)
    else:
        p.mul_(plain).scatter_(1, label, -miss * plain)
    if spread is not None:
        p.sub_(spread)
    _finish(p, slope, options, gradient)


def _scaled(logits: Tensor, options: LossOptions, overwrite: bool) -> Tensor:
    """The scaled and soft-capped logits in fp32 or wider, in memory that may be overwritten."""
    z = logits.to(wide_dtype(logits.dtype), copy=not overwrite)
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    if options.softcap is not None:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    return z


def _slope(z: Tensor, options: LossOptions) -> Tensor | None:
    """The derivative of the soft-capping at its result `z`; None without soft-capping."""
    if options.softcap is None:
        return None
    return (z / options.softcap).square_().neg_().add_(1.0)


def _loss_gradient(p: Tensor, label: Tensor, lse: Tensor, miss: Tensor, options: LossOptions) -> None:
    """Turns probabilities `p` [n, V], the label's already zero, into the gradient of the loss, in place.

    d loss / d z[v] = (1 + 2 z_loss lse) p[v] - (1 - smoothing) [v is the label] - smoothing / V
    """
    growth = 2.0 * options.z_loss * lse
    floor = options.label_smoothing / p.shape[1]
    at_label = growth * (1.0 - miss) - miss + (options.label_smoothing - floor)
    p.mul_(1.0 + growth).sub_(floor).scatter_(1, label, at_label)


def _finish(p: Tensor, slope: Tensor | None, options: LossOptions, gradient: Tensor) -> None:
    """Leads the gradient `p` back through the soft-capping and the scale, into `gradient`."""
    if slope is not None:
        p.mul_(slope)
    if options.logit_scale != 1.0:
        p.mul_(options.logit_scale)
    if p is not gradient:
        gradient.copy_(p)
