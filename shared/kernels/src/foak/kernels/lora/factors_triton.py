"""What the thin products' kernels share: a factor in parts, the products with it, and the sizes of their tiles.

A factor of more bits than the wide operand (fp32 beside bf16) is split into `PARTS` numbers of the narrow dtype that
add up to it, each multiplied on the tensor cores: 3 bf16 parts hold all 24 bits of an fp32 number. The products of the
first parts and those of the others have a sum each: tensor cores cut off what lies below a sum's last bit, and so the
large sum is cut no more often than it has terms. Where `PARTS` is `WIDE` (beside fp16, whose range is too small for the
products in between) both operands are multiplied as fp32 numbers, in three products of 19-bit ones.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.lora.parts import ROUNDED, WIDE

GROUP = 3
"""Adapters of one launch: query, key and value."""

_ROUNDED, _WIDE = tl.constexpr(ROUNDED), tl.constexpr(WIDE)


@triton.jit
def split_dot(narrow, factor, acc, fine, PARTS: tl.constexpr):
    """acc + fine + narrow @ factor, `factor` in `PARTS` parts of `narrow`'s dtype, the first of which goes into acc."""
    if PARTS == _WIDE:
        acc = tl.dot(narrow.to(tl.float32), factor.to(tl.float32), acc, input_precision="tf32x3")
    else:
        part = factor.to(narrow.dtype)
        acc = tl.dot(narrow, part, acc)
        for _ in tl.static_range(1, PARTS):
            factor = factor.to(tl.float32) - part.to(tl.float32)
            part = factor.to(narrow.dtype)
            fine = tl.dot(narrow, part, fine)
    return acc, fine


@triton.jit
def load_factor(
    a_ptr, columns, K: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, NARROW: tl.constexpr, PARTS: tl.constexpr
):
    """[R, BLOCK_K] of a factor: rounded at once where one part is all that is used."""
    ranks = tl.arange(0, R)
    mask = (ranks < RANK)[:, None] & (columns < K)[None, :]
    a = tl.load(a_ptr + ranks[:, None] * K + columns[None, :], mask=mask, other=0.0)
    return a.to(NARROW) if PARTS == _ROUNDED else a


@triton.jit
def low_rank_share(z, a, narrow: tl.constexpr, PARTS: tl.constexpr):
    """z @ a in fp32: z's parts from coarse to fine, each with as many of a's as matter."""
    share = tl.zeros([z.shape[0], a.shape[1]], dtype=tl.float32)
    if PARTS == _WIDE:
        share = tl.dot(z, a.to(tl.float32), share, input_precision="tf32x3")
    for index in tl.static_range(PARTS):
        part = z.to(narrow)
        share, fine = split_dot(part, a, share, tl.zeros_like(share), PARTS - index)
        share += fine
        z = z - part.to(tl.float32)
    return share


@triton.jit
def add_outer(z, x, acc, fine, PARTS: tl.constexpr):
    """acc + fine + z.T @ x, z in `PARTS` parts of x's dtype, the first of which goes into acc."""
    if PARTS == _WIDE:
        acc = tl.dot(tl.trans(z), x.to(tl.float32), acc, input_precision="tf32x3")
    else:
        part = z.to(x.dtype)
        acc = tl.dot(tl.trans(part), x, acc)
        for _ in tl.static_range(1, PARTS):
            z = z - part.to(tl.float32)
            part = z.to(x.dtype)
            fine = tl.dot(tl.trans(part), x, fine)
    return acc, fine


def together(rank: int, parts: int) -> bool:
    """Whether several adapters fit the registers of one program; else each has a launch of its own."""
    return rank <= 32 and parts == ROUNDED


def columns_of(rank: int, parts: int) -> int:
    """Columns of a tile of a kernel that holds its factor in shared memory: 99 KiB of it are enough at any rank."""
    if rank <= 32:
        return 64 if parts == WIDE else 128
    if rank <= 64 and parts != WIDE:
        return 64
    return 16 if parts == WIDE and rank > 128 else 32


def stages(tensor: Tensor) -> int:
    """Tiles that are loaded ahead: three where a program may have the shared memory of a data centre's GPU."""
    return _stages_of(tensor.get_device()) if tensor.is_cuda else 1


@functools.cache
def _stages_of(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return 3 if properties.shared_memory_per_block_optin > 160_000 else 2


def filled(values: tuple[int, ...], count: int) -> tuple[int, ...]:
    """As many values as a kernel has parameters for them."""
    return values + (1,) * (count - len(values))
