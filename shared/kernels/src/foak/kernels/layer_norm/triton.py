"""LayerNorm's Triton kernels, forward and backward, and their autograd function.

Up to `WIDEST_TILE` columns a program holds whole rows in registers, so that each input is read once. Longer rows are
walked several times, in blocks.

    mean, rstd = mean(x), rsqrt(var(x) + eps)      saved, fp32, two numbers a row
    y    = x_hat * weight + bias                   x_hat = (x - mean) * rstd
    dx   = rstd * (g - x_hat * mean(g * x_hat) - mean(g))      g = dy * weight
    dw   = sum over rows of dy * x_hat
    db   = sum over rows of dy
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import WIDE_BLOCK, WIDEST_TILE, row_view
from foak.kernels._rows.triton import backward_plan, forward_plan, sum_partials
from foak.kernels.autograd import once_differentiable
from foak.kernels.launch import empty_rows, multiprocessor_count, promoted
from foak.kernels.launcher import Launcher, planned


@triton.jit
def _parameter(ptr, columns, mask, ABSENT: tl.constexpr, IS_GIVEN: tl.constexpr):
    if IS_GIVEN:
        return tl.load(ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return tl.full(columns.shape, ABSENT, tl.float32)


@triton.jit(do_not_specialize=["row_count"])
def _forward_kernel(
    x_ptr,  # rows of H, x_stride apart
    weight_ptr,  # [H]
    bias_ptr,  # [H]
    y_ptr,  # [row_count, H]
    mean_ptr,  # [row_count], fp32
    rstd_ptr,  # [row_count], fp32
    row_count,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_H)
    in_row = columns < H
    is_row = rows < row_count
    mask = is_row[:, None] & in_row[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = _parameter(weight_ptr, columns, in_row, 1.0, HAS_WEIGHT)
    bias = _parameter(bias_ptr, columns, in_row, 0.0, HAS_BIAS)
    mean = tl.sum(x, axis=1) / H
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / H + eps)
    tl.store(mean_ptr + rows, mean, mask=is_row)
    tl.store(rstd_ptr + rows, rstd, mask=is_row)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + rows[:, None] * H + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_count"])
def _backward_kernel(
    dy_ptr,  # rows of H, dy_stride apart
    x_ptr,  # rows of H, x_stride apart
    weight_ptr,  # [H]
    mean_ptr,  # [row_count], fp32
    rstd_ptr,  # [row_count], fp32
    dx_ptr,  # [row_count, H]
    partial_ptr,  # [programs, SUMS], fp32: each program's sums over its own rows, dw before db
    row_count,
    dy_stride,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    SUMS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_H)
    in_row = columns < H
    weight = _parameter(weight_ptr, columns, in_row, 1.0, HAS_WEIGHT)
    dw = tl.zeros([ROWS, BLOCK_H], dtype=tl.float32)
    db = tl.zeros([ROWS, BLOCK_H], dtype=tl.float32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < row_count
    mask = is_row[:, None] & in_row[None, :]
    # The next rows are asked for before these are worked on, so that memory is busy during the reductions.
    next_x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    next_dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=mask, other=0.0)
    next_mean = tl.load(mean_ptr + rows, mask=is_row, other=0.0)
    next_rstd = tl.load(rstd_ptr + rows, mask=is_row, other=0.0)
    for _ in range(tl.program_id(0) * ROWS, row_count, tl.num_programs(0) * ROWS):
        rstd = next_rstd[:, None]
        x_hat = (next_x.to(tl.float32) - next_mean[:, None]) * rstd
        dy = next_dy.to(tl.float32)
        following = rows + step
        is_row = following < row_count
        next_mask = is_row[:, None] & in_row[None, :]
        next_x = tl.load(x_ptr + following[:, None] * x_stride + columns[None, :], mask=next_mask, other=0.0)
        next_dy = tl.load(dy_ptr + following[:, None] * dy_stride + columns[None, :], mask=next_mask, other=0.0)
        next_mean = tl.load(mean_ptr + following, mask=is_row, other=0.0)
        next_rstd = tl.load(rstd_ptr + following, mask=is_row, other=0.0)
        if NEEDS_DW:
            dw += dy * x_hat
        if NEEDS_DB:
            db += dy
        if NEEDS_DX:
            g = dy * weight[None, :]
            along = tl.sum(g * x_hat, axis=1) / H
            mean = tl.sum(g, axis=1) / H
            dx = rstd * (g - x_hat * along[:, None] - mean[:, None])
            row_mask = (rows < row_count)[:, None] & in_row[None, :]
            tl.store(dx_ptr + rows[:, None] * H + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=row_mask)
        rows = following
    sums_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * SUMS + columns
    if NEEDS_DW:
        tl.store(sums_ptr, tl.sum(dw, axis=0), mask=in_row)
    if NEEDS_DB:
        tl.store(sums_ptr + (SUMS - H), tl.sum(db, axis=0), mask=in_row)


@triton.jit(do_not_specialize=["row_count"])
def _wide_forward_kernel(
    x_ptr,  # rows of H, x_stride apart
    weight_ptr,  # [H]
    bias_ptr,  # [H]
    y_ptr,  # [row_count, H]
    mean_ptr,  # [row_count], fp32
    rstd_ptr,  # [row_count], fp32
    row_count,  # that is, programs
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * x_stride
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        total += tl.load(row_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / H
    squares = tl.zeros([BLOCK_H], dtype=tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        x = tl.load(row_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
        centred = tl.where(columns < H, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / H + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, H, BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        mask = columns < H
        x = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        weight = _parameter(weight_ptr, columns, mask, 1.0, HAS_WEIGHT)
        y = (x - mean) * rstd * weight + _parameter(bias_ptr, columns, mask, 0.0, HAS_BIAS)
        tl.store(y_ptr + row * H + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_count"])
def _wide_backward_kernel(
    dy_ptr,  # rows of H, dy_stride apart
    x_ptr,  # rows of H, x_stride apart
    weight_ptr,  # [H]
    mean_ptr,  # [row_count], fp32
    rstd_ptr,  # [row_count], fp32
    dx_ptr,  # [row_count, H]
    partial_ptr,  # [programs, SUMS], fp32, zero at the start; dw before db
    row_count,
    dy_stride,
    x_stride,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    SUMS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    sums_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * SUMS
    for index in range(tl.program_id(0), row_count, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        products = tl.zeros([BLOCK_H], dtype=tl.float32)
        total = tl.zeros([BLOCK_H], dtype=tl.float32)
        if NEEDS_DX:
            for first in range(0, H, BLOCK_H):
                columns = first + tl.arange(0, BLOCK_H)
                mask = columns < H
                x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
                g = dy * _parameter(weight_ptr, columns, mask, 1.0, HAS_WEIGHT)
                products += g * (x - mean) * rstd
                total += g
        along = tl.sum(products, axis=0) / H
        mean_g = tl.sum(total, axis=0) / H
        for first in range(0, H, BLOCK_H):
            columns = first + tl.arange(0, BLOCK_H)
            mask = columns < H
            x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
            x_hat = (x - mean) * rstd
            if NEEDS_DX:
                g = dy * _parameter(weight_ptr, columns, mask, 1.0, HAS_WEIGHT)
                dx = rstd * (g - x_hat * along - mean_g)
                tl.store(dx_ptr + row * H + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            # Every thread adds to the same columns of its program's own row each time: no race, one order.
            if NEEDS_DW:
                dw = tl.load(sums_ptr + columns, mask=mask, other=0.0) + dy * x_hat
                tl.store(sums_ptr + columns, dw, mask=mask)
            if NEEDS_DB:
                db = tl.load(sums_ptr + (SUMS - H) + columns, mask=mask, other=0.0) + dy
                tl.store(sums_ptr + (SUMS - H) + columns, db, mask=mask)


@planned
def _forward_plan(length: int, wide_block: int, has_weight: bool, has_bias: bool) -> tuple[Launcher, int]:
    constants = {"HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias}
    return forward_plan(_forward_kernel, _wide_forward_kernel, length, wide_block, **constants)


@planned
def _backward_plan(
    length: int, wide_block: int, has_weight: bool, needs: tuple[bool, bool, bool], sums: int, multiprocessors: int
) -> tuple[Launcher, int, int]:
    needed = dict(zip(("NEEDS_DX", "NEEDS_DW", "NEEDS_DB"), needs, strict=True))
    constants = {"HAS_WEIGHT": has_weight, **needed, "SUMS": sums}
    kernels = _backward_kernel, _wide_backward_kernel
    return backward_plan(*kernels, length, wide_block, 32, multiprocessors, **constants)


class LayerNorm(torch.autograd.Function):
    """Saves `x`, the weight and two fp32 numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        length = x.shape[-1]
        dtype = x.dtype
        if weight is not None:
            dtype = promoted(dtype, weight.dtype)
            weight = weight.contiguous()
        if bias is not None:
            dtype = promoted(dtype, bias.dtype)
            bias = bias.contiguous()
            ctx.bias_dtype = bias.dtype
        y = empty_rows(x, dtype)
        row_count = x.numel() // length if length else 0
        mean = x.new_empty(row_count, dtype=torch.float32)
        rstd = x.new_empty(row_count, dtype=torch.float32)
        ctx.save_for_backward(x, weight, mean, rstd)
        if row_count == 0:
            return y
        rows, stride = row_view(x, length)
        wide_block = WIDE_BLOCK if length > WIDEST_TILE else 0
        launch, tile_rows = _forward_plan(length, wide_block, weight is not None, bias is not None)
        tensors = (rows, x if weight is None else weight, x if bias is None else bias, y, mean, rstd)
        launch((-(-row_count // tile_rows),), tensors, row_count, stride, eps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        needs = needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        length = x.shape[-1]
        row_count = rstd.shape[0]
        dx = empty_rows(x, x.dtype) if needs_dx else None
        if row_count == 0:
            dw = torch.zeros_like(weight) if needs_dw else None
            db = torch.zeros(length, dtype=ctx.bias_dtype, device=x.device) if needs_db else None
            return dx, dw, db, None
        x_rows, x_stride = row_view(x, length)
        dy_rows, dy_stride = row_view(dy, length)
        wide_block = WIDE_BLOCK if length > WIDEST_TILE else 0
        sums = (needs_dw + needs_db) * length
        launch, tile_rows, most = _backward_plan(
            length, wide_block, weight is not None, needs, sums, multiprocessor_count(x)
        )
        count = min(-(-row_count // tile_rows), most)
        partial = rstd
        if sums:
            partial = (x.new_zeros if wide_block else x.new_empty)((count, sums), dtype=torch.float32)
        tensors = (
            dy_rows,
            x_rows,
            x if weight is None else weight,
            mean,
            rstd,
            rstd if dx is None else dx,
            partial,
        )
        launch((count,), tensors, row_count, dy_stride, x_stride)
        dw, db = _sum_parameters(
            partial, length, weight.dtype if needs_dw else None, ctx.bias_dtype if needs_db else None
        )
        return dx, dw, db, None


def _sum_parameters(
    partial: Tensor, length: int, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias from `partial` [programs, H or 2 H], in one launch if their dtypes agree."""
    if weight_dtype is None:
        return None, None if bias_dtype is None else sum_partials(partial, bias_dtype)
    if bias_dtype is None:
        return sum_partials(partial, weight_dtype), None
    if weight_dtype is bias_dtype:
        dw, db = sum_partials(partial, weight_dtype).split(length)
        return dw, db
    dw, db = sum_partials(partial, torch.float32).split(length)
    return dw.to(weight_dtype), db.to(bias_dtype)
