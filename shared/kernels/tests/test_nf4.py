"""`dequantize_nf4` against a decoding in NumPy, bit by bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from foak.kernels import NestedScales, dequantize_nf4
from foak.kernels.nf4 import BLOCKSIZES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((16, 96), (5, 64), (3, 50), (7, 33), (1, 1), (4, 8200))
"""Rows in whole words of 8 values and not, whole blocks and not, an odd number of values, more than one program."""


class Stored:
    """Random packed values with their scales, and what NumPy decodes of them."""

    def __init__(
        self, shape: tuple[int, ...], blocksize: int, nested: bool, device: torch.device, nested_blocksize: int = 256
    ) -> None:
        rng = np.random.default_rng(0)
        numel = math.prod(shape)
        blocks = -(-numel // blocksize)
        self.shape, self.blocksize = shape, blocksize
        packed = rng.integers(0, 256, -(-numel // 2), dtype=np.uint8)
        code = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        code[7] = -0.0  # FP4 has a negative zero
        self.packed = torch.from_numpy(packed).to(device)
        self.code = torch.from_numpy(code).to(device)
        self.nested: NestedScales | None = None
        if nested:
            absmax = rng.integers(0, 256, blocks, dtype=np.uint8)
            groups = rng.uniform(0.5, 2, -(-blocks // nested_blocksize)).astype(np.float32)
            second = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            offset = np.float32(1.2345678)
            # One operation after the other, each rounded to float32, as NumPy does.
            scales = second[absmax] * np.repeat(groups, nested_blocksize)[:blocks]
            scales = scales + offset
            self.nested = NestedScales(
                *(torch.from_numpy(a).to(device) for a in (groups, second)),
                torch.tensor(offset, device=device),
                nested_blocksize,
            )
        else:
            scales = absmax = rng.uniform(0.5, 2, blocks).astype(np.float32)
        self.absmax = torch.from_numpy(absmax).to(device)
        nibbles = np.stack((packed >> 4, packed & 15), axis=1).reshape(-1)[:numel]
        values = code[nibbles] * np.repeat(scales, blocksize)[:numel]
        assert values.dtype == np.float32
        self.values = torch.from_numpy(values.reshape(shape)).to(device)

    def decode(self, dtype: torch.dtype, packed: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return dequantize_nf4(
            self.packed if packed is None else packed,
            self.absmax,
            self.code,
            self.shape,
            blocksize=self.blocksize,
            nested=self.nested,
            dtype=dtype,
            out=out,
        )

    def assert_is(self, result: Tensor, dtype: torch.dtype) -> None:
        assert result.dtype is dtype
        assert result.shape == self.shape
        assert not result.requires_grad
        assert torch.equal(bits(result), bits(self.values.to(dtype)))


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize(("shape", "nested"), itertools.product(SHAPES, [False, True]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit(
    dtype: torch.dtype, shape: tuple[int, ...], nested: bool, backend: str, device: torch.device, poisoned: None
) -> None:
    stored = Stored(shape, 64, nested, device)
    stored.assert_is(stored.decode(dtype), dtype)


@pytest.mark.parametrize(("blocksize", "nested"), itertools.product(BLOCKSIZES, [False, True]))
def test_block_sizes(blocksize: int, nested: bool, backend: str, device: torch.device, poisoned: None) -> None:
    stored = Stored((9, 1000), blocksize, nested, device)
    stored.assert_is(stored.decode(torch.bfloat16), torch.bfloat16)


def test_nested_block_sizes(backend: str, device: torch.device, poisoned: None) -> None:
    for nested_blocksize in (1, 3, 64, 256, 4096):
        stored = Stored((40, 512), 32, True, device, nested_blocksize)
        stored.assert_is(stored.decode(torch.float32), torch.float32)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("turned", [False, True])
def test_packed_values_are_read_whatever_they_are_seen_as(
    storage: torch.dtype, turned: bool, backend: str, device: torch.device, poisoned: None
) -> None:
    stored = Stored((16, 96), 64, False, device)
    packed = stored.packed.view(storage).view(-1, 1)
    stored.assert_is(stored.decode(torch.bfloat16, packed.t() if turned else packed), torch.bfloat16)


def test_packed_values_may_lie_at_any_byte(backend: str, device: torch.device, poisoned: None) -> None:
    stored = Stored((16, 96), 64, False, device)
    for offset in (1, 2, 4):
        storage = torch.empty(stored.packed.numel() + offset, dtype=torch.uint8, device=device)
        moved = storage[offset:].copy_(stored.packed)
        stored.assert_is(stored.decode(torch.bfloat16, moved), torch.bfloat16)


@pytest.mark.parametrize("shape", [(16, 96), (3, 50), (7, 33)])
@pytest.mark.parametrize("beyond", [0, 8, 16, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_into_rows_of_a_wider_buffer_and_nothing_beside_them(
    dtype: torch.dtype, beyond: int, shape: tuple[int, int], backend: str, device: torch.device, poisoned: None
) -> None:
    stored = Stored(shape, 64, True, device)
    rows, columns = shape
    buffer = torch.full((rows + 1, columns + beyond), 7.0, dtype=dtype, device=device)
    out = buffer[:rows, :columns]
    assert stored.decode(dtype, out=out) is out
    stored.assert_is(out, dtype)
    assert (buffer[rows:] == 7).all()
    assert (buffer[:, columns:] == 7).all()


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0,)])
def test_no_values(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    stored = Stored(shape, 64, False, device)
    stored.assert_is(stored.decode(torch.bfloat16), torch.bfloat16)


def test_one_dimension_and_three(backend: str, device: torch.device, poisoned: None) -> None:
    for shape in ((130,), (2, 3, 40)):
        stored = Stored(shape, 64, False, device)
        stored.assert_is(stored.decode(torch.float16), torch.float16)


def test_inputs_are_left_alone(backend: str, device: torch.device) -> None:
    stored = Stored((7, 33), 64, True, device)
    assert stored.nested is not None
    given = (stored.packed, stored.absmax, stored.code, stored.nested.absmax, stored.nested.code, stored.nested.offset)
    before = [tensor.clone() for tensor in given]
    stored.decode(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def wrong(stored: Stored, **changes: object) -> Callable[[], Tensor]:
    arguments = {
        "packed": stored.packed,
        "absmax": stored.absmax,
        "code": stored.code,
        "shape": stored.shape,
        "blocksize": stored.blocksize,
        "nested": stored.nested,
        **changes,
    }
    return lambda: dequantize_nf4(**arguments)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    cpu = torch.device("cpu")
    plain, double = Stored((8, 64), 64, False, cpu), Stored((8, 64), 64, True, cpu)
    assert double.nested is not None
    nested = double.nested
    for call, message in (
        (wrong(plain, dtype=torch.float64), "dtype is torch.float64"),
        (wrong(plain, blocksize=48), "blocksize is 48"),
        (wrong(plain, code=plain.code[:8]), r"code is \(8,\)"),
        (wrong(plain, packed=plain.packed[:-1]), "packed holds 255 bytes; 512 values need 256"),
        (wrong(plain, absmax=plain.absmax[:-1]), "absmax has 7 values"),
        (wrong(plain, absmax=double.absmax), "in torch.uint8; .* need 8 in torch.float32"),
        (wrong(double, nested=None), "need 8 in torch.float32"),
        (wrong(double, absmax=plain.absmax), "need 8 in torch.uint8 with nested scales"),
        (
            wrong(double, nested=NestedScales(torch.ones(2), nested.code, nested.offset, 256)),
            "nested.absmax has 2 values",
        ),
        (wrong(double, nested=NestedScales(nested.absmax, nested.code[:9], nested.offset, 256)), "256 values"),
        (
            wrong(double, nested=NestedScales(nested.absmax, nested.code, nested.offset.double(), 256)),
            "nested.offset is in torch.float64",
        ),
        (wrong(plain, out=torch.empty(8, 63, dtype=torch.bfloat16)), r"out is \(8, 63\)"),
        (wrong(plain, out=torch.empty(8, 64)), "in torch.float32; it must be"),
        (wrong(plain, out=torch.empty(64, 8, dtype=torch.bfloat16).t()), r"strides \(1, 8\)"),
        (wrong(plain, out=torch.empty(8, 128, dtype=torch.bfloat16)[:, ::2]), r"strides \(128, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_compiles_without_a_graph_break(device: torch.device) -> None:
    stored = Stored((16, 96), 64, True, device)
    compiled = torch.compile(lambda: stored.decode(torch.bfloat16), fullgraph=True, backend="eager")
    if device.type == "cpu":  # Dynamo cannot trace the interpreter
        from foak.kernels.backend import forced_backend

        with forced_backend("reference"):
            stored.assert_is(compiled(), torch.bfloat16)
    else:
        stored.assert_is(compiled(), torch.bfloat16)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(device: torch.device) -> None:
    rows, columns = 2**16, 2**15 + 64
    packed = torch.zeros(rows * columns // 2, dtype=torch.uint8, device=device)
    absmax = torch.ones(rows * columns // 64, device=device)
    code = torch.arange(16.0, device=device)
    packed[-32:] = 0x5A
    for width in (columns, columns + 8):
        out = torch.full((rows, width), 7.0, dtype=torch.bfloat16, device=device)
        dequantize_nf4(packed, absmax, code, (rows, columns), out=out[:, :columns])
        assert out[-1, columns - 64 : columns].tolist() == [5.0, 10.0] * 32
        assert out[:-1, :columns].count_nonzero() == 0
        assert (out[:, columns:] == 7).all()


@pytest.mark.gpu
def test_nothing_is_synchronised(device: torch.device) -> None:
    stored = Stored((64, 512), 64, True, device)
    stored.decode(torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stored.decode(torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
