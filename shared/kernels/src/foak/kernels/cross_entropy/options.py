"""What a cross entropy is asked to compute: one validated, frozen record that both losses pass on to their kernels."""

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]


class LossKeywords(TypedDict, total=False):
    """The keyword arguments that the two losses share, for their typed overloads."""

    ignore_index: int
    reduction: Reduction
    num_items_in_batch: int | Tensor | None
    label_smoothing: float
    logit_scale: float
    softcap: float | None
    z_loss: float


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The options that `cross_entropy` and `linear_cross_entropy` share; their docstrings say what each means."""

    ignore_index: int = -100
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ValueError(f'reduction is {self.reduction!r}; allowed are "mean", "sum" and "none"')
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; allowed is a number from 0 to 1")
        if self.softcap is not None and not self.softcap > 0.0:
            raise ValueError(f"softcap is {self.softcap}; allowed is a number above 0, or None for no soft-capping")

    @property
    def is_plain(self) -> bool:
        """Whether the loss of a token is its negative log-probability and nothing else."""
        return self.label_smoothing == 0.0 and self.z_loss == 0.0


def reduce_loss(
    losses: Tensor, options: LossOptions, kept: int | Tensor, num_items_in_batch: int | Tensor | None
) -> Tensor:
    """The loss from `losses`: per token [N] for the reduction "none", else the sum over the `kept` labelled tokens, [].

    A divisor of 0 counts as 1, so that a batch without labels gives 0 and not NaN.
    """
    if options.reduction == "none":
        return losses
    if num_items_in_batch is None:
        if options.reduction == "sum":
            return losses
        divisor = kept
    else:
        divisor = num_items_in_batch
    if isinstance(divisor, Tensor):
        # A scalar on the host divides without a copy to the device.
        on_host = divisor.dim() == 0 and divisor.device.type == "cpu"
        divisor = divisor.detach().reshape(()).clamp(min=1)
        return losses / (divisor if on_host else divisor.to(losses.device, non_blocking=True))
    return losses / max(divisor, 1)


def check_num_items(options: LossOptions, num_items_in_batch: int | Tensor | None) -> None:
    """Raises ValueError where `num_items_in_batch` has no meaning: without a sum, or with more than one element."""
    if num_items_in_batch is None:
        return
    if options.reduction == "none":
        raise ValueError('num_items_in_batch divides the sum of the losses; reduction="none" has no sum')
    if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.numel() != 1:
        raise ValueError(f"num_items_in_batch has {num_items_in_batch.numel()} elements; allowed is one")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that losses and statistics are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
