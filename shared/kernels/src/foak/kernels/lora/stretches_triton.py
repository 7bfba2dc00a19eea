"""The order of a tile's elements in which loads, dropout masks and the tensor cores hold them in the same threads.

A load and a mask want neighbouring columns in one thread: 8 of 16 bits are one access, and 8 share one call of the
generator. The result of a product of tensor cores has two neighbouring columns in a thread, and the next two in the
next thread. Where both meet, one would go through shared memory, or the mask be computed a second time. But a product
does not care which column stands where: so a tile [BLOCK_N, BLOCK_K] is loaded as its stretches of `STRETCH` columns,
[BLOCK_N * BLOCK_K / STRETCH, STRETCH], and its columns are numbered anew for the product, so that each thread finds
there what it has loaded. It holds while a warp has the columns of one stretch: with BLOCK_K / STRETCH warps. With other
numbers of them the results are the same, and the tile is moved.
"""

import triton
import triton.language as tl

STRETCH = tl.constexpr(32)


@triton.jit
def stretches_of(begin, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The row and the first column of each stretch of a tile whose columns begin at `begin`."""
    COUNT: tl.constexpr = BLOCK_K // STRETCH
    places = tl.arange(0, BLOCK_N * COUNT)
    return places // (8 * COUNT) * 8 + places % 8, begin + places // 8 % COUNT * STRETCH


@triton.jit
def columns_of_tile(BLOCK_K: tl.constexpr):
    """Which of its columns stands at each place of a tile, [BLOCK_K]."""
    COUNT: tl.constexpr = BLOCK_K // STRETCH
    places = tl.arange(0, BLOCK_K)
    return places // 8 % COUNT * STRETCH + places // 2 % 4 * 8 + places // (8 * COUNT) * 2 + places % 2


@triton.jit
def tile(elements, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] from its stretches."""
    parts = elements.reshape(BLOCK_N // 8, BLOCK_K // STRETCH, 8, 4, 4, 2)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def stretches(elements, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The stretches of a tile [BLOCK_N, BLOCK_K]."""
    parts = elements.reshape(BLOCK_N // 8, 8, 4, BLOCK_K // STRETCH, 4, 2)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(BLOCK_N * BLOCK_K // STRETCH, STRETCH)
