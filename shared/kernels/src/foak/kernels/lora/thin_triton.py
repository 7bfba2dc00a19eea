"""The thin products of LoRA as Triton kernels: each reads its wide operand once and is bound by that.

`project` shortens rows: from [N, K] to rank. `reduce_rows` sums over rows: from [N, K] to [rank, K], and adds the
adapters' share to the input's gradient in the same pass. Both apply dropout masks on the way (`dropout.py`), for up to
`GROUP` adapters that share the wide operand.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import row_view
from foak.kernels.launch import multiprocessor_count
from foak.kernels.launcher import Launcher, planned
from foak.kernels.lora.dropout import threshold_of
from foak.kernels.lora.dropout_triton import keep_both, kept, streams
from foak.kernels.lora.factors_triton import (
    GROUP,
    add_outer,
    columns_of,
    filled,
    load_factor,
    low_rank_share,
    split_dot,
    stages,
    together,
)

PROJECT_ROWS = 64
"""Rows of a program of `project`."""


@triton.jit
def _project_one(
    x, acc, fine, factor_ptr, columns, seed, stream, rows, first, threshold,
    K: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, STRIDE_R: tl.constexpr, STRIDE_K: tl.constexpr,
    DROPS: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if DROPS:
        x = tl.where(kept(seed, stream, rows, first, threshold, BLOCK_K), x, 0.0)
    ranks = tl.arange(0, R)
    mask = (columns < K)[:, None] & (ranks < RANK)[None, :]
    offsets = columns.to(tl.int64)[:, None] * STRIDE_K + ranks[None, :] * STRIDE_R
    return split_dot(x, tl.load(factor_ptr + offsets, mask=mask, other=0.0), acc, fine, PARTS)


@triton.jit(do_not_specialize=["row_count", "seed", "stream", "threshold0", "threshold1", "threshold2"])
def _project_kernel(
    x_ptr,  # rows of K, x_stride apart
    factor0_ptr, factor1_ptr, factor2_ptr,  # each element (rank, k) at rank * STRIDE_R + k * STRIDE_K
    out_ptr,  # [COUNT, row_count, R], fp32
    row_count, x_stride, seed, stream,
    threshold0, threshold1, threshold2,
    scale0, scale1, scale2,
    K: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, R: tl.constexpr,
    STRIDE_R: tl.constexpr, STRIDE_K: tl.constexpr, COUNT: tl.constexpr,
    DROPS0: tl.constexpr, DROPS1: tl.constexpr, DROPS2: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < row_count
    stream0, stream1, stream2 = streams(stream)
    acc0 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    fine0, fine1, fine2 = acc0, acc0, acc0
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        mask = in_rows[:, None] & (columns < K)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        acc0, fine0 = _project_one(
            x, acc0, fine0, factor0_ptr, columns, seed, stream0, rows, first, threshold0,
            K, RANK0, R, STRIDE_R, STRIDE_K, DROPS0, PARTS, BLOCK_K,
        )  # fmt: skip
        if COUNT > 1:
            acc1, fine1 = _project_one(
                x, acc1, fine1, factor1_ptr, columns, seed, stream1, rows, first, threshold1,
                K, RANK1, R, STRIDE_R, STRIDE_K, DROPS1, PARTS, BLOCK_K,
            )  # fmt: skip
        if COUNT > 2:
            acc2, fine2 = _project_one(
                x, acc2, fine2, factor2_ptr, columns, seed, stream2, rows, first, threshold2,
                K, RANK2, R, STRIDE_R, STRIDE_K, DROPS2, PARTS, BLOCK_K,
            )  # fmt: skip
    out = out_ptr + rows[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(out, (acc0 + fine0) * scale0, mask=in_rows[:, None])
    member = tl.cast(row_count, tl.int64) * R
    if COUNT > 1:
        tl.store(out + member, (acc1 + fine1) * scale1, mask=in_rows[:, None])
    if COUNT > 2:
        tl.store(out + 2 * member, (acc2 + fine2) * scale2, mask=in_rows[:, None])


@triton.jit
def _reduce_one(
    x, dx, acc, fine, z_ptr, a, seed, stream, rows, in_rows, first, threshold,
    R: tl.constexpr, DROPS: tl.constexpr, NEEDS_DX: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One adapter's part of a tile: its factor's gradient, and what it adds to the input's gradient."""
    z = tl.load(z_ptr + rows[:, None] * R + tl.arange(0, R)[None, :], mask=in_rows[:, None], other=0.0)
    if NEEDS_DX:
        share = low_rank_share(z, a, x.dtype, PARTS)
        if DROPS:
            x, share = keep_both(kept(seed, stream, rows, first, threshold, BLOCK_K), x, share)
        dx += share
    elif DROPS:
        x = tl.where(kept(seed, stream, rows, first, threshold, BLOCK_K), x, 0.0)
    acc, fine = add_outer(z, x, acc, fine, PARTS)
    return dx, acc, fine


