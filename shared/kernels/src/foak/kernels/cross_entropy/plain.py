"""The row functions in plain PyTorch: few passes over the logits, in place where that is allowed.

With p = softmax(z) and the label's entry taken out of p, the sum of the rest is `miss`, one minus the label's
probability, without the cancellation that 1 - p would bring. `rows.py` says what the functions are for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from foak.kernels.cross_entropy.labels import assert_labels_async
from foak.kernels.cross_entropy.options import LossOptions, wide_dtype
from foak.kernels.cross_entropy.rows import RowBuffers, Upstream

BLOCK_BYTES = 4 * 2**20
"""Logits that are worked on at a time, in fp32: what stays in a CPU's cache from one pass over them to the next."""


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
    for span in _blocks(logits):
        target = None if gradient is None else gradient[span]
        _forward_block(logits[span], labels[span], out.rows(span), options, target, overwrite or gradient is logits)


def gradient_rows(
    logits: Tensor, labels: Tensor, saved: RowBuffers, upstream: Upstream, options: LossOptions, gradient: Tensor
) -> None:
    """Writes the gradient of the weighted outputs with respect to `logits` [n, V] into `gradient`; see `rows.py`."""
    for span in _blocks(logits):
        _gradient_block(
            logits[span],
            labels[span],
            saved.rows(span),
            upstream.rows(span),
            options,
            gradient[span],
            gradient is logits,
        )


def _forward_block(
    logits: Tensor, labels: Tensor, out: RowBuffers, options: LossOptions, gradient: Tensor | None, overwrite: bool
) -> None:
    z = _scaled(logits, options, overwrite)
    slope = _slope(z, options) if gradient is not None else None
    label = labels.long().clamp(0, z.shape[1] - 1).unsqueeze(1)
    target = z.gather(1, label)
    peak = z.amax(1, keepdim=True)
    mean = z.mean(1, keepdim=True) if options.label_smoothing or "mean_logits" in out.fields else None
    if "is_top1" in out.fields:
        out.get("is_top1").copy_(_is_first_maximum(z, label, target, peak).squeeze(1))

    with_entropy = "entropy" in out.fields
    p = torch.softmax(z, 1) if with_entropy else torch.softmax(z, 1, out=z)
    log_mass = -p.amax(1, keepdim=True).log()  # the largest probability is exp(0) / mass
    if with_entropy:
        # -sum p log p with log p = (z - peak) - log_mass: both parts have one sign. 0 * -inf is to be 0.
        moment = z.sub_(peak).clamp_(min=-1000.0).mul_(p).sum(1)
        out.get("entropy").copy_(log_mass.squeeze(1) - moment)
    if "log_sum_sq_probs" in out.fields:
        out.get("log_sum_sq_probs").copy_(torch.linalg.vector_norm(p, dim=1).log().mul_(2.0))
    p.scatter_(1, label, 0.0)
    miss = p.sum(1, keepdim=True)
    lse = peak + log_mass
    nll = _nll(target, lse, miss)

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


def _gradient_block(
    logits: Tensor,
    labels: Tensor,
    saved: RowBuffers,
    upstream: Upstream,
    options: LossOptions,
    gradient: Tensor,
    overwrite: bool,
) -> None:
    z = _scaled(logits, options, overwrite)
    slope = _slope(z, options)
    label = labels.long().clamp(0, z.shape[1] - 1).unsqueeze(1)
    lse, miss = saved.get("lse").unsqueeze(1), saved.get("miss").unsqueeze(1)
    d_entropy = None
    if upstream.entropy is not None:
        log_p = (z - lse).clamp_(min=-1000.0)
        log_p.scatter_(1, label, -_nll(z.gather(1, label), lse, miss))
        d_entropy = log_p.exp().mul_(log_p.add_(saved.get("entropy").unsqueeze(1)))
        d_entropy.mul_(upstream.entropy.unsqueeze(1))
    # What flows into -log p[label]: its gradient is p off the label, and -miss at the label.
    flow = torch.zeros_like(miss)
    if upstream.log_probs is not None:
        flow = flow - upstream.log_probs.unsqueeze(1)
    if upstream.loss is not None and options.is_plain:
        flow = flow + upstream.loss.unsqueeze(1)
    p = torch.softmax(z, 1, out=z)
    p.scatter_(1, label, -miss)
    if upstream.loss is not None and not options.is_plain:
        d_log_probs = p * flow
        _loss_gradient(p, label, lse, miss, options)
        p.mul_(upstream.loss.unsqueeze(1)).add_(d_log_probs)
    else:
        p.mul_(flow)
    if d_entropy is not None:
        p.sub_(d_entropy)
    _finish(p, slope, options, gradient)


def _blocks(logits: Tensor) -> Iterator[slice]:
    count, vocab_size = logits.shape
    step = max(1, BLOCK_BYTES // (vocab_size * wide_dtype(logits.dtype).itemsize))
    for start in range(0, count, step):
        yield slice(start, start + step)


def _nll(target: Tensor, lse: Tensor, miss: Tensor) -> Tensor:
    """-log p[label], from one minus p[label] where that is the more accurate."""
    return torch.where(miss < 0.5, -torch.log1p(-miss.clamp(max=0.5)), lse - target)


def _is_first_maximum(z: Tensor, label: Tensor, target: Tensor, peak: Tensor) -> Tensor:
    """Whether argmax gives the label, [n, 1]. On a CPU argmax, which is slow, is left to the rows where it may."""
    if z.device.type != "cpu":
        return z.argmax(1, keepdim=True).eq(label)
    found = target == peak
    rows = found.squeeze(1).nonzero().squeeze(1)
    found[rows] = z[rows].argmax(1, keepdim=True).eq(label[rows])
    return found


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
    """Turns probabilities `p` [n, V] into the gradient of the loss, in place; what `p` has at the label is not read.

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
