"""Moving tokens between the packed row and the rows of the buckets, both ways and in the gradient.

Each token stands in exactly one bucket row (rows that fill a sequence up aside, of which nothing comes back), so the
gradient of either move is the other move: gathers, deterministic, without an atomic sum.
"""

from __future__ import annotations

from typing import Any

import torch

from foak.padding_free.packed import PackedSequences

__all__ = ["pack_rows", "unpack_rows"]


def unpack_rows(tokens: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """From packed tokens to the rows of the buckets.

    Args:
        tokens: ``[T, …]``, any dtype.
        packed: the layout, on the same device.

    Returns:
        ``[P, …]``. Rows that fill up hold a token of their sequence once more; a gradient that comes back for them is
        dropped (it is zero where their outputs were dropped).
    """
    if packed.is_dense:
        return tokens
    result: torch.Tensor = _Unpack.apply(tokens, packed.gather, packed.restore)  # type: ignore[no-untyped-call]
    return result


def pack_rows(rows: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """From the rows of the buckets ``[P, …]`` back to packed tokens ``[T, …]``."""
    if packed.is_dense:
        return rows
    result: torch.Tensor = _Pack.apply(rows, packed.restore)  # type: ignore[no-untyped-call]
    return result


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, gather: torch.Tensor, restore: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(restore)
        return tokens.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (restore,) = ctx.saved_tensors
        return grad.index_select(0, restore), None, None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, restore: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(restore)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, restore)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (restore,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, restore, grad), None
