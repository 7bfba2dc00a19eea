"""The last step of a gradient that every program summed over its own rows: the sum over the programs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.launcher import Launcher, planned

BLOCK_COLUMNS = 32
BLOCK_PROGRAMS = 128


@triton.jit(do_not_specialize=["count"])
def _sum_partials_kernel(
    partial_ptr,  # [count, H], fp32
    out_ptr,  # [H]
    count,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_P, BLOCK_H], dtype=tl.float32)
    for first in range(0, count, BLOCK_P):
        programs = first + tl.arange(0, BLOCK_P)
        mask = (programs < count)[:, None] & (columns < H)[None, :]
        offsets = programs.to(tl.int64)[:, None] * H + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=columns < H)


@planned
def _sum_plan(length: int) -> tuple[Launcher, tuple[int]]:
    launcher = Launcher(_sum_partials_kernel, num_warps=4, H=length, BLOCK_H=BLOCK_COLUMNS, BLOCK_P=BLOCK_PROGRAMS)
    return launcher, (-(-length // BLOCK_COLUMNS),)


def sum_partials(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of `partial` [P, H] fp32, always in the same order, rounded once to `dtype`."""
    count, length = partial.shape
    out = partial.new_empty(length, dtype=dtype)
    launch, grid = _sum_plan(length)
    launch(grid, (partial, out), count)
    return out
