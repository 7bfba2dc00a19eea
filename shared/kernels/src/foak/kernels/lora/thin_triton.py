"""The thin products of LoRA as Triton kernels: each reads its wide operand once and is bound by that.

`project` shortens rows, from [N, K] to rank; `reduce_rows` sums over them and has a file of its own. Both apply dropout
masks on the way (`dropout.py`), for up to `GROUP` adapters that share the wide operand.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import row_view
from foak.kernels.launch import multiprocessor_count
from foak.kernels.launcher import Launcher, planned
from foak.kernels.lora.dropout import threshold_of
from foak.kernels.lora.dropout_triton import kept, streams
from foak.kernels.lora.factors_triton import GROUP, columns_of, filled, split_dot, stages, together
from foak.kernels.lora.reduce_triton import reduce_rows

__all__ = ["project", "reduce_rows"]

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
    PARTS: tl.constexpr, SPAN: tl.constexpr, ADDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program sums over `SPAN` columns of its rows; where there is more than one, they are added to zeros."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < row_count
    stream0, stream1, stream2 = streams(stream)
    acc0 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    fine0, fine1, fine2 = acc0, acc0, acc0
    begin = tl.program_id(1) * SPAN
    for first in range(begin, begin + SPAN, BLOCK_K):
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
    _put(out, (acc0 + fine0) * scale0, in_rows, ADDS)
    member = tl.cast(row_count, tl.int64) * R
    if COUNT > 1:
        _put(out + member, (acc1 + fine1) * scale1, in_rows, ADDS)
    if COUNT > 2:
        _put(out + 2 * member, (acc2 + fine2) * scale2, in_rows, ADDS)


@triton.jit
def _put(out, found, in_rows, ADDS: tl.constexpr):
    if ADDS:
        tl.atomic_add(out, found, mask=in_rows[:, None], sem="relaxed")
    else:
        tl.store(out, found, mask=in_rows[:, None])


@planned
def _project_plan(
    length: int, ranks: tuple[int, ...], rank: int, transposed: bool, masked: tuple[bool, ...], parts: int,
    halved: bool, stages: int,
) -> tuple[Launcher, int]:  # fmt: skip
    """What launches `_project_kernel`, and its programs along the columns."""
    rank0, rank1, rank2 = filled(ranks, GROUP)
    drops0, drops1, drops2 = (*masked, False, False)[:GROUP]
    block_k = columns_of(rank, parts)
    warps = 8 if any(masked) or rank > 32 else 4
    if halved:
        block_k, warps = min(block_k, 64), 4
    blocks = -(-length // block_k)
    span = -(-blocks // 2) * block_k if halved else blocks * block_k
    launcher = Launcher(
        _project_kernel, num_warps=warps, num_stages=stages,
        K=length, RANK0=rank0, RANK1=rank1, RANK2=rank2, R=rank,
        STRIDE_R=1 if transposed else length, STRIDE_K=rank0 if transposed else 1, COUNT=len(ranks),
        DROPS0=drops0, DROPS1=drops1, DROPS2=drops2, PARTS=parts, SPAN=span, ADDS=halved,
        BLOCK_N=PROJECT_ROWS, BLOCK_K=block_k,
    )  # fmt: skip
    return launcher, 2 if halved else 1


def _halves_rows(programs: int, masked: bool, multiprocessors: int) -> bool:
    """Whether two programs share a row of `project`, so that masks are computed by more warps.

    One program hides little of what its masks cost, and so many rows give each multiprocessor one. Two sums that are
    added to a zero give the same bits in either order; those of more programs would not.
    """
    return masked and multiprocessors <= 2 * programs and programs <= multiprocessors


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
    programs = -(-row_count // PROJECT_ROWS)
    halved = _halves_rows(programs, any(masked), multiprocessor_count(x))
    launch, splits = _project_plan(length, ranks, rank, transposed, masked, parts, halved, stages(x))
    if halved:
        out.zero_()
    fill = GROUP - len(factors)
    launch(
        (programs, splits), (rows, *factors, *[factors[0]] * fill, out), row_count, stride, seed, stream,
        *[threshold_of(p) for p in drops], *[0] * fill, *scales, *[1.0] * fill,
    )  # fmt: skip
