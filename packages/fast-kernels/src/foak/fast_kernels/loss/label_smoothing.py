"""Trainer's label smoothing without the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foak.fast_kernels.loss.lazy_logits import LazyLogits
from foak.fast_kernels.loss.request import LossCall


@dataclass
class FusedLabelSmoother:
    """Stands in for ``transformers.trainer_pt_utils.LabelSmoother`` on one trainer.

    The loss is ``(1 - epsilon) * nll + epsilon / V * sum_v(-log p_v)``, averaged over the labels that are not ignored,
    or summed and divided by ``num_items_in_batch``.

    Attributes:
        original: the smoother that it replaces; it serves logits that were computed after all.
    """

    original: Any

    @property
    def epsilon(self) -> float:
        """The smoothing factor, read from the original."""
        return float(self.original.epsilon)

    @property
    def ignore_index(self) -> int:
        """The label that marks ignored positions, read from the original."""
        return int(self.original.ignore_index)

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """The smoothed loss.

        Args:
            model_output: a model's output, with ``logits`` ``[B, S, V]``.
            labels: ``[B, S]``.
            shift_labels: whether position t is scored against label t + 1.
            **kwargs: ``num_items_in_batch``, where this version of transformers passes it.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if isinstance(logits, LazyLogits) and not logits.is_computed and kwargs.keys() <= {"num_items_in_batch"}:
            if shift_labels:
                rows, targets = logits[..., :-1, :], labels[..., 1:]
            else:
                rows, targets = logits, labels
            call = LossCall(
                targets.reshape(-1),
                self.ignore_index,
                "mean",
                kwargs.get("num_items_in_batch"),
                self.epsilon,
            )
            loss = rows.reshape(-1, rows.shape[-1]).cross_entropy(call)  # type: ignore[attr-defined]
            if loss is not None:
                return loss  # type: ignore[no-any-return]
        result: torch.Tensor = self.original(model_output, labels, shift_labels=shift_labels, **kwargs)
        return result
