"""The autograd function of the cross entropy: its backward recomputes the probabilities from one saved number a row."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foak.kernels._rows import row_view
from foak.kernels.autograd import once_differentiable
from foak.kernels.backend import Backend
from foak.kernels.cross_entropy.labels import KeptLabels
from foak.kernels.cross_entropy.options import LossOptions, wide_dtype
from foak.kernels.cross_entropy.rows import RowBuffers, Upstream, row_functions
from foak.kernels.cross_entropy.stats import TokenStats

PLAIN_CHUNK_BYTES = 32 * 2**20
"""Without kernels, when labels are ignored, this much of the kept rows is gathered at a time."""

Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class CrossEntropy(torch.autograd.Function):
    """Saves the logits as they are, and per row the logsumexp and one minus the label's probability."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, kept: KeptLabels, options: LossOptions, wanted: tuple[str, ...], backend: Backend
    ) -> Outputs:
        """Of `logits` [N, V]: the loss (the sum, [], or per token, [N]) and the fields of TokenStats, [N] each."""
        count = logits.shape[0]
        forward_rows = row_functions(backend).forward_rows
        saved = RowBuffers.allocate(kept.labels.shape[0], logits, wide_dtype(logits.dtype), options, wanted)
        for span, rows in _chunks(logits, kept, backend):
            forward_rows(rows, kept.labels[span], saved.rows(span), options)
        ctx.options, ctx.backend, ctx.fields = options, backend, saved.fields
        ctx.save_for_backward(logits, kept.positions, kept.labels, saved.values)
        ctx.set_materialize_grads(False)

        losses = saved.get("loss")
        loss = kept.spread(losses, count) if options.reduction == "none" else losses.sum()
        stats = spread_stats(saved.stats(wanted), kept, count)
        mark_fixed_outputs(ctx, stats)
        # A view of what is saved must not leave the function.
        return (loss.clone() if loss is losses else loss, *stats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, positions, labels, values = ctx.saved_tensors
        options: LossOptions = ctx.options
        kept = KeptLabels(positions, labels)
        upstream = kept_upstream(gradients, kept).folded(options)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        if all(part is None for part in upstream):
            return torch.zeros_like(logits), None, None, None, None
        saved = RowBuffers(values, ctx.fields)
        gradient_rows = row_functions(ctx.backend).gradient_rows
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if positions is not None:
            gradient.zero_()
        for span, rows in _chunks(logits, kept, ctx.backend):
            target = gradient[span] if positions is None else torch.empty_like(rows)
            gradient_rows(rows, labels[span], saved.rows(span), upstream.rows(span), options, target)
            if positions is not None:
                gradient.index_copy_(0, positions[span], target)
        return gradient, None, None, None, None


def kept_upstream(gradients: tuple[Tensor | None, ...], kept: KeptLabels) -> Upstream:
    """The upstream gradients of (loss, log_probs, entropy, ...) as numbers per kept token, [n] and contiguous."""

    def per_token(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        if gradient.dim() == 0:
            return gradient.expand(kept.labels.shape[0]).contiguous()
        return kept.take(gradient).contiguous()

    return Upstream(*(per_token(gradient) for gradient in gradients[:3]))


def spread_stats(stats: TokenStats, kept: KeptLabels, length: int) -> TokenStats:
    """`stats` of the kept tokens at their places among `length` tokens, each in memory of its own."""

    def spread(value: Tensor) -> Tensor:
        return value.clone() if kept.positions is None else kept.spread(value, length)

    return TokenStats(*(None if value is None else spread(value) for value in stats))


def mark_fixed_outputs(ctx: Any, stats: TokenStats) -> None:
    """Tells autograd which statistics carry no gradient."""
    fixed = (stats.is_top1, stats.log_sum_sq_probs, stats.mean_logits)
    ctx.mark_non_differentiable(*(value for value in fixed if value is not None))


def _chunks(logits: Tensor, kept: KeptLabels, backend: Backend) -> Iterator[tuple[slice, Tensor]]:
    """The rows of the kept tokens in chunks, and where each chunk lies among them."""
    count = kept.labels.shape[0]
    if count == 0:
        return
    if backend == "triton":
        assert kept.positions is None, "the kernels skip ignored rows themselves"
        rows, _ = row_view(logits, logits.shape[1])
        yield slice(0, count), rows
        return
    if kept.positions is None:
        yield slice(0, count), logits
        return
    step = max(1, PLAIN_CHUNK_BYTES // (logits.shape[1] * logits.dtype.itemsize))
    for start in range(0, count, step):
        span = slice(start, start + step)
        yield span, logits.index_select(0, kept.positions[span])
