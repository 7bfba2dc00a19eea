"""Labels of a loss: checked against the vocabulary, and the ignored ones left out."""

from typing import NamedTuple

import torch
from torch import Tensor

from foak.kernels.cross_entropy.options import LossOptions


def check_labels(labels: Tensor, vocab_size: int, options: LossOptions) -> None:
    """Raises TypeError for labels that are not int32 or int64, and ValueError for a label on the CPU out of range.

    Labels on another device are not read here, since that would make the host wait: see `assert_labels_async`.
    """
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels are {labels.dtype}; allowed are int32 and int64")
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = labels[_out_of_range(labels, vocab_size, options)]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is neither in the vocabulary [0, {vocab_size}) nor ignore_index "
            f"({options.ignore_index})"
        )


def assert_labels_async(labels: Tensor, vocab_size: int, options: LossOptions) -> None:
    """Queues the check of `check_labels` on the labels' device; what fails there fails at a later synchronisation."""
    torch._assert_async(~_out_of_range(labels, vocab_size, options).any(), out_of_range_message(vocab_size, options))  # type: ignore[no-untyped-call, unused-ignore]


class KeptLabels(NamedTuple):
    """The tokens of a batch that are not ignored."""

    positions: Tensor | None
    """Where they are, [n] int64, ascending; None when every token is kept."""
    labels: Tensor
    """Their labels [n]."""

    def spread(self, values: Tensor, length: int) -> Tensor:
        """`values` [n, ...] of the kept tokens at their places among `length` tokens; zero elsewhere."""
        if self.positions is None:
            return values
        return values.new_zeros((length, *values.shape[1:])).index_copy_(0, self.positions, values)

    def take(self, values: Tensor) -> Tensor:
        """The rows of `values` [N, ...] that belong to the kept tokens [n, ...]."""
        return values if self.positions is None else values.index_select(0, self.positions)


def keep_labelled(labels: Tensor, ignore_index: int) -> KeptLabels:
    """Finds the tokens of `labels` [N] that are not ignored. The host waits for the device here, for their number."""
    positions = (labels != ignore_index).nonzero().squeeze(1)
    if positions.numel() == labels.numel():
        return KeptLabels(None, labels)
    return KeptLabels(positions, labels.index_select(0, positions))


def _out_of_range(labels: Tensor, vocab_size: int, options: LossOptions) -> Tensor:
    return ((labels < 0) | (labels >= vocab_size)) & (labels != options.ignore_index)


def out_of_range_message(vocab_size: int, options: LossOptions) -> str:
    return f"a label is neither in the vocabulary [0, {vocab_size}) nor ignore_index ({options.ignore_index})"
