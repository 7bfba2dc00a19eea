"""The base product with the adapter's product in its epilogue, as a Triton kernel for Hopper.

    y = x @ W.T + z @ B.T + bias        accumulated in fp32, rounded once

cuBLAS rounds a product to the output's dtype before its epilogue adds anything, so a small `z @ B.T` that is added
there is lost. Here it is one more step of the same sum. A persistent grid walks over output tiles; one warp group loads
while the others multiply, which is what makes it as fast as cuBLAS, and what other GPUs cannot do.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.launch import multiprocessor_count
from foak.kernels.launcher import Launcher, planned, row_stride
from foak.kernels.lora.parts import ROUNDED

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
    if x.is_cuda and not _is_hopper(x.get_device()):
        return False
    if not 1 <= parts <= rank * parts <= LARGEST_EPILOGUE or weight.shape[0] % 8:
        return False
    return _has_even_rows(weight) and _has_even_rows(x) and (x.dim() == 2 or x.is_contiguous())


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _has_even_rows(matrix: Tensor) -> bool:
    length, stride = matrix.shape[-1], row_stride(matrix)
    return (
        matrix.dtype in _DTYPES
        and matrix.stride(-1) == 1
        and stride % 8 == 0
        and stride >= length > 0  # rows that share memory are not for the memory unit
        and matrix.data_ptr() % 16 == 0
    )


@planned
def _plan(
    out_features: int, length: int, has_bias: bool, rank: int, wide_rank: int, parts: int, dtype: torch.dtype,
    on_gpu: bool, multiprocessors: int,
) -> tuple[Launcher, int, int]:  # fmt: skip
    """What launches the kernel, a tile's rows, and the tiles along a row."""
    block_n, block_o, block_k = (128, 256 if out_features >= 2048 else 128, 64) if on_gpu else (16, 32, 32)
    launcher = Launcher(
        _product_kernel, num_warps=8, num_stages=3, blocks=([block_n, block_k], [block_o, block_k], [block_n, block_o]),
        HAS_BIAS=has_bias, RANK=rank, R=wide_rank, PARTS=parts, DTYPE=_DTYPES[dtype],
        BLOCK_N=block_n, BLOCK_O=block_o, BLOCK_K=block_k, BAND=8, PROGRAMS=multiprocessors, SPECIALIZE=on_gpu,
        EARLY=parts == ROUNDED and wide_rank <= 2 * RANK_STEP,
    )  # fmt: skip
    return launcher, block_n, -(-out_features // block_o)


def product(x: Tensor, weight: Tensor, z: Tensor, b: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """`x @ weight.T + z @ b.T + bias` in x's dtype: [..., O].

    Args:
        x: [..., K], bf16 or fp16, of which `fits` holds, as of `weight`.
        weight: [O, K], x's dtype, any row stride.
        z: [N, R] contiguous, fp32, zero beyond the rank.
        b: [O, rank], contiguous, any floating dtype.
        bias: [O], contiguous, or None.
        parts: into how many numbers of x's dtype `z` and `b` are split, at least 1.
    """
    out_features, length = weight.shape
    row_count, wide_rank = z.shape
    sms = multiprocessor_count(x)
    launch, block_n, tiles_o = _plan(
        out_features, length, bias is not None, b.shape[1], wide_rank, parts, x.dtype, x.is_cuda, sms
    )
    y = x.new_empty((*x.shape[:-1], out_features))
    programs = min(sms, -(-row_count // block_n) * tiles_o)
    tensors = (x, weight, y, z, b, y if bias is None else bias)
    launch((programs,), tensors, row_count, out_features, length)
    return y
