"""The head's product in chunks of tokens: logits, their gradient in place, and the products that follow from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foak.kernels.cross_entropy.labels import KeptLabels
from foak.kernels.cross_entropy.options import wide_dtype
from foak.kernels.linear_cross_entropy import chunks
from foak.kernels.linear_cross_entropy.head_gradient import HeadGradient

Fill = Callable[[Tensor, slice], None]
"""Given the logits [n, V] of the kept tokens in a slice: computes what is wanted of them, in place."""


class Wants(NamedTuple):
    """Which gradients are to be computed."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients of the kept tokens' hidden states [n, H] in the compute dtype, the weight [V, H] and the bias [V] in
    fp32 (the weight's in bf16 for a bf16 weight); None where not wanted."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """The product `hidden @ weight.T + bias` of the kept tokens, in `dtype`, of which only chunks ever exist."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    kept: KeptLabels
    dtype: torch.dtype

    def run(self, fill: Fill, wants: Wants) -> Gradients:
        """Computes each chunk's logits, hands them to `fill`, and multiplies what it leaves there as `wants` says.

        With `wants`, `fill` has to turn the logits into the gradient with respect to them. The logits are rounded to
        `dtype`, as the plain product's are; products accumulate in fp32.
        """
        weight = self.weight.to(self.dtype)
        if 1 not in weight.stride():
            weight = weight.contiguous()  # once, not in every product
        bias = None if self.bias is None else self.bias.to(self.dtype)
        vocab_size, hidden_size = weight.shape
        count = self.kept.labels.shape[0]
        wide = wide_dtype(self.dtype)
        device = weight.device

        d_hidden = torch.empty((count, hidden_size), dtype=self.dtype, device=device) if wants.hidden else None
        d_weight = HeadGradient(vocab_size, hidden_size, self.dtype, self.weight) if wants.weight else None
        d_bias = torch.zeros(vocab_size, dtype=wide, device=device) if wants.bias else None
        rows = chunks.chunk_rows(count, vocab_size, self.dtype.itemsize, device.type, wants.weight)
        buffer = torch.empty((min(rows, count), vocab_size), dtype=self.dtype, device=device)
        for span in chunks.spans(count, rows):
            hidden = self._hidden_rows(span)
            logits = buffer[: hidden.shape[0]]
            if bias is None:
                torch.mm(hidden, weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden, weight.t(), out=logits)
            fill(logits, span)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[span])
            if d_weight is not None:
                d_weight.add(logits, hidden)
            if d_bias is not None:
                d_bias.add_(logits.sum(0, dtype=wide))
        del buffer  # before the weight's gradient is rounded
        return Gradients(d_hidden, None if d_weight is None else d_weight.finish(), d_bias)

    def _hidden_rows(self, span: slice) -> Tensor:
        positions = self.kept.positions
        rows = self.hidden[span] if positions is None else self.hidden.index_select(0, positions[span])
        return rows.to(self.dtype)


def product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the product: autocast's where autocast is on (it leaves float64 alone), else the promoted one."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    device_type = hidden.device.type
    if dtype is not torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype
