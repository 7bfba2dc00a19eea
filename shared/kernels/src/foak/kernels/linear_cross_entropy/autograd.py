"""The autograd function of the linear cross entropy.

Where the upstream gradient can only be one number (the loss is a sum), or only scales rows (a frozen head), the
gradients are computed with the loss, from the chunk of logits that is there anyway, and the backward scales them.
Otherwise the backward computes the logits again. What is saved is never overwritten.
"""

from typing import Any

import torch
from torch import Tensor

from foak.kernels.autograd import once_differentiable
from foak.kernels.backend import Backend
from foak.kernels.cross_entropy.autograd import Outputs, kept_upstream, mark_fixed_outputs, spread_stats
from foak.kernels.cross_entropy.labels import KeptLabels
from foak.kernels.cross_entropy.options import LossOptions, wide_dtype
from foak.kernels.cross_entropy.rows import RowBuffers, Upstream, row_functions
from foak.kernels.linear_cross_entropy.projection import Gradients, Projection, Wants

_NO_MORE = (None,) * 6


class LinearCrossEntropy(torch.autograd.Function):
    """Saves gradients where they are known already, and the inputs where they may have to be computed later."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: KeptLabels,
        options: LossOptions,
        wanted: tuple[str, ...],
        backend: Backend,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> Outputs:
        """The loss (the sum, [], or per token, [N]) and the fields of TokenStats, [N] each.

        `dtype` is the product's; without `differentiate` no gradient is prepared, whatever the inputs require.
        """
        wants = Wants(*(differentiate and needed for needed in ctx.needs_input_grad[:3]))
        trained = wants.weight or wants.bias
        per_token = options.reduction == "none"
        early = Wants(False, False, False) if per_token and trained else wants

        forward_rows = row_functions(backend).forward_rows
        saved = RowBuffers.allocate(kept.labels.shape[0], hidden, wide_dtype(dtype), options, wanted)

        def fill(logits: Tensor, span: slice) -> None:
            gradient = logits if any(early) else None
            forward_rows(logits, kept.labels[span], saved.rows(span), options, gradient, overwrite=True)

        with _no_autocast(hidden):
            gradients = Projection(hidden, weight, bias, kept, dtype).run(fill, early)

        # The loss's gradient is not the only one that may be asked for.
        later = any(wants) and (early != wants or "log_probs" in wanted or "entropy" in wanted)
        inputs = (hidden, weight, bias, saved.values) if later else (None, None, None, None)
        ctx.save_for_backward(*inputs, kept.positions, kept.labels, *gradients)
        ctx.options, ctx.backend, ctx.dtype, ctx.fields = options, backend, dtype, saved.fields
        ctx.wants, ctx.early = wants, early
        ctx.hidden_shape = hidden.shape
        ctx.dtypes = tuple(None if leaf is None else leaf.dtype for leaf in (hidden, weight, bias))
        ctx.set_materialize_grads(False)

        losses = saved.get("loss")
        count = hidden.shape[0]
        loss = losses.sum()
        if per_token:
            loss = losses.clone() if kept.positions is None else kept.spread(losses, count)
        stats = spread_stats(saved.stats(wanted), kept, count)
        mark_fixed_outputs(ctx, stats)
        return (loss, *stats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream_of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, values, positions, labels, *early = ctx.saved_tensors
        kept = KeptLabels(positions, labels)
        options: LossOptions = ctx.options
        wants: Wants = ctx.wants
        upstream = kept_upstream(upstream_of_outputs, kept).folded(options)
        if all(part is None for part in upstream):
            return (None, None, None, *_NO_MORE)

        loss_gradient = upstream_of_outputs[0]
        one_number = (
            loss_gradient is not None
            and loss_gradient.dim() == 0
            and not any(gradient is not None for gradient in upstream_of_outputs[1:3])
        )
        rows_only = upstream.log_probs is None and upstream.entropy is None and not (wants.weight or wants.bias)
        if any(ctx.early) and one_number:
            assert loss_gradient is not None
            found = Gradients(*(_scaled(gradient, loss_gradient) for gradient in early))
        elif any(ctx.early) and rows_only:
            assert upstream.loss is not None
            found = Gradients(_scaled(early[0], upstream.loss.unsqueeze(1)))
        else:
            found = _recompute(ctx, Projection(hidden, weight, bias, kept, ctx.dtype), values, upstream)
        d_hidden, d_weight, d_bias = (
            None if gradient is None else gradient.to(dtype) for gradient, dtype in zip(found, ctx.dtypes, strict=True)
        )
        if d_hidden is not None:
            d_hidden = kept.spread(d_hidden, ctx.hidden_shape[0])
        return (d_hidden, d_weight, d_bias, *_NO_MORE)


def _recompute(ctx: Any, projection: Projection, values: Tensor, upstream: Upstream) -> Gradients:
    """All wanted gradients from logits that are computed once more."""
    saved = RowBuffers(values, ctx.fields)
    labels = projection.kept.labels
    gradient_rows = row_functions(ctx.backend).gradient_rows

    def fill(logits: Tensor, span: slice) -> None:
        gradient_rows(logits, labels[span], saved.rows(span), upstream.rows(span), ctx.options, logits)

    with _no_autocast(projection.hidden):
        return projection.run(fill, ctx.wants)


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """A new tensor `gradient * factor`, multiplied in the factor's fp32 (or wider) and rounded once.

    A factor without dimensions would be rounded to the gradient's dtype first.
    """
    if gradient is None:
        return None
    if factor.dim() == 0:
        factor = factor.reshape((1,) * gradient.dim())
    return torch.mul(gradient, factor, out=torch.empty_like(gradient))


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
