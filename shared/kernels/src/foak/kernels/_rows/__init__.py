"""What the ops that work row by row share: how a tensor is read as rows, and the tile that one program takes.

A row is the last dimension; a tile is `rows` whole rows, padded to a power of two of columns.
"""

from typing import NamedTuple

from torch import Tensor

from foak.kernels.launch import next_power_of_two

WIDEST_TILE = 16384
"""Rows longer than this are walked in blocks: at 32 warps they are 16 values a thread, and the backward holds four sets."""

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


def backward_tile(length: int) -> Tile:
    """8 values a thread: input, upstream gradient, weight and the weight gradient's sum of each are in registers."""
    columns = next_power_of_two(length)
    rows = max(1, 4096 // columns)
    return Tile(rows, columns, min(32, max(4, rows * columns // 256)))


def programs(row_count: int, tile: Tile, multiprocessors: int) -> int:
    """Programs of a backward that walks over its rows: as many as fit the device at once, 1024 threads for each SM."""
    return min(-(-row_count // tile.rows), multiprocessors * max(1, 32 // tile.warps))
