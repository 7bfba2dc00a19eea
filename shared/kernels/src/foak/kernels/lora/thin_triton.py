"""The thin products of LoRA as Triton kernels: each reads its wide operand once and is bound by that.

`project` shortens rows: from [N, K] to rank. `reduce_rows` sums over rows: from [N, K] to [rank, K], and adds the
adapters' share to the input's gradient in the same pass. Both apply dropout masks on the way (`dropout.py`), for up to
`GROUP` adapters that share the wide operand.

A factor of more bits than the wide operand (fp32 beside bf16) is split into `PARTS` numbers of the narrow dtype that
add up to it, each multiplied on the tensor cores: 3 bf16 parts hold all 24 bits of an fp32 number. The products of the
first parts and those of the others have a sum each: tensor cores cut off what lies below a sum's last bit, and so the
large sum is cut no more often than it has terms. Beside fp16, whose range is too small for the products in between,
`PARTS` is 0: both operands are multiplied as fp32 numbers, in three products of 19-bit ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import row_view
from foak.kernels.launch import multiprocessor_count, on_device_of
from foak.kernels.lora.dropout import threshold_of
from foak.kernels.lora.dropout_triton import keep_both, kept, streams

GROUP = 3
"""Adapters of one launch: query, key and value."""


@triton.jit
def split_dot(narrow, factor, acc, fine, PARTS: tl.constexpr):
    """acc + fine + narrow @ factor, `factor` in `PARTS` parts of `narrow`'s dtype, the first of which goes into acc."""
    if PARTS == 0:
        acc = tl.dot(narrow.to(tl.float32), factor.to(tl.float32), acc, input_precision="tf32x3")
    else:
        part = factor.to(narrow.dtype)
        acc = tl.dot(narrow, part, acc)
        for _ in tl.static_range(1, PARTS):
            factor = factor.to(tl.float32) - part.to(tl.float32)
            part = factor.to(narrow.dtype)
            fine = tl.dot(narrow, part, fine)
    return acc, fine


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
def load_factor(
    a_ptr, columns, K: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, NARROW: tl.constexpr, PARTS: tl.constexpr
):
    """[R, BLOCK_K] of a factor: rounded at once where one part is all that is used."""
    ranks = tl.arange(0, R)
    mask = (ranks < RANK)[:, None] & (columns < K)[None, :]
    a = tl.load(a_ptr + ranks[:, None] * K + columns[None, :], mask=mask, other=0.0)
    return a.to(NARROW) if PARTS == 1 else a


@triton.jit
def low_rank_share(z, a, narrow: tl.constexpr, PARTS: tl.constexpr):
    """z @ a in fp32: z's parts from coarse to fine, each with as many of a's as matter."""
    share = tl.zeros([z.shape[0], a.shape[1]], dtype=tl.float32)
    if PARTS == 0:
        share = tl.dot(z, a.to(tl.float32), share, input_precision="tf32x3")
    for index in tl.static_range(PARTS):
        part = z.to(narrow)
        share, fine = split_dot(part, a, share, tl.zeros_like(share), PARTS - index)
        share += fine
        z = z - part.to(tl.float32)
    return share


@triton.jit
def add_outer(z, x, acc, fine, PARTS: tl.constexpr):
    """acc + fine + z.T @ x, z in `PARTS` parts of x's dtype, the first of which goes into acc."""
    if PARTS == 0:
        acc = tl.dot(tl.trans(z), x.to(tl.float32), acc, input_precision="tf32x3")
    else:
        part = z.to(x.dtype)
        acc = tl.dot(tl.trans(part), x, acc)
        for _ in tl.static_range(1, PARTS):
            z = z - part.to(tl.float32)
            part = z.to(x.dtype)
            fine = tl.dot(tl.trans(part), x, fine)
    return acc, fine


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


def together(rank: int, parts: int) -> bool:
    """Whether several adapters fit the registers of one program; else each has a launch of its own."""
    return rank <= 32 and parts == 1


def columns_of(rank: int, parts: int) -> int:
    """Columns of a tile of a kernel that holds its factor in shared memory: 99 KiB of it are enough at any rank."""
    if rank <= 32:
        return 128 if parts else 64
    if rank <= 64 and parts:
        return 64
    return 32 if rank <= 128 or parts else 16


def stages(x: Tensor) -> int:
    """Tiles that are loaded ahead: three where a program may have the shared memory of a data centre's GPU."""
    if not x.is_cuda:
        return 1
    properties: Any = torch.cuda.get_device_properties(x.device)
    return 3 if properties.shared_memory_per_block_optin > 160_000 else 2


