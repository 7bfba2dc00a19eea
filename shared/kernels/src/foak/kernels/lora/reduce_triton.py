"""The thin product that sums over rows, from [N, K] to [rank, K], as a Triton kernel bound by its wide operands.

It adds the adapters' share to the input's gradient in the same pass, and applies dropout masks on the way
(`dropout.py`), for up to `GROUP` adapters that share the wide operand.
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
from foak.kernels.lora.dropout_triton import kept, streams
from foak.kernels.lora.factors_triton import GROUP, add_outer, filled, load_factor, low_rank_share, together
from foak.kernels.lora.parts import ROUNDED
from foak.kernels.lora.ptx_triton import pinned, speaks_ptx
from foak.kernels.lora.stretches_triton import STRETCH, columns_of_tile, stretches, stretches_of, tile

_ROUNDED = tl.constexpr(ROUNDED)


@triton.jit
def _reduce_one(
    x, dx, acc, fine, z_ptr, a, seed, stream, rows, firsts, tile_rows, row_count, threshold,
    R: tl.constexpr, DROPS: tl.constexpr, NEEDS_DX: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One adapter's part of a tile: its factor's gradient, and what it adds to the input's gradient."""
    in_tile = (tile_rows < row_count)[:, None]
    z = tl.load(z_ptr + tile_rows[:, None] * R + tl.arange(0, R)[None, :], mask=in_tile, other=0.0)
    if PTX and PARTS == _ROUNDED:
        z = pinned(z.to(x.dtype))
    if NEEDS_DX:
        share = stretches(low_rank_share(z, a, x.dtype, PARTS), BLOCK_N, BLOCK_K)
        if DROPS:
            keep = kept(seed, stream, rows, firsts, threshold, STRETCH)
            x = tl.where(keep, x, 0.0)
            share = tl.where(keep, share, 0.0)
        dx += share
    elif DROPS:
        x = tl.where(kept(seed, stream, rows, firsts, threshold, STRETCH), x, 0.0)
    acc, fine = add_outer(z, tile(x, BLOCK_N, BLOCK_K), acc, fine, PARTS)
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
    PARTS: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BLOCK_K
    row_of, firsts = stretches_of(begin, BLOCK_N, BLOCK_K)
    columns = firsts[:, None] + tl.arange(0, STRETCH)[None, :]
    in_row = columns < K
    tile_columns = begin + columns_of_tile(BLOCK_K)
    stream0, stream1, stream2 = streams(stream)
    acc0 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    acc1 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    acc2 = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    fine0, fine1, fine2 = acc0, acc0, acc0
    a0, a1, a2 = acc0, acc0, acc0
    if NEEDS_DX:
        a0 = load_factor(a0_ptr, tile_columns, K, RANK0, R, x_ptr.dtype.element_ty, PARTS)
        if COUNT > 1:
            a1 = load_factor(a1_ptr, tile_columns, K, RANK1, R, x_ptr.dtype.element_ty, PARTS)
        if COUNT > 2:
            a2 = load_factor(a2_ptr, tile_columns, K, RANK2, R, x_ptr.dtype.element_ty, PARTS)
    member = tl.cast(row_count, tl.int64) * R
    step = tl.num_programs(1).to(tl.int64) * BLOCK_N
    start = tl.program_id(1).to(tl.int64) * BLOCK_N
    rows, tile_rows = start + row_of, start + tl.arange(0, BLOCK_N)
    mask = (rows < row_count)[:, None] & in_row
    # The next rows are asked for before these are worked on, so that memory is busy meanwhile.
    next_x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=mask, other=0.0)
    next_dx = next_x
    if NEEDS_DX:
        next_dx = tl.load(dx_ptr + rows[:, None] * K + columns, mask=mask, other=0.0)
    for _ in range(tl.program_id(1) * BLOCK_N, row_count, tl.num_programs(1) * BLOCK_N):
        x = next_x
        dx = next_dx.to(tl.float32)
        following = rows + step
        next_mask = (following < row_count)[:, None] & in_row
        next_x = tl.load(x_ptr + following[:, None] * x_stride + columns, mask=next_mask, other=0.0)
        next_dx = next_x
        if NEEDS_DX:
            next_dx = tl.load(dx_ptr + following[:, None] * K + columns, mask=next_mask, other=0.0)
        dx, acc0, fine0 = _reduce_one(
            x, dx, acc0, fine0, z_ptr, a0, seed, stream0, rows, firsts, tile_rows, row_count, threshold0,
            R, DROPS0, NEEDS_DX, PARTS, PTX, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if COUNT > 1:
            dx, acc1, fine1 = _reduce_one(
                x, dx, acc1, fine1, z_ptr + member, a1, seed, stream1, rows, firsts, tile_rows, row_count, threshold1,
                R, DROPS1, NEEDS_DX, PARTS, PTX, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if COUNT > 2:
            dx, acc2, fine2 = _reduce_one(
                x, dx, acc2, fine2, z_ptr + 2 * member, a2, seed, stream2, rows, firsts, tile_rows, row_count,
                threshold2, R, DROPS2, NEEDS_DX, PARTS, PTX, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if NEEDS_DX:
            row_mask = (rows < row_count)[:, None] & in_row
            tl.store(dx_ptr + rows[:, None] * K + columns, dx.to(dx_ptr.dtype.element_ty), mask=row_mask)
        rows = following
        tile_rows += step
    ranks = tl.arange(0, R)
    out = partial_ptr + tl.program_id(1).to(tl.int64) * COUNT * R * K + ranks[:, None] * K + tile_columns[None, :]
    in_partial = (tile_columns < K)[None, :]
    tl.store(out, acc0 + fine0, mask=in_partial)
    if COUNT > 1:
        tl.store(out + R * K, acc1 + fine1, mask=in_partial)
    if COUNT > 2:
        tl.store(out + 2 * R * K, acc2 + fine2, mask=in_partial)


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
def _reduce_plan(
    length: int, ranks: tuple[int, ...], rank: int, masked: tuple[bool, ...], needs_dx: bool, parts: int, ptx: bool,
    multiprocessors: int,
) -> tuple[Launcher, int, int, int]:  # fmt: skip
    """What launches `_reduce_kernel`, its blocks along the columns, the most along the rows, and a block's rows.

    There are no more programs than run at a time: each leaves a part of the sums to be written and read again.
    """
    rank0, rank1, rank2 = filled(ranks, GROUP)
    drops0, drops1, drops2 = (*masked, False, False)[:GROUP]
    programs, registers = 4, None  # programs of a multiprocessor, as many as have room for their registers
    if rank > 32:
        block_n, block_k = 16, 32
    elif not needs_dx:
        block_n, block_k = 64, 64
    else:
        block_n, block_k = 16, 128
        if rank == 16 and parts == ROUNDED:
            programs, registers = (4, 128) if len(ranks) == 1 else (3, 168)
        else:
            programs = 2
    launcher = Launcher(
        _reduce_kernel, num_warps=4, num_stages=2, registers=registers if ptx else None,
        K=length, RANK0=rank0, RANK1=rank1, RANK2=rank2, R=rank, COUNT=len(ranks),
        DROPS0=drops0, DROPS1=drops1, DROPS2=drops2, NEEDS_DX=needs_dx, PARTS=parts, PTX=ptx,
        BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    blocks = -(-length // block_k)
    return launcher, blocks, max(1, programs * multiprocessors // blocks), block_n


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
        length, ranks, rank, masked, dx is not None, parts, speaks_ptx(x), multiprocessor_count(x)
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
