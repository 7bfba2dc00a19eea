"""The Triton kernel that decodes GPTQ's format.

    weight[n, k] = (code[k, n] - (zero[g, n] + zero_offset) mod 2^bits) * scale[g, n],   g the group of input k

A program decodes a tile of K inputs by N outputs. The tile is read as it lies in memory, with the outputs next to each
other, and written as the product wants it, with the inputs next to each other: Triton turns it in shared memory in
between, once, as finished 16-bit values.

A unit is the shortest run of inputs that fills whole words: one word of 32 / bits values, at 3 bits 32 values in three
words. Scale and zero are read once for a tile where it lies in one group, once for a unit where that does, and once for
each input otherwise (act-order).
"""

import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.launcher import Launcher, planned

WARPS = 4

_TILE, _UNIT, _INPUT = 0, 1, 2


@triton.jit
def _zeros(row_ptr, columns, mask, zero_offset, BITS: tl.constexpr):
    """The zeros of `columns` in the rows of qzeros at `row_ptr`; the two are broadcast against each other."""
    first = columns * BITS
    words_ptr = row_ptr + (first >> 5)
    found = tl.load(words_ptr, mask=mask, other=0).to(tl.uint32, bitcast=True) >> (first & 31).to(tl.uint32)
    if 32 % BITS != 0:
        crosses = (first & 31) > 32 - BITS
        upper = tl.load(words_ptr + 1, mask=mask & crosses, other=0).to(tl.uint32, bitcast=True)
        found |= tl.where(crosses, upper << ((32 - (first & 31)) & 31).to(tl.uint32), 0)
    # The sum may not fit the bits: what is stored as the largest value is 0 then.
    return ((found.to(tl.int32) + zero_offset) & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["zero_offset"])
