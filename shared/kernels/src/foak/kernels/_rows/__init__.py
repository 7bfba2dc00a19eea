"""What the ops that work row by row share: how a tensor is read as rows, and what part of them one program takes.

A row is the last dimension; a tile is `rows` whole rows, padded to a power of two of columns.
"""

from typing import NamedTuple

from torch import Tensor

from foak.kernels.launch import next_power_of_two

WIDEST_TILE = 16384
"""Longer rows are walked in blocks: at 32 warps this is 16 values a thread, of which the backward holds four sets."""

WIDE_BLOCK = 8192
"""Columns in one step along a row that is too long for a tile."""


class Tile(NamedTuple):
    """A program's share: `rows` rows of `columns` (a power of two) columns, on `warps` warps."""

    rows: int
    columns: int
    warps: int


def row_view(tensor: Tensor, length: int) -> tuple[Tensor, int]:
    """`tensor` [..., length], of at least one element, as rows of unit stride, and the distance between two rows.

    A tensor whose rows lie at equal distances (a slice of a packed projection, an expanded row) is not copied.
    """
    if tensor.is_contiguous():
        return tensor, length
    rows = tensor.reshape(-1, length)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def forward_tile(length: int) -> Tile:
    """16 values a thread, that is two 16-byte loads of bf16; short rows are put together to 4096 values a program."""
    columns = next_power_of_two(length)
    rows = max(1, 4096 // columns)
    return Tile(rows, columns, min(32, max(4, rows * columns // 512)))


def backward_tile(length: int, warps: int) -> Tile:
    """8 values a thread: input, upstream gradient, weight and the sums of the parameters' gradients are in registers.

    Rows that are short for `warps` warps are put together, rows that are long take more warps. Of 16 warps two programs
    fit an SM if they need no more than 64 registers a thread; of 32 there is one.
    """
    columns = next_power_of_two(length)
    rows = max(1, warps * 256 // columns)
    return Tile(rows, columns, min(32, max(warps, columns // 256)))


def most_programs(tile: Tile, multiprocessors: int) -> int:
    """Programs of a backward that walks over its rows: as many as fit the device at once, 1024 threads for each SM."""
    return multiprocessors * max(1, 32 // tile.warps)


def column_blocks(length: int) -> tuple[int, int, int]:
    """How an elementwise op cuts a row: programs of a row, columns of each (a power of two), warps of each.

    The widest block up to 2048 (16 values a thread on 4 warps) of which the padding at the row's end wastes at most
    an eighth; 128 where none does.
    """
    block = min(2048, next_power_of_two(length))
    while block > 128 and -(-length // block) * block * 8 > length * 9:
        block //= 2
    return -(-length // block), block, max(1, block // 512)
