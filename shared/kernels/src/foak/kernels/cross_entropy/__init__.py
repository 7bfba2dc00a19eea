"""Cross entropy of logits that exist: one pass over them forward, one read and one write backward."""

from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from foak.kernels.backend import backend_for, in_function_transform
from foak.kernels.cross_entropy.autograd import CrossEntropy
from foak.kernels.cross_entropy.labels import KeptLabels, assert_labels_async, check_labels, keep_labelled
from foak.kernels.cross_entropy.options import LossKeywords, LossOptions, Reduction, check_num_items, reduce_loss
from foak.kernels.cross_entropy.reference import cross_entropy_reference
from foak.kernels.cross_entropy.stats import TokenStats, requested_stats

__all__ = ["TokenStats", "cross_entropy"]


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, return_stats: Literal[False] = False, **options: Unpack[LossKeywords]
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, *, return_stats: Literal[True] | tuple[str, ...], **options: Unpack[LossKeywords]
) -> tuple[Tensor, TokenStats]: ...


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items_in_batch: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_stats: bool | tuple[str, ...] = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """The cross entropy of `softmax(z)` and the labels, where `z` are the scaled and soft-capped logits.

    With `z = logits * logit_scale`, then `softcap * tanh(z / softcap)` when there is a soft cap, the loss of a token is

        (1 - label_smoothing) * -log p[label] + label_smoothing * mean_v(-log p[v]) + z_loss * logsumexp(z)^2

    Args:
        logits: `[..., V]`, of any floating-point dtype and memory layout. They are not changed.
        labels: `[...]`, int32 or int64, each in `[0, V)` or `ignore_index`. Nothing is shifted.
        ignore_index: the label of tokens that count for nothing: their loss, gradient and statistics are zero.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none" (`[...]`).
        num_items_in_batch: for "mean" and "sum", what the sum is divided by instead (with gradient accumulation, the
            tokens of all micro-batches). 0 counts as 1.
        label_smoothing: from 0 to 1, with the meaning of `torch.nn.functional.cross_entropy`.
        logit_scale: factor on the logits.
        softcap: bound of the logits, applied after the scale.
        z_loss: weight of the squared logsumexp.
        return_stats: True for all fields of `TokenStats`, or the names of some.

    Returns:
        The loss, fp32 (fp64 for fp64 logits), computed in fp32; with `return_stats` a pair of it and the statistics.
        When every label is ignored the loss is 0 and the gradients are zero. Differentiable in `logits`, once; the
        gradient has the logits' dtype, is computed in fp32 and rounded once, and keeps its relative accuracy where the
        label's probability is near one.

    Raises:
        ValueError: for an option outside its range, for shapes that do not fit, and for a label on the CPU that is
            neither in the vocabulary nor `ignore_index`. On a GPU, where looking would make the host wait, such a
            label fails a device-side assertion and is not used to read memory.
        TypeError: for labels that are not int32 or int64, or logits that are not floating-point.

    While `torch.compile` traces it, the plain twin is traced, so that the whole graph can be fused; `torch.func` sees
    the plain twin too.
    """
    options = LossOptions(ignore_index, reduction, label_smoothing, logit_scale, softcap, z_loss)
    check_num_items(options, num_items_in_batch)
    wanted = requested_stats(return_stats)
    if logits.shape[:-1] != labels.shape or logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"cross_entropy: logits have shape {tuple(logits.shape)}, labels {tuple(labels.shape)}; "
            f"allowed are [..., V] and [...]"
        )
    if not logits.is_floating_point():
        raise TypeError(f"cross_entropy: logits are {logits.dtype}; allowed are floating-point dtypes")
    vocab_size = logits.shape[-1]
    check_labels(labels, vocab_size, options)

    if torch.compiler.is_compiling() or in_function_transform():
        assert_labels_async(labels, vocab_size, options)
        loss, stats = cross_entropy_reference(logits, labels, options, num_items_in_batch, wanted)
        return (loss, stats) if return_stats else loss

    backend = backend_for(logits)
    flat_labels = labels.reshape(-1)
    count: int | Tensor = 0
    if backend == "triton":
        kept = KeptLabels(None, flat_labels.contiguous())
        if reduction == "mean" and num_items_in_batch is None:
            count = (flat_labels != ignore_index).sum()
    else:
        kept = keep_labelled(flat_labels, ignore_index)
        count = kept.labels.shape[0]
    losses, *values = CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, vocab_size), kept, options, wanted, backend
    )
    if reduction == "none":
        losses = losses.view(labels.shape)
    loss = reduce_loss(losses, options, count, num_items_in_batch)
    if not return_stats:
        return loss
    return loss, TokenStats(*(None if value is None else value.view(labels.shape) for value in values))
