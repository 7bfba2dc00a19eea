"""The per-token statistics that the losses can return."""

from typing import NamedTuple

from torch import Tensor


class TokenStats(NamedTuple):
    """Per-token statistics of `softmax(logits)`, of the labels' shape; zero (False) where the label is ignored.

    The logits are those after scaling and soft-capping. A field that was not asked for is None. float32 (float64 for
    float64 inputs) except `is_top1`. `log_probs` and `entropy` are differentiable, the others carry no gradient.
    """

    log_probs: Tensor | None = None
    """log p[label]: plain, without label smoothing or z-loss."""
    entropy: Tensor | None = None
    """-sum_v p[v] log p[v], in nats."""
    is_top1: Tensor | None = None
    """Whether the label is what `argmax(logits)` gives (the first of equal logits); bool."""
    log_sum_sq_probs: Tensor | None = None
    """log(sum_v p[v]^2)."""
    mean_logits: Tensor | None = None
    """Mean of the logits over the vocabulary."""


def requested_stats(return_stats: bool | tuple[str, ...]) -> tuple[str, ...]:
    """The names of the fields that `return_stats` asks for, in the order of `TokenStats`.

    Raises ValueError for a name that `TokenStats` does not have.
    """
    if isinstance(return_stats, bool):
        return TokenStats._fields if return_stats else ()
    unknown = [name for name in return_stats if name not in TokenStats._fields]
    if unknown:
        raise ValueError(f"return_stats names {unknown[0]!r}; allowed are {', '.join(TokenStats._fields)}")
    return tuple(name for name in TokenStats._fields if name in return_stats)