@triton.jit(do_not_specialize=["row_count", "seed", "stream", "threshold0", "threshold1", "threshold2"])
def _reduce_kernel(
    x_ptr,  # rows of K, x_stride apart
    z_ptr,  # [COUNT, row_count, R], fp32
    a0_ptr, a1_ptr, a2_ptr,  # each [RANK, K]
    dx_ptr,  # [row_count, K], added to
    partial_ptr,  # [programs along rows, COUNT, R, K], fp32
    row_count, x_stride, seed, stream,
    threshold0, threshold1, threshold2,
    K: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, R: tl.constexpr,
    COUNT: tl.constexpr, DROPS0: tl.constexpr, DROPS1: tl.constexpr, DROPS2: tl.constexpr, NEEDS_DX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)
    in_row = columns < K
    stream0, stream1, stream2 = streams(stream)
    acc0 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    acc1 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    acc2 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    fine0, fine1, fine2 = acc0, acc0, acc0
    a0, a1, a2 = acc0, acc0, acc0
    if NEEDS_DX:
        a0 = load_factor(a0_ptr, columns, K, RANK0, R, x_ptr.dtype.element_ty, PARTS)
        if COUNT > 1:
            a1 = load_factor(a1_ptr, columns, K, RANK1, R, x_ptr.dtype.element_ty, PARTS)
        if COUNT > 2:
            a2 = load_factor(a2_ptr, columns, K, RANK2, R, x_ptr.dtype.element_ty, PARTS)
    member = tl.cast(row_count, tl.int64) * R
    step = tl.num_programs(1).to(tl.int64) * BLOCK_N
    rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < row_count)[:, None] & in_row[None, :]
    # The next rows are asked for before these are worked on, so that memory is busy meanwhile.
    next_x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    next_dx = next_x
    if NEEDS_DX:
        next_dx = tl.load(dx_ptr + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
    for _ in range(tl.program_id(1) * BLOCK_N, row_count, tl.num_programs(1) * BLOCK_N):
        x = next_x
        dx = next_dx.to(tl.float32)
        following = rows + step
        next_mask = (following < row_count)[:, None] & in_row[None, :]
        next_x = tl.load(x_ptr + following[:, None] * x_stride + columns[None, :], mask=next_mask, other=0.0)
        next_dx = next_x
        if NEEDS_DX:
            next_dx = tl.load(dx_ptr + following[:, None] * K + columns[None, :], mask=next_mask, other=0.0)
        in_rows = rows < row_count
        dx, acc0, fine0 = _reduce_one(
            x, dx, acc0, fine0, z_ptr, a0, seed, stream0, rows, in_rows, first, threshold0,
            R, DROPS0, NEEDS_DX, PARTS, BLOCK_K,
        )  # fmt: skip
        if COUNT > 1:
            dx, acc1, fine1 = _reduce_one(
                x, dx, acc1, fine1, z_ptr + member, a1, seed, stream1, rows, in_rows, first, threshold1,
                R, DROPS1, NEEDS_DX, PARTS, BLOCK_K,
            )  # fmt: skip
        if COUNT > 2:
            dx, acc2, fine2 = _reduce_one(
                x, dx, acc2, fine2, z_ptr + 2 * member, a2, seed, stream2, rows, in_rows, first, threshold2,
                R, DROPS2, NEEDS_DX, PARTS, BLOCK_K,
            )  # fmt: skip
        if NEEDS_DX:
            row_mask = in_rows[:, None] & in_row[None, :]
            tl.store(dx_ptr + rows[:, None] * K + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=row_mask)
        rows = following
    out = partial_ptr + tl.program_id(1).to(tl.int64) * COUNT * R * K + tl.arange(0, R)[:, None] * K + columns[None, :]
    tl.store(out, acc0 + fine0, mask=in_row[None, :])
    if COUNT > 1:
        tl.store(out + R * K, acc1 + fine1, mask=in_row[None, :])
    if COUNT > 2:
        tl.store(out + 2 * R * K, acc2 + fine2, mask=in_row[None, :])


@triton.jit(do_not_specialize=["splits"])
def _sum_kernel(
    partial_ptr,  # [splits, COUNT, R, K], fp32
    out0_ptr, out1_ptr, out2_ptr,  # each [RANK, K], or [K, RANK] where TRANSPOSED
    splits,
    K: tl.constexpr, RANK0: tl.constexpr, RANK1: tl.constexpr, RANK2: tl.constexpr, R: tl.constexpr,
    COUNT: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum over the programs of `_reduce_kernel`, always in the same order, rounded once to each factor's dtype."""
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    member = tl.program_id(2)
    places = ranks[:, None] * K + columns[None, :]
    in_row = (columns < K)[None, :] & (ranks < R)[:, None]
    total = tl.zeros([BLOCK_S, BLOCK_R, BLOCK_K], dtype=tl.float32)
    for first in range(0, splits, BLOCK_S):
        parts = first + tl.arange(0, BLOCK_S)
        offsets = (parts.to(tl.int64) * COUNT + member)[:, None, None] * (R * K) + places[None, :, :]
        total += tl.load(partial_ptr + offsets, mask=(parts < splits)[:, None, None] & in_row[None, :, :], other=0.0)
    found = tl.sum(total, axis=0)
    if member == 0:
        _store_factor(out0_ptr, found, ranks, columns, K, RANK0, TRANSPOSED)
    if COUNT > 1 and member == 1:
        _store_factor(out1_ptr, found, ranks, columns, K, RANK1, TRANSPOSED)
    if COUNT > 2 and member == 2:
        _store_factor(out2_ptr, found, ranks, columns, K, RANK2, TRANSPOSED)


@triton.jit
def _store_factor(out_ptr, found, ranks, columns, K: tl.constexpr, RANK: tl.constexpr, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        places = columns[None, :].to(tl.int64) * RANK + ranks[:, None]
    else:
        places = ranks[:, None].to(tl.int64) * K + columns[None, :]
    mask = (ranks < RANK)[:, None] & (columns < K)[None, :]
    tl.store(out_ptr + places, found.to(out_ptr.dtype.element_ty), mask=mask)


@planned
def _project_plan(
    length: int, ranks: tuple[int, ...], rank: int, transposed: bool, masked: tuple[bool, ...], parts: int, stages: int
) -> Launcher:
    rank0, rank1, rank2 = filled(ranks, GROUP)
    drops0, drops1, drops2 = (*masked, False, False)[:GROUP]
    return Launcher(
        _project_kernel, num_warps=8 if any(masked) or rank > 32 else 4, num_stages=stages,
        K=length, RANK0=rank0, RANK1=rank1, RANK2=rank2, R=rank,
        STRIDE_R=1 if transposed else length, STRIDE_K=rank0 if transposed else 1, COUNT=len(ranks),
        DROPS0=drops0, DROPS1=drops1, DROPS2=drops2, PARTS=parts, BLOCK_N=PROJECT_ROWS, BLOCK_K=columns_of(rank, parts),
    )  # fmt: skip


def project(
    x: Tensor,
    factors: Sequence[Tensor],
    scales: Sequence[float],
    drops: Sequence[float],
    seed: int,
    parts: int,
    out: Tensor,
    *,
    transposed: bool = False,
) -> None:
    """Writes `scale_i * (mask_i * x) @ factor_i.T` for every factor into `out`, zeros beyond a factor's own rank.

    Args:
        x: [..., K], any row stride.
        factors: 1 to `GROUP` of [rank_i, K] (or one of [K, rank] with `transposed`), contiguous.
        scales: one number each.
        drops: the dropout probability of each; 0 leaves x as it is.
        seed: of the masks.
        parts: into how many numbers of x's dtype a factor is split; see `parts.py`.
        out: [M, N, R] contiguous, fp32 ([N, R] for one factor); R is a power of two, at least 16 and at least every
            rank.
        transposed: whether a factor's rank is its last dimension.
    """
    count = len(factors)
    if count > 1 and not together(out.shape[-1], parts):
        for index, part in enumerate(out.unbind()):
            here = slice(index, index + 1)
            _project(x, factors[here], scales[here], drops[here], seed, index, parts, part, transposed)
    else:
        _project(x, factors, scales, drops, seed, 0, parts, out, transposed)


def _project(
    x: Tensor, factors: Sequence[Tensor], scales: Sequence[float], drops: Sequence[float], seed: int, stream: int,
    parts: int, out: Tensor, transposed: bool,
) -> None:  # fmt: skip
    """One launch of `project`: adapters from number `stream` on."""
    row_count, rank = out.shape[-2:]
    if row_count == 0:
        return
    length = x.shape[-1]
    rows, stride = row_view(x, length)
    ranks = tuple([factor.shape[1 if transposed else 0] for factor in factors])
    masked = tuple([p > 0 for p in drops])
    launch = _project_plan(length, ranks, rank, transposed, masked, parts, stages(x))
    fill = GROUP - len(factors)
    launch(
        (-(-row_count // PROJECT_ROWS),), (rows, *factors, *[factors[0]] * fill, out), row_count, stride, seed, stream,
        *[threshold_of(p) for p in drops], *[0] * fill, *scales, *[1.0] * fill,
    )  # fmt: skip


@planned
def _reduce_plan(
    length: int, ranks: tuple[int, ...], rank: int, masked: tuple[bool, ...], needs_dx: bool, parts: int,
    multiprocessors: int,
) -> tuple[Launcher, int, int, int]:  # fmt: skip
    """What launches `_reduce_kernel`, its blocks along the columns, the most along the rows, and a block's rows."""
    rank0, rank1, rank2 = filled(ranks, GROUP)
    drops0, drops1, drops2 = (*masked, False, False)[:GROUP]
    block_n, block_k = (32, 128) if rank <= 32 else (16, 32)
    launcher = Launcher(
        _reduce_kernel, num_warps=4 if needs_dx else 8, num_stages=2,
        K=length, RANK0=rank0, RANK1=rank1, RANK2=rank2, R=rank, COUNT=len(ranks),
        DROPS0=drops0, DROPS1=drops1, DROPS2=drops2, NEEDS_DX=needs_dx, PARTS=parts, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    blocks = -(-length // block_k)
    return launcher, blocks, max(1, 8 * multiprocessors // blocks), block_n


@planned
def _sum_plan(
    length: int, ranks: tuple[int, ...], rank: int, transposed: bool
) -> tuple[Launcher, tuple[int, int, int]]:
    """What sums the parts of the gradients, and its grid."""
    rank0, rank1, rank2 = filled(ranks, GROUP)
    block_r, block_k = 16, 32
    launcher = Launcher(
        _sum_kernel, num_warps=4,
        K=length, RANK0=rank0, RANK1=rank1, RANK2=rank2, R=rank, COUNT=len(ranks), TRANSPOSED=transposed,
        BLOCK_S=8, BLOCK_R=block_r, BLOCK_K=block_k,
    )  # fmt: skip
    return launcher, (-(-length // block_k), rank // block_r, len(ranks))


def reduce_rows(
    x: Tensor,
    z: Tensor,
    factors: Sequence[Tensor],
    drops: Sequence[float],
    seed: int,
    parts: int,
    *,
    dx: Tensor | None = None,
    transposed: bool = False,
) -> list[Tensor]:
    """`z_i.T @ (mask_i * x)` for every adapter, the gradient of its factor, summed in the same order every time.

    Args:
        x: [..., K], any row stride.
        z: [M, N, R] contiguous, fp32; [N, R] for one factor.
        factors: the adapters' [rank_i, K] (or one [K, rank] with `transposed`), contiguous. Each gradient has the shape
            and the dtype of its own.
        drops: their dropout probabilities.
        seed: of the masks.
        parts: into how many numbers of x's dtype z is split; see `parts.py`.
        dx: [N, K] contiguous; `mask_i * (z_i @ factor_i)` is added to it in place, in fp32, rounded once for each
            launch. Not with `transposed`.
        transposed: whether a factor's rank is its last dimension.
    """
    if len(factors) > 1 and not together(z.shape[-1], parts):
        return [
            _reduce_rows(x, part, factors[i : i + 1], drops[i : i + 1], seed, i, parts, dx, transposed)[0]
            for i, part in enumerate(z.unbind())
        ]
    return _reduce_rows(x, z, factors, drops, seed, 0, parts, dx, transposed)


def _reduce_rows(
    x: Tensor, z: Tensor, factors: Sequence[Tensor], drops: Sequence[float], seed: int, stream: int, parts: int,
    dx: Tensor | None, transposed: bool,
) -> list[Tensor]:  # fmt: skip
    """One launch of `reduce_rows`: adapters from number `stream` on."""
    row_count, rank = z.shape[-2:]
    if row_count == 0:
        return [torch.zeros_like(factor) for factor in factors]
    length, count = x.shape[-1], len(factors)
    rows, stride = row_view(x, length)
    ranks = tuple([factor.shape[1 if transposed else 0] for factor in factors])
    masked = tuple([p > 0 for p in drops])
    launch, blocks, most, block_n = _reduce_plan(
        length, ranks, rank, masked, dx is not None, parts, multiprocessor_count(x)
    )
    splits = min(-(-row_count // block_n), most)
    partial = x.new_empty((splits, count, rank, length), dtype=torch.float32)
    fill = GROUP - count
    launch(
        (blocks, splits), (rows, z, *factors, *[factors[0]] * fill, rows if dx is None else dx, partial),
        row_count, stride, seed, stream, *[threshold_of(p) for p in drops], *[0] * fill,
    )  # fmt: skip
    return sum_parts(partial, factors, ranks, transposed)


def sum_parts(partial: Tensor, factors: Sequence[Tensor], ranks: tuple[int, ...], transposed: bool) -> list[Tensor]:
    """The sums over the first dimension of `partial` [splits, M, R, K] fp32, each like its factor."""
    splits, count, rank, length = partial.shape
    found = [torch.empty_like(factor) for factor in factors]
    launch, grid = _sum_plan(length, ranks, rank, transposed)
    launch(grid, (partial, *found, *[found[0]] * (GROUP - count)), splits)
    return found
