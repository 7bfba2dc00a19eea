"""What a kernel says in the GPU's own assembly, because Triton has no word for it. Not for the interpreter."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def speaks_ptx(tensor: Tensor) -> bool:
    """Whether kernels on `tensor` are compiled for a GPU whose assembly is PTX."""
    return tensor.is_cuda and torch.version.hip is None


@triton.jit
def fast_sigmoid(x):
    """The sigmoid by the GPU's approximations of exp2 and 1/x, each exact to 2 units in fp32's last place.

    `tl.sigmoid` uses the same two, between scalings that keep subnormal numbers: more than half of its instructions.
    """
    decay = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + decay], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def tied(x, product):
    """x (fp32), in the layout of a product of the tensor cores: what is computed from it is computed there, once.

    Left to itself the compiler computes an elementwise chain twice, in the layout in which its input was loaded and in
    that of the product which it meets, because it holds that for cheaper than to move the result of the first.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, product], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def pinned(x):
    """x (16 bits), computed once: it is moved to where a product wants it, not computed there again."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
