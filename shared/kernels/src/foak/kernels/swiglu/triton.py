"""SwiGLU's Triton kernels, forward and backward, and their autograd function.

y     = g * s * u                          s = sigmoid(g)
dgate = dy * u * s * (1 + g * (1 - s))
dup   = dy * g * s
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
def _forward_kernel(
    gate_ptr,  # rows of COLUMNS, gate_stride apart
    up_ptr,  # rows of COLUMNS, up_stride apart
    y_ptr,  # [rows, COLUMNS]
    gate_stride,
    up_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
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
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < COLUMNS
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if NEEDS_DGATE:
        up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(dgate_ptr + row * COLUMNS + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DUP:
        dup = dy * gate * sigmoid
        tl.store(dup_ptr + row * COLUMNS + columns, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@planned
def _forward_plan(length: int) -> tuple[Launcher, int]:
    """What launches the forward, and how many programs a row takes."""
    blocks, block, warps = column_blocks(length)
    return Launcher(_forward_kernel, num_warps=warps, COLUMNS=length, BLOCK=block), blocks


@planned
def _backward_plan(length: int, needs_dgate: bool, needs_dup: bool) -> tuple[Launcher, int]:
    """What launches the backward, and how many programs a row takes."""
    blocks, block, warps = column_blocks(length)
    launcher = Launcher(
        _backward_kernel,
        num_warps=warps,
        NEEDS_DGATE=needs_dgate,
        NEEDS_DUP=needs_dup,
        COLUMNS=length,
        BLOCK=block,
    )
    return launcher, blocks


class SwiGlu(torch.autograd.Function):
    """Saves its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = empty_rows(gate, promoted(gate.dtype, up.dtype))
        size = y.numel()
        if size == 0:
            return y
        length = gate.shape[-1]
        gate_rows, gate_stride = row_view(gate, length)
        up_rows, up_stride = row_view(up, length)
        launch, blocks = _forward_plan(length)
        launch((size // length * blocks,), (gate_rows, up_rows, y), gate_stride, up_stride)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup = ctx.needs_input_grad
        dgate = empty_rows(gate, gate.dtype) if needs_dgate else None
        dup = empty_rows(up, up.dtype) if needs_dup else None
        size = dy.numel()
        if size == 0:
            return dgate, dup
        length = gate.shape[-1]
        dy_rows, dy_stride = row_view(dy, length)
        gate_rows, gate_stride = row_view(gate, length)
        up_rows, up_stride = row_view(up, length)
        launch, blocks = _backward_plan(length, needs_dgate, needs_dup)
        tensors = (dy_rows, gate_rows, up_rows, gate if dgate is None else dgate, up if dup is None else dup)
        launch((size // length * blocks,), tensors, dy_stride, gate_stride, up_stride)
        return dgate, dup
