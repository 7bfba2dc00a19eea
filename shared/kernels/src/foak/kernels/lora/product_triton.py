"""The base product with the adapter's product in its epilogue, as a Triton kernel for Hopper.

    y = x @ W.T + z @ B.T + bias        accumulated in fp32, rounded once

cuBLAS rounds a product to the output's dtype before its epilogue adds anything, so a small `z @ B.T` that is added
there is lost. Here it is one more step of the same sum. A persistent grid walks over output tiles; one warp group loads
while the others multiply, which is what makes it as fast as cuBLAS, and what other GPUs cannot do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from foak.kernels.launch import multiprocessor_count, on_device_of

RANK_STEP = 16
"""Ranks of one step of the epilogue: the least that the tensor cores take."""

_RANK_STEP = tl.constexpr(RANK_STEP)


@triton.jit
def _add_low_rank(
    acc, z_ptr, b_ptr, rows, columns, row_count, out_count, RANK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """acc + z @ B.T, both in `PARTS` parts of `DTYPE`."""
    for start in tl.static_range(0, R, _RANK_STEP):
        ranks = start + tl.arange(0, _RANK_STEP)
        z = tl.load(
            z_ptr + rows.to(tl.int64)[:, None] * R + ranks[None, :], mask=(rows < row_count)[:, None], other=0.0
        )
        in_b = (columns < out_count)[None, :] & (ranks < RANK)[:, None]
        b = tl.load(b_ptr + columns[None, :] * RANK + ranks[:, None], mask=in_b, other=0.0)
        for z_index in tl.static_range(PARTS):
            z_part = z.to(DTYPE)
            rest = b
            for b_index in tl.static_range(PARTS - z_index):
                b_part = rest.to(DTYPE)
                acc = tl.dot(z_part, b_part, acc)
                if b_index + 1 < PARTS - z_index:
                    rest = rest.to(tl.float32) - b_part.to(tl.float32)
            if z_index + 1 < PARTS:
                z = z - z_part.to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["row_count"])
def _product_kernel(
    x_desc,  # [row_count, K] in blocks of [BLOCK_N, BLOCK_K]
    w_desc,  # [O, K] in blocks of [BLOCK_O, BLOCK_K]
    y_desc,  # [row_count, O] in blocks of [BLOCK_N, BLOCK_O]
    z_ptr,  # [row_count, R], fp32
    b_ptr,  # [O, RANK]
    bias_ptr,  # [O]
    row_count,
    out_count,  # O
    K,
    HAS_BIAS: tl.constexpr,
    RANK: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,  # rows of tiles that are walked together, so that their operands stay in the cache
    PROGRAMS: tl.constexpr,
    SPECIALIZE: tl.constexpr,
    EARLY: tl.constexpr,  # z and b are small enough to be held in registers meanwhile
):
    tiles_n, tiles_o = tl.cdiv(row_count, BLOCK_N), tl.cdiv(out_count, BLOCK_O)
    for tile in tl.range(
        tl.program_id(0), tiles_n * tiles_o, PROGRAMS, flatten=not SPECIALIZE, warp_specialize=SPECIALIZE
    ):
        in_band = BAND * tiles_o
        first = tile // in_band * BAND
        height = min(tiles_n - first, BAND)
        n = (first + tile % in_band % height) * BLOCK_N
        o = tile % in_band // height * BLOCK_O
        rows = n + tl.arange(0, BLOCK_N)
        columns = o + tl.arange(0, BLOCK_O)
        if EARLY:  # the loads are under way while the tile is multiplied
            ranks = tl.arange(0, R)
            places = rows.to(tl.int64)[:, None] * R + ranks[None, :]
            z = tl.load(z_ptr + places, mask=(rows < row_count)[:, None], other=0.0).to(DTYPE)
            in_b = (columns < out_count)[None, :] & (ranks < RANK)[:, None]
            b = tl.load(b_ptr + columns[None, :] * RANK + ranks[:, None], mask=in_b, other=0.0).to(DTYPE)
        acc = tl.zeros((BLOCK_N, BLOCK_O), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([n, k]), w_desc.load([o, k]).T, acc)
        if EARLY:
            acc = tl.dot(z, b, acc)
        else:
            acc = _add_low_rank(acc, z_ptr, b_ptr, rows, columns, row_count, out_count, RANK, R, PARTS, DTYPE)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + columns, mask=columns < out_count, other=0.0).to(tl.float32)[None, :]
        y_desc.store([n, o], acc.to(DTYPE))


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


LARGEST_EPILOGUE = 128
"""Ranks times parts beyond which the epilogue, which is unrolled, would take long to compile."""


def fits(x: Tensor, weight: Tensor, rank: int, parts: int) -> bool:
    """Whether the kernel serves the operands: on Hopper, 16-bit rows that begin at multiples of 16 bytes."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    if not 1 <= parts <= rank * parts <= LARGEST_EPILOGUE or weight.shape[0] % 8:
        return False
    return all(
        t.dtype in _DTYPES and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 and t.shape[1] > 0
        for t in (x, weight)
    )


def product(x: Tensor, weight: Tensor, z: Tensor, b: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """`x @ weight.T + z @ b.T + bias` in x's dtype: [N, O].

    Args:
        x: [N, K], bf16 or fp16, of which `fits` holds, as of `weight`.
        weight: [O, K], x's dtype, any row stride.
        z: [N, R] fp32, zero beyond the rank.
        b: [O, rank], contiguous, any floating dtype.
        bias: [O] or None.
        parts: into how many numbers of x's dtype `z` and `b` are split, at least 1.
    """
    row_count, length = x.shape
    out_features = weight.shape[0]
    y = x.new_empty((row_count, out_features))
    sms = multiprocessor_count(x)
    block_n, block_o, block_k = (128, 256 if out_features >= 2048 else 128, 64) if x.is_cuda else (16, 32, 32)
    tiles = -(-row_count // block_n) * -(-out_features // block_o)
    with on_device_of(x):
        _product_kernel[(min(sms, tiles),)](
            TensorDescriptor.from_tensor(x, [block_n, block_k]),
            TensorDescriptor.from_tensor(weight, [block_o, block_k]),
            TensorDescriptor.from_tensor(y, [block_n, block_o]),
            z,
            b,
            y if bias is None else bias,
            row_count,
            out_features,
            length,
            HAS_BIAS=bias is not None,
            RANK=b.shape[1],
            R=z.shape[1],
            PARTS=parts,
            DTYPE=_DTYPES[x.dtype],
            BLOCK_N=block_n,
            BLOCK_O=block_o,
            BLOCK_K=block_k,
            BAND=8,
            PROGRAMS=sms,
            SPECIALIZE=x.is_cuda,
            EARLY=parts == 1 and z.shape[1] <= 2 * RANK_STEP,
            num_warps=8,
            num_stages=3,
        )
    return y
