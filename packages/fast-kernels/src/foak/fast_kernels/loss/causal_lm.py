"""The causal language model loss by foak's kernels: over real logits, or without any."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from foak.fast_kernels.loss.lazy_logits import LazyLogits
from foak.fast_kernels.loss.request import LossCall
from foak.kernels import cross_entropy


def is_causal_lm_loss(function: Any) -> bool:
    """Whether a model's loss function is the one that `causal_lm_loss` computes."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return function is ForCausalLMLoss or function is causal_lm_loss


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Mean negative log-likelihood of the next token, without a float32 copy of the logits.

    Args:
        logits: ``[B, S, V]``, any floating dtype; the loss is computed and summed in float32.
        labels: ``[B, S]``, not shifted; unused where ``shift_labels`` is given.
        vocab_size: V.
        num_items_in_batch: divisor of the sum; the number of labels that are not ignored by default.
        ignore_index: label of the positions that do not count.
        shift_labels: ``[B, S]``, shifted already.
        **kwargs: what transformers hands to every loss function; not used.

    Returns:
        A float32 scalar; 0 where every label is ignored.
    """
    if shift_labels is None:
        assert labels is not None  # transformers gives one of the two
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, vocab_size)
    if isinstance(rows, LazyLogits):
        loss = rows.cross_entropy(LossCall(targets, ignore_index, "mean", num_items_in_batch))
        if loss is not None:
            return loss.float()
        rows = rows.compute()
    loss = cross_entropy(rows, targets, ignore_index=ignore_index, num_items_in_batch=num_items_in_batch)
    return loss.float()
