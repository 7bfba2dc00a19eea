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
    BLOCK_SHIFT: tl.constexpr,  # a block has 2**BLOCK_SHIFT words
    NESTED: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    PROGRAMS_A_GROUP: tl.constexpr,  # how many programs one nested scale serves, 0 where that is no whole number
    NIBBLES: tl.constexpr,
    EVEN: tl.constexpr,  # every program has all its words
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,
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
    mask = None if EVEN else first < numel
    WORD: tl.constexpr = tl.pointer_type(tl.int32 if NIBBLES == 8 else tl.uint8)
    packed = tl.load(packed_ptr.to(WORD) + words, mask=mask).to(tl.int32)

    block = words >> BLOCK_SHIFT
    if NESTED:
        if PROGRAMS_A_GROUP > 0:
            group = tl.load(nested_absmax_ptr + program // PROGRAMS_A_GROUP)
        else:
            group = tl.load(nested_absmax_ptr + block // NESTED_BLOCKSIZE, mask=mask)
        index = tl.load(absmax_ptr + block, mask=mask, other=None if EVEN else 0).to(tl.int32)
        # A product and then a sum, each rounded: fused into one operation they would have other bits. The maximum keeps
        # every compiler from fusing them; an option of the launch would be lost under torch.compile.
        product = tl.maximum(tl.load(nested_code_ptr + index) * group, float("-inf"))
        scale = product + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask)

    # The first value of a byte is its upper half: 4, 0, 12, 8, ...
    nibbles = (packed[:, None] >> ((inside ^ 1) * 4)[None, :]) & 15
    # In the code's copy in shared memory, whose 16 values lie in 16 banks.
    flat = tl.gather(tl.load(code_ptr + tl.arange(0, 16)), tl.reshape(nibbles, [WORDS * NIBBLES]), 0)
    values = tl.reshape(flat, [WORDS, NIBBLES])
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
    if EVEN:
        tl.store(out_ptr + offsets, values)
    elif COLUMNS % NIBBLES == 0:
        # A word ends inside its row, and so inside the tensor.
        tl.store(out_ptr + offsets, values, mask=(first < numel)[:, None])
    else:
        tl.store(out_ptr + offsets, values, mask=elements < numel)


@planned
def _plan(
    columns: int,
    out_stride: int,
    blocksize: int,
    nested_blocksize: int,
    nibbles: int,
    even: bool,
    wide: bool,
) -> Launcher:
    """What launches the decoding. `out_stride` is 0 for a flat result, `nested_blocksize` 0 for plain scales."""
    group = blocksize * nested_blocksize
    return Launcher(
        _decode_kernel,
        num_warps=WARPS,
        # Of a flat tensor only this much of the row's length matters: one kernel for all lengths.
        COLUMNS=columns if out_stride else gcd(columns, nibbles),
        # A constant, so that a stride that is a multiple of 8 and not of 16 is stored in 16 bytes too.
        OUT_STRIDE=out_stride,
        BLOCK_SHIFT=(blocksize // nibbles).bit_length() - 1,
        NESTED=nested_blocksize > 0,
        NESTED_BLOCKSIZE=max(nested_blocksize, 1),
        PROGRAMS_A_GROUP=0 if group % (nibbles * WORDS) else group // (nibbles * WORDS),
        NIBBLES=nibbles,
        EVEN=even,
        FLAT=out_stride == 0,
        WIDE=wide,
        WORDS=WORDS,
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
    even = numel % (nibbles * WORDS) == 0
    launch = _plan(out.shape[-1], stride, blocksize, group, nibbles, even, numel > 2**30)
    launch((-(-numel // (nibbles * WORDS)),), tensors, numel)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()
