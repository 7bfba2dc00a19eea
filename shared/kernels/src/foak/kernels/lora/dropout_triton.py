"""Dropout masks inside a kernel; see `dropout.py` for what they are."""

import triton
import triton.language as tl

from foak.kernels.lora.dropout import COLUMNS_PER_CALL, MULTIPLIERS, ROUNDS, WEYL

_COLUMNS_PER_CALL = tl.constexpr(COLUMNS_PER_CALL)
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER0, _MULTIPLIER1 = (tl.constexpr(number) for number in MULTIPLIERS)
_WEYL0, _WEYL1 = (tl.constexpr(number) for number in WEYL)


@triton.jit
def streams(first):
    """The numbers that tell the masks of a launch apart, from `first` on."""
    first = tl.full([], 0, tl.uint32) + first.to(tl.uint32)
    return first, first + 1, first + 2


@triton.jit
def _philox(seed, c0, c1, c2):
    """Four words for each counter (c0, c1, c2, 0). Each product of 32 bits by 32 is one of 64 bits."""
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c3 = tl.full([], 0, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        product0 = c0.to(tl.uint64) * tl.full([], _MULTIPLIER0, tl.uint64)
        product1 = c2.to(tl.uint64) * tl.full([], _MULTIPLIER1, tl.uint64)
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0 += tl.full([], _WEYL0, tl.uint32)
        key1 += tl.full([], _WEYL1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def kept(seed, stream, rows, first_column, threshold, BLOCK: tl.constexpr):
    """Which of [rows, BLOCK] elements are kept; `first_column`, one or one for each row, is a multiple of 8."""
    first = (tl.zeros_like(rows) + first_column // _COLUMNS_PER_CALL).to(tl.uint32)
    groups = first[:, None] + tl.arange(0, BLOCK // _COLUMNS_PER_CALL).to(tl.uint32)[None, :]
    row = rows.to(tl.uint32)[:, None] + tl.zeros_like(groups)
    w0, w1, w2, w3 = _philox(seed.to(tl.uint64), row, groups, stream)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    numbers = tl.join(words, (words << 16) | (words >> 16))
    return numbers.reshape(rows.shape[0], BLOCK) >= threshold.to(tl.uint32)
