"""Cross entropy of a linear head's output without the logits: only chunks of them ever exist."""

from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from foak.kernels.backend import backend_for, in_function_transform
from foak.kernels.cross_entropy.labels import check_labels, keep_labelled
from foak.kernels.cross_entropy.options import LossKeywords, LossOptions, Reduction, check_num_items, reduce_loss
from foak.kernels.cross_entropy.stats import TokenStats, requested_stats
from foak.kernels.linear_cross_entropy.autograd import LinearCrossEntropy
from foak.kernels.linear_cross_entropy.projection import product_dtype
from foak.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["TokenStats", "linear_cross_entropy"]


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[LossKeywords],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_stats: Literal[True] | tuple[str, ...],
    **options: Unpack[LossKeywords],
) -> tuple[Tensor, TokenStats]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
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
    """`cross_entropy(hidden @ weight.T + bias, labels)` with memory for a chunk of the logits instead of all of them.

    Tokens whose label is `ignore_index` are left out of the product. The keyword arguments are those of
    `foak.kernels.cross_entropy`.

    Args:
        hidden: `[N, H]`, of any floating-point dtype and memory layout.
        weight: `[V, H]`, likewise; the tied embedding or the head's own.
        labels: `[N]`, int32 or int64, each in `[0, V)` or `ignore_index`. They are shifted already: token i is
            scored against label i.
        bias: `[V]` or None.

    Returns:
        The loss, fp32 (fp64 for fp64 products): [] or, for the reduction "none", `[N]`. With `return_stats` a pair of
        it and `TokenStats` of `[N]`. Differentiable, once, in `hidden`, `weight` and `bias`, through the loss and
        through `log_probs` and `entropy`; each gradient has its input's dtype. An input that requires no gradient
        costs nothing. When every label is ignored the loss is 0 and the gradients are zero.

        The product is computed in the promoted dtype of the inputs, under autocast in autocast's, and rounded to it, as
        `torch.nn.functional.linear` does; the loss is computed in fp32, and the weight's gradient summed over chunks
        in fp32.

        With a summed loss ("mean", "sum") the gradients are computed along with it: 2 products of N x V x H for a
        frozen head, 3 for a trained one. With per-token upstream gradients (the reduction "none", or through
        `log_probs`) a frozen head still takes 2, a trained one 4, since the backward needs the logits again; so does
        a gradient through `entropy`, and through `log_probs` of a loss with smoothing or z-loss. A caller that builds
        a loss from `log_probs` chooses the reduction "none", so that nothing is computed for a loss it does not use.

    Raises:
        ValueError, TypeError: as `foak.kernels.cross_entropy` does, and for shapes that do not fit.

    The host waits for the device once, for the number of tokens that are not ignored. `torch.compile` breaks its graph
    here.
    """
    evaluate = _linear_cross_entropy
    if torch.compiler.is_compiling():
        # Which tokens are kept is known only at run time, so this runs outside of the graph.
        evaluate = torch.compiler.disable(evaluate)  # type: ignore[no-untyped-call]
    elif in_function_transform():
        evaluate = linear_cross_entropy_reference
    options = LossOptions(ignore_index, reduction, label_smoothing, logit_scale, softcap, z_loss)
    wanted = requested_stats(return_stats)
    loss, stats = evaluate(hidden, weight, labels, bias, options, num_items_in_batch, wanted)
    return (loss, stats) if return_stats else loss


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    num_items_in_batch: int | Tensor | None,
    wanted: tuple[str, ...],
) -> tuple[Tensor, TokenStats]:
    _check_shapes(hidden, weight, labels, bias)
    check_num_items(options, num_items_in_batch)
    check_labels(labels, weight.shape[0], options)
    kept = keep_labelled(labels.contiguous(), options.ignore_index)
    dtype = product_dtype(hidden, weight, bias)
    # The kernels see logits of `dtype`, not these tensors; a product in float64 is left to plain PyTorch.
    backend = "reference" if dtype is torch.float64 else backend_for(hidden, weight, bias)
    losses, *values = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, kept, options, wanted, backend, dtype, torch.is_grad_enabled()
    )
    return reduce_loss(losses, options, kept.labels.shape[0], num_items_in_batch), TokenStats(*values)


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    fits = fits and labels.shape == hidden.shape[:1] and weight.shape[0] > 0
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        raise ValueError(
            f"linear_cross_entropy: hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
            f"{tuple(labels.shape)}, bias {None if bias is None else tuple(bias.shape)}; allowed are [N, H], [V, H], "
            f"[N] and [V]"
        )
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"linear_cross_entropy: {name} is {tensor.dtype}; allowed are floating-point dtypes")