def _dequantize_kernel(
    qweight_ptr,  # [ceil(K * BITS / 32), N] int32
    qzeros_ptr,  # [groups, zero_words] int32
    scales_ptr,  # [groups, N]
    g_idx_ptr,  # [K] int32, or anything where HAS_G_IDX is false
    out_ptr,  # [N, K], rows out_stride apart
    K,
    N,
    groups,
    group_size,
    zero_words,
    out_stride,
    zero_offset,
    BITS: tl.constexpr,
    SCALES_BY: tl.constexpr,
    HAS_G_IDX: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    UNIT: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    UNITS: tl.constexpr = BLOCK_K // UNIT
    FIELD: tl.constexpr = (1 << BITS) - 1
    tiles = tl.cdiv(K, BLOCK_K)
    first_k = (tl.program_id(0) % tiles) * BLOCK_K
    first_n = (tl.program_id(0) // tiles) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = first_n + n < N

    # codes, [BLOCK_K, BLOCK_N]
    units = tl.arange(0, UNITS)
    word_row = first_k // UNIT * WORDS
    words_ptr = qweight_ptr + word_row.to(tl.int64) * N + first_n + units[:, None] * (WORDS * N) + n[None, :]
    if BITS == 3:
        word_rows = tl.cdiv(K * BITS, 32)
        row = word_row + units * 3
        if EVEN:
            first = tl.load(words_ptr)
            second = tl.load(words_ptr + N)
            third = tl.load(words_ptr + 2 * N)
        else:
            first = tl.load(words_ptr, mask=(row < word_rows)[:, None] & in_n[None, :], other=0)
            second = tl.load(words_ptr + N, mask=(row + 1 < word_rows)[:, None] & in_n[None, :], other=0)
            third = tl.load(words_ptr + 2 * N, mask=(row + 2 < word_rows)[:, None] & in_n[None, :], other=0)
        middle = second.to(tl.uint32, bitcast=True).to(tl.uint64)
        lower = first.to(tl.uint32, bitcast=True).to(tl.uint64) | (middle << 32)
        upper = middle | (third.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        bit = 3 * tl.arange(0, UNIT)[None, :, None]
        # The 21 values that end within the first two words come from them, the others from the last two.
        in_lower = bit < 63
        shift = tl.where(in_lower, bit, bit - 32).to(tl.uint64)
        codes = (tl.where(in_lower, lower[:, None, :], upper[:, None, :]) >> shift).to(tl.int32) & FIELD
    else:
        if EVEN:
            words = tl.load(words_ptr)
        else:
            in_words = (word_row + units < tl.cdiv(K, UNIT))[:, None] & in_n[None, :]
            words = tl.load(words_ptr, mask=in_words, other=0)
        codes = (words[:, None, :] >> (BITS * tl.arange(0, UNIT))[None, :, None]) & FIELD

    # (code - zero) * scale, [BLOCK_K, BLOCK_N] fp32
    if SCALES_BY == 0:
        group = (first_k // group_size).to(tl.int64)
        scale = tl.load(scales_ptr + group * N + first_n + n, mask=in_n, other=0.0).to(tl.float32)
        zero = _zeros(qzeros_ptr + group * zero_words, first_n + n, in_n, zero_offset, BITS)
        value = (codes - zero[None, None, :]).to(tl.float32) * scale[None, None, :]
        value = tl.reshape(value, (BLOCK_K, BLOCK_N))
    elif SCALES_BY == 1:
        begin = first_k + units * UNIT
        mask = (begin < K)[:, None] & in_n[None, :]
        group = (begin // group_size).to(tl.int64)[:, None]
        scale = tl.load(scales_ptr + group * N + (first_n + n)[None, :], mask=mask, other=0.0).to(tl.float32)
        zero = _zeros(qzeros_ptr + group * zero_words, (first_n + n)[None, :], mask, zero_offset, BITS)
        value = (codes - zero[:, None, :]).to(tl.float32) * scale[:, None, :]
        value = tl.reshape(value, (BLOCK_K, BLOCK_N))
    else:
        in_k = first_k + k < K
        if HAS_G_IDX:
            group = tl.load(g_idx_ptr + first_k + k, mask=in_k, other=0)
            known = (group >= 0) & (group < groups)
        else:
            group = (first_k + k) // group_size
            known = in_k
        mask = (in_k & known)[:, None] & in_n[None, :]
        group = group.to(tl.int64)[:, None]
        scale = tl.load(scales_ptr + group * N + (first_n + n)[None, :], mask=mask, other=float("nan"))
        if BITS == 3:
            zero = _zeros(qzeros_ptr + group * zero_words, (first_n + n)[None, :], mask, zero_offset, BITS)
        else:
            word = first_n // UNIT + tl.arange(0, BLOCK_N // UNIT)
            in_zeros = (in_k & known)[:, None] & (word < zero_words)[None, :]
            zero_word = tl.load(qzeros_ptr + group * zero_words + word[None, :], mask=in_zeros, other=0)
            zero = ((zero_word[:, :, None] >> (BITS * tl.arange(0, UNIT))[None, None, :]) + zero_offset) & FIELD
            zero = tl.reshape(zero, (BLOCK_K, BLOCK_N))
        value = (tl.reshape(codes, (BLOCK_K, BLOCK_N)) - zero).to(tl.float32) * scale.to(tl.float32)

    turned = tl.trans(value.to(out_ptr.dtype.element_ty))
    tile_ptr = out_ptr + first_n.to(tl.int64) * out_stride + first_k + n.to(tl.int64)[:, None] * out_stride + k[None, :]
    if EVEN:
        tl.store(tile_ptr, turned)
    else:
        tl.store(tile_ptr, turned, mask=in_n[:, None] & (first_k + k < K)[None, :])


def dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    bits: int,
    group_size: int | None,
    zero_offset: int,
    out: Tensor,
) -> None:
    """Writes the dense weight into `out` [N, K]; the arguments are those of `foak.kernels.dequantize_gptq`, checked."""
    out_features, in_features = out.shape
    if out.numel() == 0:
        return
    by_input = g_idx is not None
    plan = _plan(out_features, in_features, bits, None if by_input else group_size, by_input)
    qweight, qzeros, scales = qweight.contiguous(), qzeros.contiguous(), scales.contiguous()
    tensors = (qweight, qzeros, scales, qweight if g_idx is None else g_idx.contiguous(), out)
    groups, zero_words = scales.shape[0], qzeros.shape[1]
    launch, programs = plan
    launch(
        (programs,), tensors, in_features, out_features, groups, group_size or 1, zero_words, out.stride(0), zero_offset
    )


@planned
def _plan(
    out_features: int, in_features: int, bits: int, group_size: int | None, by_input: bool
) -> tuple[Launcher, int]:
    """What launches the decoding of a weight of these sizes, and in how many programs."""
    scales_by, block_k, block_n = _tile(bits, group_size)
    even = in_features % block_k == 0 and out_features % block_n == 0
    programs = -(-in_features // block_k) * -(-out_features // block_n)
    return _launcher(bits, scales_by, by_input, even, block_k, block_n, WARPS), programs


@planned
def _launcher(
    bits: int, scales_by: int, by_input: bool, even: bool, block_k: int, block_n: int, warps: int
) -> Launcher:
    return Launcher(
        _dequantize_kernel,
        num_warps=warps,
        BITS=bits,
        SCALES_BY=scales_by,
        HAS_G_IDX=by_input,
        EVEN=even,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
    )


def _tile(bits: int, group_size: int | None) -> tuple[int, int, int]:
    """By what scales are read, and the tile's inputs and outputs: 4096 to 8192 values, 32 to 64 a thread.

    128 inputs make rows of 256 bytes of 16-bit values to write, 64 outputs rows of 256 bytes to read. `group_size` is
    None where each input names its own group: what that takes in registers makes the tile narrower, not shorter, since
    the more inputs it has, the more of them find their group's scales in L1.
    """
    if group_size is None:
        return _INPUT, 128, 32
    for block_k in (128, 64):
        if group_size % block_k == 0:
            return _TILE, block_k, 64
    unit = 32 if bits == 3 else 32 // bits
    if group_size % unit == 0:
        return _UNIT, 128, 64
    return _INPUT, 128, 32
