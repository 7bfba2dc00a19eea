"""An adapted layer behind a gated activation as Triton kernels: the activation's passes carry the thin products.

    h     = g * p(g) * u                        p: sigmoid (SwiGLU) or the normal distribution's (GeGLU)
    z     = scale * (mask * h) @ A.T            while h is written
    dh    = dy @ W + mask * (dz @ A)            the second part while dh is read
    dgate = dh * u * (p(g) + g * p'(g)),  dup = dh * g * p(g),  dA = dz.T @ (mask * h)

The backward computes h again from its gate and up, in registers, so that it need not be kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import row_view
from foak.kernels.geglu.triton import weigh_gelu
from foak.kernels.launch import empty_rows, multiprocessor_count
from foak.kernels.launcher import Launcher, planned
from foak.kernels.lora.autograd import Recipe
from foak.kernels.lora.dropout import threshold_of
from foak.kernels.lora.dropout_triton import kept
from foak.kernels.lora.factors_triton import add_outer, columns_of, load_factor, low_rank_share, split_dot, stages
from foak.kernels.lora.ptx_triton import fast_sigmoid, pinned, speaks_ptx, tied
from foak.kernels.lora.reduce_triton import sum_parts

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

PROJECT_ROWS = 32
"""Rows of a program of `project`."""

BACKWARD_ROWS, BACKWARD_COLUMNS = 16, 64
"""A tile of `backward`: five tiles and their successors are in registers, and small ones leave room for many
programs."""


@triton.jit
def _weigh(gate, ACTIVATION: tl.constexpr, PTX: tl.constexpr):
    """p(gate) and its derivative."""
    if ACTIVATION == 0:
        p = fast_sigmoid(gate) if PTX else tl.sigmoid(gate)
        slope = p * (1.0 - p)
    else:
        p, slope = weigh_gelu(gate, ACTIVATION == 2)
    return p, slope


@triton.jit(do_not_specialize=["row_count", "seed", "threshold"])
def _project_kernel(
    gate_ptr, up_ptr,  # rows of K, gate_stride and up_stride apart
    a_ptr,  # [RANK, K]
    h_ptr,  # [row_count, K]
    z_ptr,  # [row_count, R], fp32
    row_count, gate_stride, up_stride, seed, threshold, scale,
    ACTIVATION: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr,
    PARTS: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < row_count
    ranks = tl.arange(0, R)
    stream = tl.full([], 0, tl.uint32)
    acc = tl.zeros([BLOCK_N, R], dtype=tl.float32)
    fine = acc
    for first in range(0, K, BLOCK_K):
        columns = first + tl.arange(0, BLOCK_K)
        mask = in_rows[:, None] & (columns < K)[None, :]
        gate = tl.load(gate_ptr + rows[:, None] * gate_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows[:, None] * up_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        p = _weigh(gate, ACTIVATION, PTX)[0]
        h = (gate * p * up).to(h_ptr.dtype.element_ty)
        if PTX:
            h = pinned(h)
        tl.store(h_ptr + rows[:, None] * K + columns[None, :], h, mask=mask)
        if DROPS:
            h = tl.where(kept(seed, stream, rows, first, threshold, BLOCK_K), h, 0.0)
        in_a = (columns < K)[:, None] & (ranks < RANK)[None, :]
        a = tl.load(a_ptr + columns[:, None] + ranks[None, :] * K, mask=in_a, other=0.0)
        acc, fine = split_dot(h, a, acc, fine, PARTS)
    tl.store(z_ptr + rows[:, None] * R + ranks[None, :], (acc + fine) * scale, mask=in_rows[:, None])


@triton.jit(do_not_specialize=["row_count", "seed", "threshold"])
def _backward_kernel(
    dh_ptr,  # [row_count, K]: the base's share of the gradient
    gate_ptr, up_ptr,  # rows of K, gate_stride and up_stride apart
    dz_ptr,  # [row_count, R], fp32
    a_ptr,  # [RANK, K]
    dgate_ptr, dup_ptr,  # [row_count, K]
    partial_ptr,  # [programs along rows, R, K], fp32
    row_count, gate_stride, up_stride, seed, threshold,
    ACTIVATION: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, DROPS: tl.constexpr,
    PARTS: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)
    in_row = columns < K
    ranks = tl.arange(0, R)
    stream = tl.full([], 0, tl.uint32)
    narrow: tl.constexpr = dgate_ptr.dtype.element_ty
    a = load_factor(a_ptr, columns, K, RANK, R, narrow, PARTS)
    acc = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    fine = acc
    step = tl.num_programs(1).to(tl.int64) * BLOCK_N
    rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < row_count)[:, None] & in_row[None, :]
    # The next rows are asked for before these are worked on, so that memory is busy meanwhile.
    next_gate = tl.load(gate_ptr + rows[:, None] * gate_stride + columns[None, :], mask=mask, other=0.0)
    next_up = tl.load(up_ptr + rows[:, None] * up_stride + columns[None, :], mask=mask, other=0.0)
    next_dh = tl.load(dh_ptr + rows[:, None] * K + columns[None, :], mask=mask, other=0.0)
    for _ in range(tl.program_id(1) * BLOCK_N, row_count, tl.num_programs(1) * BLOCK_N):
        gate, up, dh = next_gate.to(tl.float32), next_up.to(tl.float32), next_dh.to(tl.float32)
        following = rows + step
        next_mask = (following < row_count)[:, None] & in_row[None, :]
        next_gate = tl.load(gate_ptr + following[:, None] * gate_stride + columns[None, :], mask=next_mask, other=0.0)
        next_up = tl.load(up_ptr + following[:, None] * up_stride + columns[None, :], mask=next_mask, other=0.0)
        next_dh = tl.load(dh_ptr + following[:, None] * K + columns[None, :], mask=next_mask, other=0.0)
        in_rows = rows < row_count
        dz = tl.load(dz_ptr + rows[:, None] * R + ranks[None, :], mask=in_rows[:, None], other=0.0)
        share = low_rank_share(dz, a, narrow, PARTS)
        if PTX:
            gate, up, dh = tied(gate, share), tied(up, share), tied(dh, share)
        p, slope = _weigh(gate, ACTIVATION, PTX)
        weighed = gate * p
        h = (weighed * up).to(narrow)
        if DROPS:
            keep = kept(seed, stream, rows, first, threshold, BLOCK_K)
            h = tl.where(keep, h, 0.0)
            share = tl.where(keep, share, 0.0)
        acc, fine = add_outer(dz, h, acc, fine, PARTS)
        dh += share
        places = rows[:, None] * K + columns[None, :]
        mask = in_rows[:, None] & in_row[None, :]
        tl.store(dgate_ptr + places, (dh * up * (p + gate * slope)).to(narrow), mask=mask)
        tl.store(dup_ptr + places, (dh * weighed).to(narrow), mask=mask)
        rows = following
    out = partial_ptr + tl.program_id(1).to(tl.int64) * R * K + ranks[:, None] * K + columns[None, :]
    tl.store(out, acc + fine, mask=in_row[None, :])


@planned
def _project_plan(
    activation: str, length: int, adapter_rank: int, rank: int, masked: bool, parts: int, ptx: bool, stages: int
) -> Launcher:
    return Launcher(
        _project_kernel, num_warps=8, num_stages=stages,
        ACTIVATION=_ACTIVATIONS[activation], K=length, RANK=adapter_rank, R=rank, DROPS=masked, PARTS=parts,
        PTX=ptx, BLOCK_N=PROJECT_ROWS, BLOCK_K=columns_of(rank, parts),
    )  # fmt: skip


@planned
def _backward_plan(
    activation: str, length: int, adapter_rank: int, rank: int, masked: bool, parts: int, ptx: bool,
    multiprocessors: int,
) -> tuple[Launcher, int, int]:  # fmt: skip
    """What launches the backward, its blocks along the columns, and the most along the rows."""
    launcher = Launcher(
        _backward_kernel, num_warps=4, num_stages=2,
        ACTIVATION=_ACTIVATIONS[activation], K=length, RANK=adapter_rank, R=rank, DROPS=masked, PARTS=parts,
        PTX=ptx, BLOCK_N=BACKWARD_ROWS, BLOCK_K=BACKWARD_COLUMNS,
    )  # fmt: skip
    blocks = -(-length // BACKWARD_COLUMNS)
    return launcher, blocks, max(1, 8 * multiprocessors // blocks)


def project(gate: Tensor, up: Tensor, activation: str, a: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """h [..., K] in gate's dtype, and `scale * (mask * h) @ a.T` [N, R] fp32.

    Args:
        gate: [..., K].
        up: [..., K] of the same dtype.
        activation: "silu", "gelu" or "gelu_tanh".
        a: [rank of the adapter, K], contiguous.
        recipe: of the one layer behind the activation.
    """
    length = gate.shape[-1]
    h = empty_rows(gate, gate.dtype)
    count = h.numel() // length
    z = gate.new_empty((count, recipe.rank), dtype=torch.float32)
    if count == 0:
        return h, z
    gate_rows, gate_stride = row_view(gate, length)
    up_rows, up_stride = row_view(up, length)
    (p,), (scale,) = recipe.drops, recipe.scales
    launch = _project_plan(
        activation, length, a.shape[0], recipe.rank, p > 0, recipe.parts, speaks_ptx(gate), stages(gate)
    )
    tensors = (gate_rows, up_rows, a, h, z)
    numbers = (count, gate_stride, up_stride, recipe.seed, threshold_of(p), scale)
    launch((-(-count // PROJECT_ROWS),), tensors, *numbers)
    return h, z


def backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, dz: Tensor, a: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up, and `dz.T @ (mask * h)`, like `a`; dgate lies in `dh`'s memory.

    Args:
        dh: [N, K] contiguous, in gate's dtype: the base's share of h's gradient; overwritten.
        dz: [N, R] fp32.
        gate, up, activation, a, recipe: see `project`.
    """
    length = gate.shape[-1]
    count, rank = dz.shape
    dup = empty_rows(up, up.dtype)
    if count == 0:
        return dh, dup, torch.zeros_like(a)
    gate_rows, gate_stride = row_view(gate, length)
    up_rows, up_stride = row_view(up, length)
    (p,) = recipe.drops
    launch, blocks, most = _backward_plan(
        activation, length, a.shape[0], rank, p > 0, recipe.parts, speaks_ptx(gate), multiprocessor_count(gate)
    )
    splits = min(-(-count // BACKWARD_ROWS), most)
    partial = gate.new_empty((splits, 1, rank, length), dtype=torch.float32)
    tensors = (dh, gate_rows, up_rows, dz, a, dh, dup, partial)
    launch((blocks, splits), tensors, count, gate_stride, up_stride, recipe.seed, threshold_of(p))
    (da,) = sum_parts(partial, [a], (a.shape[0],), False)
    return dh, dup, da