def project(
    x: Tensor,
    factors: Sequence[Tensor],
    scales: Sequence[float],
    drops: Sequence[float],
    seed: int,
    parts: int,
    rank: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """`scale_i * (mask_i * x) @ factor_i.T` for every factor: [M, N, rank] fp32, zeros beyond a factor's own rank.

    Args:
        x: [N, K], unit stride in K.
        factors: 1 to `GROUP` of [rank_i, K] (or [K, rank_i] with `transposed`), contiguous.
        scales: one number each.
        drops: the dropout probability of each; 0 leaves x as it is.
        seed: of the masks.
        parts: into how many numbers of x's dtype a factor is split; 0: all is multiplied as fp32.
        rank: a power of two, at least 16 and at least every rank.
        transposed: whether a factor's rank is its last dimension.
    """
    rows, _ = row_view(x, x.shape[-1])
    out = x.new_empty((len(factors), rows.shape[0], rank), dtype=torch.float32)
    step = len(factors) if together(rank, parts) else 1
    for first in range(0, len(factors), step):
        last = first + step
        _project(rows, factors[first:last], scales[first:last], drops[first:last], seed, first, parts, out[first:last],
                 transposed)  # fmt: skip
    return out


def _project(
    rows: Tensor, factors: Sequence[Tensor], scales: Sequence[float], drops: Sequence[float], seed: int, stream: int,
    parts: int, out: Tensor, transposed: bool,
) -> None:  # fmt: skip
    """One launch of `project`: adapters from number `stream` on, into `out` [M, N, rank]."""
    count, row_count, rank = out.shape
    length = rows.shape[1]
    ranks = [factor.shape[1 if transposed else 0] for factor in factors]
    fill = GROUP - count
    thresholds = [threshold_of(p) for p in drops] + [0] * fill
    masked = any(p > 0 for p in drops)
    with on_device_of(rows):
        _project_kernel[(-(-row_count // 64),)](
            rows, *factors, *[factors[0]] * fill, out, row_count, rows.stride(0), seed, stream,
            *thresholds, *scales, *[1.0] * fill,
            K=length, RANK0=ranks[0], RANK1=(*ranks, 1, 1)[1], RANK2=(*ranks, 1, 1)[2], R=rank,
            STRIDE_R=1 if transposed else length, STRIDE_K=ranks[0] if transposed else 1, COUNT=count,
            DROPS0=drops[0] > 0, DROPS1=count > 1 and drops[1] > 0, DROPS2=count > 2 and drops[2] > 0,
            PARTS=parts, BLOCK_N=64, BLOCK_K=columns_of(rank, parts), num_warps=8 if masked or rank > 32 else 4,
            num_stages=stages(rows),
        )  # fmt: skip


def reduce_rows(
    x: Tensor,
    z: Tensor,
    drops: Sequence[float],
    seed: int,
    parts: int,
    *,
    factors: Sequence[Tensor] = (),
    dx: Tensor | None = None,
) -> Tensor:
    """`z_i.T @ (mask_i * x)` for every adapter: [M, R, K] fp32, summed in the same order every time.

    Args:
        x: [N, K], unit stride in K.
        z: [M, N, R] fp32.
        drops: their dropout probabilities.
        seed: of the masks.
        parts: into how many numbers of x's dtype z is split; 0: all is multiplied as fp32.
        factors: with `dx`, the adapters' [rank_i, K].
        dx: [N, K] contiguous; `mask_i * (z_i @ factor_i)` is added to it in place, in fp32, rounded once for each
            launch.
    """
    rows, _ = row_view(x, x.shape[-1])
    count, _, rank = z.shape
    step = count if together(rank, parts) else 1
    sums = [
        _reduce_rows(rows, z[i : i + step], drops[i : i + step], seed, i, parts, factors[i : i + step], dx)
        for i in range(0, count, step)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _reduce_rows(
    rows: Tensor, z: Tensor, drops: Sequence[float], seed: int, stream: int, parts: int, factors: Sequence[Tensor],
    dx: Tensor | None,
) -> Tensor:  # fmt: skip
    """One launch of `reduce_rows`: adapters from number `stream` on."""
    count, row_count, rank = z.shape
    length = rows.shape[1]
    block_n, block_k = (32, 128) if rank <= 32 else (16, 32)
    blocks = -(-length // block_k)
    splits = max(1, min(-(-row_count // block_n), 8 * multiprocessor_count(rows) // blocks))
    partial = rows.new_empty((splits, count, rank, length), dtype=torch.float32)
    given = list(factors) if dx is not None else [z] * count
    ranks = [factor.shape[0] for factor in factors] if dx is not None else [1] * count
    fill = GROUP - count
    with on_device_of(rows):
        _reduce_kernel[(blocks, splits)](
            rows, z, *given, *[given[0]] * fill, rows if dx is None else dx, partial,
            row_count, rows.stride(0), seed, stream, *[threshold_of(p) for p in drops], *[0] * fill,
            K=length, RANK0=ranks[0], RANK1=(*ranks, 1, 1)[1], RANK2=(*ranks, 1, 1)[2], R=rank, COUNT=count,
            DROPS0=drops[0] > 0, DROPS1=count > 1 and drops[1] > 0, DROPS2=count > 2 and drops[2] > 0,
            NEEDS_DX=dx is not None, PARTS=parts, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=4 if dx is not None else 8, num_stages=2,
        )  # fmt: skip
    return partial.sum(dim=0)
