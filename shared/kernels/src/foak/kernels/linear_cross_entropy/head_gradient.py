"""The gradient of a head's weight, summed over chunks of tokens in fp32 and rounded once."""

import torch
from torch import Tensor

from foak.kernels.cross_entropy.options import wide_dtype

_FIRST_ROWS = 64


class HeadGradient:
    """The sum over chunks of `gradient.T @ hidden`, [V, H] in fp32 (fp64 for fp64 products).

    For a bf16 weight the sum lies in two halves of the vocabulary, and the bf16 result is written into the memory of
    the first, which is exactly its size: rounding takes no memory on top, and the second half is free afterwards.
    """

    def __init__(self, vocab_size: int, hidden_size: int, compute_dtype: torch.dtype, weight: Tensor) -> None:
        """A sum of zero, on `weight`'s device, for products in `compute_dtype`."""
        self._vocab_size = vocab_size
        # bf16 has the range of fp32, so an unscaled sum fits. fp16 does not: its sum stays wide until it is scaled.
        self._narrow = weight.dtype is torch.bfloat16 and compute_dtype is not torch.float64
        split = -(-vocab_size // 2) if self._narrow else vocab_size
        sizes = [split, vocab_size - split] if self._narrow else [vocab_size]
        self._sums = [
            torch.zeros((size, hidden_size), dtype=wide_dtype(compute_dtype), device=weight.device) for size in sizes
        ]

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Adds `gradient.T @ hidden`, for the gradient of a chunk's logits [n, V] and its hidden states [n, H]."""
        start = 0
        for total in self._sums:
            stop = start + total.shape[0]
            part = gradient[:, start:stop].t()
            if part.dtype is total.dtype:
                total.addmm_(part, hidden)
            elif part.is_cuda:
                torch.addmm(total, part, hidden, out_dtype=total.dtype, out=total)
            else:  # 16-bit products with an fp32 result exist on a GPU only; the chunks' sum is in fp32 all the same
                total.add_(part @ hidden)
            start = stop

    def finish(self) -> Tensor:
        """The sum [V, H]: rounded to bf16 for a bf16 weight, else as it is. Ends the use of this object."""
        first, *rest = self._sums
        self._sums = []
        if not self._narrow:
            return first
        half, hidden_size = first.shape
        result = first.view(torch.bfloat16).view(2 * half, hidden_size)
        # Row i is written to where row i / 2 was: rows [n, 2n) go to bytes that only rows [n / 2, n) held.
        result[:_FIRST_ROWS].narrow(0, 0, min(_FIRST_ROWS, half)).copy_(first[:_FIRST_ROWS].clone())
        start = _FIRST_ROWS
        while start < half:
            stop = min(2 * start, half)
            result[start:stop].copy_(first[start:stop])
            start = stop
        result[half : self._vocab_size].copy_(rest[0])
        return result[: self._vocab_size]
