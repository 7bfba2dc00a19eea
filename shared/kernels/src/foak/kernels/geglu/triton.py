"""GeGLU's Triton kernels, forward and backward, and their autograd function.

    y     = g * p(g) * u
    dgate = dy * u * (p(g) + g * p'(g))
    dup   = dy * g * p(g)

where p is the normal distribution's cumulative function, `p(g) = (1 + erf(g / sqrt 2)) / 2`, or its approximation
`(1 + tanh(z)) / 2 = sigmoid(2 z)` with `z = sqrt(2 / pi) * (g + 0.044715 g^3)`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foak.kernels._rows import column_blocks, row_view
from foak.kernels.autograd import once_differentiable
from foak.kernels.launch import empty_rows, promoted
from foak.kernels.launcher import Launcher, planned


@triton.jit
def weigh_gelu(gate, TANH: tl.constexpr):
    """p(gate), the factor of gate in GELU, and its derivative."""
    if TANH:
        # Beyond 16 the sigmoid is 0 or 1 to fp32; without the bound the cube of a large gate would overflow.
        bounded = tl.minimum(tl.maximum(gate, -16.0), 16.0)
        square = bounded * bounded
        p = tl.sigmoid(1.5957691216057308 * bounded * (1.0 + 0.044715 * square))
        slope = p * (1.0 - p) * 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        p = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    return p, slope


@triton.jit
def _forward_kernel(
    gate_ptr,  # rows of COLUMNS, gate_stride apart
    up_ptr,  # rows of COLUMNS, up_stride apart
    y_ptr,  # [rows, COLUMNS]
    gate_stride,
    up_stride,
    TANH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    p, _ = weigh_gelu(gate, TANH)
    y = gate * p * up
    tl.store(y_ptr + row * COLUMNS + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # rows of COLUMNS, dy_stride apart
    gate_ptr,  # rows of COLUMNS, gate_stride apart
    up_ptr,  # rows of COLUMNS, up_stride apart
    dgate_ptr,  # [rows, COLUMNS]
    dup_ptr,  # [rows, COLUMNS]
    dy_stride,
    gate_stride,
    up_stride,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DUP: tl.constexpr,
    TANH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    p, slope = weigh_gelu(gate, TANH)
    if NEEDS_DGATE:
        up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dgate = dy * up * (p + gate * slope)
        tl.store(dgate_ptr + row * COLUMNS + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DUP:
        dup = dy * gate * p
        tl.store(dup_ptr + row * COLUMNS + columns, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@planned
def _forward_plan(tanh: bool, length: int) -> tuple[Launcher, int]:
    """What launches the forward, and how many programs a row takes."""
    blocks, block, warps = column_blocks(length)
    return Launcher(_forward_kernel, num_warps=warps, TANH=tanh, COLUMNS=length, BLOCK=block), blocks


@planned
def _backward_plan(tanh: bool, length: int, needs_dgate: bool, needs_dup: bool) -> tuple[Launcher, int]:
    """What launches the backward, and how many programs a row takes."""
    blocks, block, warps = column_blocks(length)
    launcher = Launcher(
        _backward_kernel,
        num_warps=warps,
        NEEDS_DGATE=needs_dgate,
        NEEDS_DUP=needs_dup,
        TANH=tanh,
        COLUMNS=length,
        BLOCK=block,
    )
    return launcher, blocks


class GeGlu(torch.autograd.Function):
    """Saves its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
        ctx.tanh = tanh
        ctx.save_for_backward(gate, up)
        y = empty_rows(gate, promoted(gate.dtype, up.dtype))
        size = y.numel()
        if size == 0:
            return y
        length = gate.shape[-1]
        gate_rows, gate_stride = row_view(gate, length)
        up_rows, up_stride = row_view(up, length)
        launch, blocks = _forward_plan(tanh, length)
        launch((size // length * blocks,), (gate_rows, up_rows, y), gate_stride, up_stride)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup, _ = ctx.needs_input_grad
        dgate = empty_rows(gate, gate.dtype) if needs_dgate else None
        dup = empty_rows(up, up.dtype) if needs_dup else None
        size = dy.numel()
        if size == 0:
            return dgate, dup, None
        length = gate.shape[-1]
        dy_rows, dy_stride = row_view(dy, length)
        gate_rows, gate_stride = row_view(gate, length)
        up_rows, up_stride = row_view(up, length)
        launch, blocks = _backward_plan(ctx.tanh, length, needs_dgate, needs_dup)
        tensors = (dy_rows, gate_rows, up_rows, gate if dgate is None else dgate, up if dup is None else dup)
        launch((size // length * blocks,), tensors, dy_stride, gate_stride, up_stride)
        return dgate, dup, None
