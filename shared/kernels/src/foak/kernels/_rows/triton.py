"""What the kernels of the two norms share: how they are launched, and the last step of their parameters' gradients."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import backward_tile, forward_tile, most_programs
from foak.kernels.launcher import Launcher, planned

BLOCK_COLUMNS = 32
BLOCK_PROGRAMS = 128


def forward_plan(kernel: Any, wide_kernel: Any, length: int, wide_block: int, **constants: Any) -> tuple[Launcher, int]:
    """What launches a norm's forward, and how many rows a program takes.

    Args:
        kernel: holds `ROWS` whole rows in a tile of `BLOCK_H` columns.
        wide_kernel: walks along one row in blocks of `BLOCK_H` columns.
        length: of a row.
        wide_block: columns of a block; 0 where a tile holds whole rows.
        constants: the kernels' first ones; those named above, and `H`, the length, follow.
    """
    if wide_block:
        return Launcher(wide_kernel, num_warps=16, **constants, H=length, BLOCK_H=wide_block), 1
    tile = forward_tile(length)
    launcher = Launcher(kernel, num_warps=tile.warps, **constants, H=length, BLOCK_H=tile.columns, ROWS=tile.rows)
    return launcher, tile.rows


def backward_plan(
    kernel: Any, wide_kernel: Any, length: int, wide_block: int, warps: int, multiprocessors: int, **constants: Any
) -> tuple[Launcher, int, int]:
    """What launches a norm's backward, how many rows a program takes at once, and the most programs that there are.

    Args:
        warps: of a program, at least; see `backward_tile`.
        multiprocessors: of the device.
        kernel, wide_kernel, length, wide_block, constants: as for `forward_plan`.
    """
    tile = backward_tile(wide_block or length, warps=warps)
    constants |= {"H": length, "BLOCK_H": tile.columns}
    if not wide_block:
        constants["ROWS"] = tile.rows
    launcher = Launcher(wide_kernel if wide_block else kernel, num_warps=tile.warps, **constants)
    return launcher, tile.rows, most_programs(tile, multiprocessors)


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
