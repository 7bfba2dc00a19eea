"""The rotary embedding's Triton kernel, which serves forward and backward, and its autograd function.

    y_low  = low * cos_low - high * sin_low        low, high: the two halves of a head's rotated elements
    y_high = high * cos_high + low * sin_high

The backward is the transpose of this linear map, so the same kernel with (-sin_high, -sin_low) for the two sines: that
neither half of `cos` and `sin` is taken for a copy of the other costs two small loads. One program takes one position
with all heads of q and k, so that its angles are read once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.autograd import once_differentiable
from foak.kernels.launch import next_power_of_two, promoted
from foak.kernels.launcher import Launcher, planned

TILE = 2048
"""Elements of a half that a program rotates at once: 16 values a thread on 4 warps."""


@triton.jit
def _rotate_heads(
    x_ptr,  # one position's heads, x_stride apart
    y_ptr,  # one position's heads, y_stride apart
    x_stride,
    y_stride,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    HALF: tl.constexpr = ROTATED // 2
    half = tl.arange(0, BLOCK_HALF)
    for first in range(0, HEADS, BLOCK_HEADS):
        heads = first + tl.arange(0, BLOCK_HEADS)
        x_heads = x_ptr + heads.to(tl.int64)[:, None] * x_stride
        y_heads = y_ptr + heads.to(tl.int64)[:, None] * y_stride
        is_head = (heads < HEADS)[:, None]
        mask = is_head & (half < HALF)[None, :]
        low = tl.load(x_heads + half[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(x_heads + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)
        y_low = low * cos_low[None, :] - high * sin_low[None, :]
        y_high = high * cos_high[None, :] + low * sin_high[None, :]
        tl.store(y_heads + half[None, :], y_low.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_heads + HALF + half[None, :], y_high.to(y_ptr.dtype.element_ty), mask=mask)
        if ROTATED < D:
            rest = ROTATED + tl.arange(0, BLOCK_REST)[None, :]
            rest_mask = is_head & (rest < D)
            passed = tl.load(x_heads + rest, mask=rest_mask, other=0.0).to(tl.float32)
            tl.store(y_heads + rest, passed.to(y_ptr.dtype.element_ty), mask=rest_mask)


@triton.jit(do_not_specialize=["positions"])
def _rotate_kernel(
    q_ptr,  # [B, S, Hq, D] by its strides
    k_ptr,  # [B, S, Hk, D] by its strides
    q_out_ptr,  # [B, S, Hq, D] by its strides
    k_out_ptr,  # [B, S, Hk, D] by its strides
    cos_ptr,  # [B, S, ROTATED] by its strides
    sin_ptr,  # same shape and strides
    positions,  # S
    q_batch_stride,
    q_position_stride,
    q_head_stride,
    k_batch_stride,
    k_position_stride,
    k_head_stride,
    q_out_batch_stride,
    q_out_position_stride,
    q_out_head_stride,
    k_out_batch_stride,
    k_out_position_stride,
    k_out_head_stride,
    cos_batch_stride,
    cos_position_stride,
    TRANSPOSED: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_K: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    HALF: tl.constexpr = ROTATED // 2
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = (tl.program_id(0) % positions).to(tl.int64)
    half = tl.arange(0, BLOCK_HALF)
    mask = half < HALF
    offset = batch * cos_batch_stride + position * cos_position_stride
    cos_low = tl.load(cos_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + offset + HALF + half, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + offset + half, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + offset + HALF + half, mask=mask, other=0.0).to(tl.float32)
    if TRANSPOSED:
        sin_low, sin_high = -sin_high, -sin_low
    if HAS_Q:
        _rotate_heads(
            q_ptr + batch * q_batch_stride + position * q_position_stride,
            q_out_ptr + batch * q_out_batch_stride + position * q_out_position_stride,
            q_head_stride,
            q_out_head_stride,
            cos_low,
            cos_high,
            sin_low,
            sin_high,
            Q_HEADS,
            BLOCK_Q_HEADS,
            D,
            ROTATED,
            BLOCK_HALF,
            BLOCK_REST,
        )
    if HAS_K:
        _rotate_heads(
            k_ptr + batch * k_batch_stride + position * k_position_stride,
            k_out_ptr + batch * k_out_batch_stride + position * k_out_position_stride,
            k_head_stride,
            k_out_head_stride,
            cos_low,
            cos_high,
            sin_low,
            sin_high,
            K_HEADS,
            BLOCK_K_HEADS,
            D,
            ROTATED,
            BLOCK_HALF,
            BLOCK_REST,
        )


@planned
def _plan(transposed: bool, has_q: bool, has_k: bool, q_heads: int, k_heads: int, width: int, rotated: int) -> Launcher:
    block_half = next_power_of_two(rotated // 2)
    at_once = max(1, TILE // block_half)
    block_q, block_k = min(next_power_of_two(q_heads), at_once), min(next_power_of_two(k_heads), at_once)
    return Launcher(
        _rotate_kernel,
        num_warps=min(4, max(1, max(block_q, block_k) * block_half // 512)),
        TRANSPOSED=transposed,
        HAS_Q=has_q and q_heads > 0,
        HAS_K=has_k and k_heads > 0,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        BLOCK_Q_HEADS=block_q,
        BLOCK_K_HEADS=block_k,
        D=width,
        ROTATED=rotated,
        BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_two(width - rotated),
    )


def _rotate(
    q: Tensor | None,
    k: Tensor | None,
    q_out: Tensor | None,
    k_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads_dim: int,
    transposed: bool,
) -> None:
    """Writes the rotated `q` and `k` into `q_out` and `k_out`; a pair of None is left out.

    All have unit stride in their last dimension; `cos` and `sin` have the same strides.
    """
    positions_dim = 3 - heads_dim
    given = q if q is not None else k
    assert given is not None, "there is nothing to rotate"
    batch, positions, width = given.shape[0], given.shape[positions_dim], given.shape[3]
    tensors = [given if x is None else x for x in (q, k, q_out, k_out)]
    strides: list[int] = []
    for x in tensors:
        by_dim = x.stride()
        strides += (by_dim[0], by_dim[positions_dim], by_dim[heads_dim])
    launch = _plan(
        transposed,
        q is not None,
        k is not None,
        tensors[0].shape[heads_dim],
        tensors[1].shape[heads_dim],
        width,
        cos.shape[2],
    )
    cos_strides = cos.stride()
    launch(
        (batch * positions,),
        (*tensors, cos, sin),
        positions,
        *strides,
        cos_strides[0] if cos.shape[0] > 1 else 0,
        cos_strides[1],
    )


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The layout of `x`, as elementwise ops keep it, so that what comes before and after needs no copy."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(3) == 1 else torch.empty(x.shape, dtype=dtype, device=x.device)


class Rope(torch.autograd.Function):
    """Saves `cos` and `sin` only: the rotation's backward needs no input."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> tuple[Tensor, Tensor]:
        if cos.stride(2) != 1 or cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        ctx.set_materialize_grads(False)
        ctx.heads_dim = heads_dim
        ctx.dtypes = q.dtype, k.dtype
        ctx.save_for_backward(cos, sin)
        angle_dtype = promoted(cos.dtype, sin.dtype)
        q, k = _with_unit_stride(q), _with_unit_stride(k)
        q_out = _empty_like(q, promoted(q.dtype, angle_dtype))
        k_out = _empty_like(k, promoted(k.dtype, angle_dtype))
        if q.shape[0] and q.shape[3 - heads_dim]:
            _rotate(q, k, q_out, k_out, cos, sin, heads_dim, transposed=False)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        cos, sin = ctx.saved_tensors
        heads_dim = ctx.heads_dim
        q_dtype, k_dtype = ctx.dtypes
        dq = dk = None
        if dq_out is not None:
            dq_out = _with_unit_stride(dq_out) if ctx.needs_input_grad[0] else None
        if dk_out is not None:
            dk_out = _with_unit_stride(dk_out) if ctx.needs_input_grad[1] else None
        if dq_out is not None:
            dq = _empty_like(dq_out, q_dtype)
        if dk_out is not None:
            dk = _empty_like(dk_out, k_dtype)
        given = dq_out if dq_out is not None else dk_out
        if given is not None and given.shape[0] and given.shape[3 - heads_dim]:
            _rotate(dq_out, dk_out, dq, dk, cos, sin, heads_dim, transposed=True)
        return dq, dk, None, None, None
