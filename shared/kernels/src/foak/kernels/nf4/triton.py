"""The Triton kernel that decodes 4-bit weights.

A word is what a thread reads of the packed values at once: 4 bytes, which become 8 neighbouring values, one 16-byte
store in a 16-bit dtype. All values of a word share a scale.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from foak.kernels.launcher import Launcher, planned

if TYPE_CHECKING:
    from foak.kernels.nf4 import NestedScales

WORDS = 512  # words a program
WARPS = 4

LOOKUP = "gather"
"""How a nibble finds its value, the bits being the same; a benchmark may set it.

- "gather": in the code's copy in shared memory, whose 16 values lie in 16 banks; 9.3 instructions a value on Hopper.
- "load": in memory, of which the L1 cache keeps the code's 64 bytes; 10.5 instructions.
- "select": a tree of 15 choices in registers; 25 instructions.
"""


@triton.jit
def _entry(code_ptr, INDEX: tl.constexpr):
    return tl.load(code_ptr + INDEX)


@triton.jit
def _select(code_ptr, nibbles):
    """The value of each nibble, by its bits from the lowest to the highest."""
    bit = (nibbles & 1) != 0
    p0 = tl.where(bit, _entry(code_ptr, 1), _entry(code_ptr, 0))
    p1 = tl.where(bit, _entry(code_ptr, 3), _entry(code_ptr, 2))
    p2 = tl.where(bit, _entry(code_ptr, 5), _entry(code_ptr, 4))
    p3 = tl.where(bit, _entry(code_ptr, 7), _entry(code_ptr, 6))
    p4 = tl.where(bit, _entry(code_ptr, 9), _entry(code_ptr, 8))
    p5 = tl.where(bit, _entry(code_ptr, 11), _entry(code_ptr, 10))
    p6 = tl.where(bit, _entry(code_ptr, 13), _entry(code_ptr, 12))
    p7 = tl.where(bit, _entry(code_ptr, 15), _entry(code_ptr, 14))
    bit = (nibbles & 2) != 0
    q0, q1, q2, q3 = tl.where(bit, p1, p0), tl.where(bit, p3, p2), tl.where(bit, p5, p4), tl.where(bit, p7, p6)
    bit = (nibbles & 4) != 0
    return tl.where((nibbles & 8) != 0, tl.where(bit, q3, q2), tl.where(bit, q1, q0))


@triton.jit(do_not_specialize=["numel"])
def _decode_kernel(
    packed_ptr,  # [ceil(numel / NIBBLES)] words, seen as any dtype
    absmax_ptr,  # [blocks], fp32, or uint8 where NESTED
    code_ptr,  # [16], fp32
    nested_absmax_ptr,  # [ceil(blocks / NESTED_BLOCKSIZE)], fp32
    nested_code_ptr,  # [256], fp32
    offset_ptr,  # [], fp32
    out_ptr,  # rows of COLUMNS, OUT_STRIDE apart, or flat
    numel,
    COLUMNS: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCKSIZE: tl.constexpr,
    NESTED: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    NIBBLES: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,
    LOOKUP: tl.constexpr,
    WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    # Neighbouring words to neighbouring threads, as the 16-byte stores of their values want it: a thread that read
    # four neighbours at once would have to pass three of them on through shared memory.
    words = tl.max_contiguous(program * WORDS + tl.arange(0, WORDS), 1)
    inside = tl.arange(0, NIBBLES)
    first = words * NIBBLES
    mask = first < numel
    WORD: tl.constexpr = tl.pointer_type(tl.int32 if NIBBLES == 8 else tl.uint8)
    packed = tl.load(packed_ptr.to(WORD) + words, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)

    block = first // BLOCKSIZE
    if NESTED:
        index = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        group = tl.load(nested_absmax_ptr + block // NESTED_BLOCKSIZE, mask=mask, other=0.0)
        # A product and then a sum, each rounded: fused into one operation they would have other bits. The maximum keeps
        # every compiler from fusing them; an option of the launch would be lost under torch.compile.
        product = tl.maximum(tl.load(nested_code_ptr + index) * group, float("-inf"))
        scale = product + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)

    # The first value of a byte is its upper half: 4, 0, 12, 8, ...
    nibbles = (packed[:, None] >> ((inside ^ 1) * 4)[None, :]) & 15
    if LOOKUP == "gather":
        flat = tl.gather(tl.load(code_ptr + tl.arange(0, 16)), tl.reshape(nibbles, [WORDS * NIBBLES]), 0)
        values = tl.reshape(flat, [WORDS, NIBBLES])
    elif LOOKUP == "select":
        values = _select(code_ptr, nibbles)
    else:
        values = tl.load(code_ptr + nibbles)
    values = (values * scale[:, None]).to(out_ptr.dtype.element_ty)

    elements = first[:, None] + inside[None, :]
    if FLAT:
        offsets = elements
    elif COLUMNS % NIBBLES == 0:
        row = first // COLUMNS
        offsets = (row.to(tl.int64) * OUT_STRIDE + (first - row * COLUMNS))[:, None] + inside[None, :]
    else:
        row = elements // COLUMNS
        offsets = row.to(tl.int64) * OUT_STRIDE + (elements - row * COLUMNS)
    if COLUMNS % NIBBLES == 0:
        # A word ends inside its row, and so inside the tensor.
        tl.store(out_ptr + offsets, values, mask=mask[:, None])
    else:
        tl.store(out_ptr + offsets, values, mask=elements < numel)


@planned
def _plan(
    columns: int,
    out_stride: int,
    blocksize: int,
    nested_blocksize: int,
    nibbles: int,
    wide: bool,
    lookup: str,
    words: int,
    warps: int,
) -> Launcher:
    """What launches the decoding. `out_stride` is 0 for a flat result, `nested_blocksize` 0 for plain scales."""
    return Launcher(
        _decode_kernel,
        num_warps=warps,
        # Of a flat tensor only this much of the row's length matters: one kernel for all lengths.
        COLUMNS=columns if out_stride else gcd(columns, nibbles),
        # A constant, so that a stride that is a multiple of 8 and not of 16 is stored in 16 bytes too.
        OUT_STRIDE=out_stride,
        BLOCKSIZE=blocksize,
        NESTED=nested_blocksize > 0,
        NESTED_BLOCKSIZE=max(nested_blocksize, 1),
        NIBBLES=nibbles,
        FLAT=out_stride == 0,
        WIDE=wide,
        LOOKUP=lookup,
        WORDS=words,
    )


def decode(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    numel: int,
    blocksize: int,
    nested: NestedScales | None,
    out: Tensor,
) -> None:
    """Writes the decoded values into `out`; see `foak.kernels.dequantize_nf4`."""
    if numel == 0:
        return
    packed, scales = _dense(packed), _dense(absmax)
    # Words of one byte where the storage does not divide into words of four, or does not start at one.
    size = packed.element_size()
    nibbles = 8 if packed.numel() * size % 4 == 0 and packed.storage_offset() * size % 4 == 0 else 2
    if nested is None:
        tensors, group = (packed, scales, _dense(code), scales, scales, scales, out), 0
    else:
        second = (_dense(nested.absmax), _dense(nested.code), nested.offset)
        tensors, group = (packed, scales, _dense(code), *second, out), nested.blocksize
    stride = 0 if out.is_contiguous() else out.stride(0)
    launch = _plan(out.shape[-1], stride, blocksize, group, nibbles, numel > 2**30, LOOKUP, WORDS, WARPS)
    launch((-(-numel // (nibbles * WORDS)),), tensors, numel)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()
