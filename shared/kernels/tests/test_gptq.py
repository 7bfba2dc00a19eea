"""`dequantize_gptq`, bit for bit, against a plain NumPy decode of the format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from foak.kernels import dequantize_gptq
from foak.kernels.gptq.packing import PackedWeight, pack_gptq, round_to_nearest

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def numpy_fields(words: Tensor, bits: int, count: int) -> np.ndarray:
    """The rows of `words` as streams of bits, cut into `count` fields of `bits` bits."""
    stream = np.unpackbits(np.ascontiguousarray(words.cpu().numpy()).view(np.uint8), axis=1, bitorder="little")
    fields = stream[:, : count * bits].reshape(len(stream), count, bits)
    return (fields.astype(np.int64) << np.arange(bits)).sum(2)


def numpy_decode(packed: PackedWeight, bits: int, zero_offset: int = 1) -> np.ndarray:
    """[out_features, in_features] float64, exact: integers of at most 9 bits times scales of at most 24."""
    scales = packed.scales.double().cpu().numpy().T
    groups = packed.g_idx.cpu().numpy()
    codes = numpy_fields(packed.qweight.t(), bits, len(groups))
    zeros = ((numpy_fields(packed.qzeros, bits, len(scales)) + zero_offset) % 2**bits).T
    return (codes - zeros[:, groups]) * scales[:, groups]


@dataclass(frozen=True)
class Format:
    """A way to store a layer of `inputs` x `outputs`."""

    inputs: int
    outputs: int
    group_size: int
    act_order: bool = False
    zero_offset: int = 1
    scale_dtype: torch.dtype = torch.float16

    def pack(self, bits: int, device: torch.device, seed: int = 0) -> PackedWeight:
        """Codes and zeros drawn from all there are, so that the zeros 0 and 2^bits - 1 are among them."""
        generator = torch.Generator().manual_seed(seed)
        size = self.inputs if self.group_size == -1 else self.group_size
        groups = -(-self.inputs // size)
        draw = lambda *shape: torch.randint(2**bits, shape, generator=generator)
        order = torch.randperm(self.inputs, generator=generator) if self.act_order else torch.arange(self.inputs)
        g_idx = torch.empty(self.inputs, dtype=torch.int32)
        g_idx[order] = (torch.arange(self.inputs) // size).to(torch.int32)
        scales = (torch.rand(groups, self.outputs, generator=generator) * 0.02 + 1e-3).to(self.scale_dtype)
        packed = pack_gptq(
            draw(self.outputs, self.inputs), draw(groups, self.outputs), scales, g_idx, bits, self.zero_offset
        )
        return PackedWeight(*(getattr(packed, name).to(device) for name in packed.__dataclass_fields__))


FORMATS = {
    "one group for each tile": Format(256, 96, 128),
    "groups of 64": Format(192, 64, 64),
    "several groups in a tile": Format(160, 64, 32),
    "groups of 16": Format(96, 40, 16),
    "one group": Format(160, 64, -1),
    "groups of an odd size": Format(96, 33, 12),
    "more groups than fit evenly": Format(224, 64, 96),
    "act-order": Format(256, 96, 128, act_order=True),
    "act-order, groups of 32": Format(96, 70, 32, act_order=True),
    "second version": Format(128, 64, 64, zero_offset=0),
    "scales in bfloat16": Format(128, 64, 128, scale_dtype=torch.bfloat16),
    "scales in float32": Format(64, 32, 32, scale_dtype=torch.float32),
    "outputs that fill no word": Format(64, 37, 32),
    "inputs that fill no word": Format(77, 32, 32),
    "a single value": Format(1, 1, -1),
}


def expected(packed: PackedWeight, bits: int, dtype: torch.dtype, zero_offset: int = 1) -> Tensor:
    """Rounded as documented: to fp32, which changes nothing for scales of 16 bits, then to the dtype."""
    return torch.from_numpy(numpy_decode(packed, bits, zero_offset)).float().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_decodes_as_numpy_does(
    bits: int, name: str, dtype: torch.dtype, backend: str, device: torch.device, poisoned: None
) -> None:
    form = FORMATS[name]
    packed = form.pack(bits, device)
    wanted = expected(packed, bits, dtype, form.zero_offset)
    found = dequantize_gptq(
        packed.qweight,
        packed.qzeros,
        packed.scales,
        packed.g_idx if form.act_order else None,
        bits,
        group_size=form.group_size,
        in_features=form.inputs,
        zero_offset=form.zero_offset,
        dtype=dtype,
    )
    assert found.dtype is dtype
    assert found.shape == (form.outputs, form.inputs)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_group_index_in_order_says_what_the_group_size_says(bits: int, backend: str, device: torch.device) -> None:
    packed = Format(192, 48, 64).pack(bits, device)
    by_index = dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, packed.g_idx, bits)
    by_size = dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, None, bits, group_size=64)
    assert torch.equal(by_index, by_size)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_that_is_stored_as_minus_one_is_zero_again(bits: int, backend: str, device: torch.device) -> None:
    """The first version stores zeros less one: 0 becomes the largest value, and must not come back as 2^bits."""
    codes = torch.full((32, 32), 2**bits - 1)
    packed = pack_gptq(codes, torch.zeros(1, 32), torch.ones(1, 32).half(), torch.zeros(32), bits)
    found = dequantize_gptq(
        packed.qweight.to(device), packed.qzeros.to(device), packed.scales.to(device), None, bits, group_size=-1
    )
    assert torch.equal(found.cpu(), codes.half())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("inputs", [128, 77])
def test_writes_into_rows_that_are_part_of_longer_ones(
    inputs: int, act_order: bool, backend: str, device: torch.device
) -> None:
    form = Format(inputs, 40, 32, act_order=act_order)
    packed = form.pack(4, device)
    around = torch.full((42, inputs + 24), 7.0, dtype=torch.bfloat16, device=device)
    out = around[1:-1, 8 : 8 + inputs]
    result = dequantize_gptq(
        packed.qweight, packed.qzeros, packed.scales, packed.g_idx, 4, dtype=torch.bfloat16, out=out
    )
    assert result is out
    assert torch.equal(out.cpu(), expected(packed, 4, torch.bfloat16))
    out.fill_(7.0)
    assert bool((around == 7.0).all())


def test_words_that_do_not_lie_together_are_read_right(backend: str, device: torch.device) -> None:
    packed = Format(64, 64, 32).pack(4, device)
    wide = lambda tensor: torch.cat((tensor, tensor), 1)[:, : tensor.shape[1]]
    found = dequantize_gptq(wide(packed.qweight), wide(packed.qzeros), wide(packed.scales), packed.g_idx, 4)
    assert torch.equal(found.cpu(), expected(packed, 4, torch.float16))


def test_the_result_has_the_dtype_of_the_scales_and_no_gradient(backend: str, device: torch.device) -> None:
    packed = Format(64, 32, 32).pack(4, device)
    scales = packed.scales.requires_grad_()
    found = dequantize_gptq(packed.qweight, packed.qzeros, scales, None, 4, group_size=32)
    assert found.dtype is torch.float16
    assert not found.requires_grad


def test_float64_is_the_exact_value(device: torch.device) -> None:
    packed = Format(64, 32, 32).pack(8, device)
    found = dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, None, 8, group_size=32, dtype=torch.float64)
    assert torch.equal(found.cpu(), torch.from_numpy(numpy_decode(packed, 8)))


@pytest.mark.parametrize("shape", [(0, 32), (64, 0)])
def test_nothing_to_decode(shape: tuple[int, int], backend: str, device: torch.device) -> None:
    inputs, outputs = shape
    groups = -(-inputs // 32)
    empty = lambda *size: torch.empty(size, dtype=torch.int32, device=device)
    found = dequantize_gptq(
        empty(inputs // 8, outputs),
        empty(groups, outputs // 8),
        torch.empty(groups, outputs, dtype=torch.float16, device=device),
        None,
        4,
        group_size=32,
    )
    assert found.shape == (outputs, inputs)


def test_an_input_of_no_group_is_never_read_from_beyond_the_scales(backend: str, device: torch.device) -> None:
    packed = Format(64, 32, 32).pack(4, device)
    for wrong in (-1, 2, 2**30):
        g_idx = packed.g_idx.clone()
        g_idx[5] = wrong
        if backend == "reference" and device.type == "cpu":
            with pytest.raises((IndexError, RuntimeError), match="out of"):
                dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, g_idx, 4)
        elif backend == "triton":
            found = dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, g_idx, 4)
            assert bool(found[:, 5].isnan().all())
            assert torch.equal(found[:, 6:].cpu(), expected(packed, 4, torch.float16)[:, 6:])


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_to_nearest_is_off_by_at_most_a_step(bits: int, sym: bool, act_order: bool) -> None:
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = round_to_nearest(weight, bits, 32, sym=sym, act_order=act_order)
    found = dequantize_gptq(packed.qweight, packed.qzeros, packed.scales, packed.g_idx, bits, dtype=torch.float32)
    step = packed.scales.float().t()[:, packed.g_idx.long()]
    # Half a step; where the grid begins at the group's least value, its zero is rounded to a code as well. The rest is
    # the rounding of the scale to 16 bits, over at most 2^8 steps.
    assert bool(((found - weight).abs() <= step * ((0.5 if sym else 1.0) + 2**8 * 2**-11)).all())
    assert float((found - weight).abs().mean()) < float(step.mean()) * 0.3


WRONG = {
    "bits is 5; allowed are 2, 3, 4 and 8": {"bits": 5},
    "zero_offset is 2; allowed are 0 and 1": {"zero_offset": 2},
    r"qweight is \(8, 31\)": {"qweight": torch.zeros(8, 31, dtype=torch.int32)},
    r"qweight is .*int64; it must be": {"qweight": torch.zeros(8, 32, dtype=torch.int64)},
    r"qzeros is \(3, 4\)": {"qzeros": torch.zeros(3, 4, dtype=torch.int32)},
    r"scales is \(64,\)": {"scales": torch.zeros(64)},
    "scales is .*int32": {"scales": torch.zeros(2, 32, dtype=torch.int32)},
    "scales has 1 groups; 64 inputs in groups of 32 make 2": {"scales": torch.zeros(1, 32)},
    "group_size is 0; without g_idx it is at least 1, or -1": {"group_size": 0},
    "group_size is None": {"group_size": None},
    "g_idx is .*int64; it must be": {"g_idx": torch.zeros(64, dtype=torch.int64)},
    r"qweight is \(8, 32\) .*; it must be \(5, 32\)": {"g_idx": torch.zeros(40, dtype=torch.int32)},
    "dtype is torch.int8": {"dtype": torch.int8},
    r"out is \(32, 65\)": {"out": torch.zeros(32, 65, dtype=torch.float16)},
    "out is .*float32": {"out": torch.zeros(32, 64)},
    "out is .* with strides": {"out": torch.zeros(64, 32, dtype=torch.float16).t()},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused_by_name(message: str) -> None:
    packed = Format(64, 32, 32).pack(4, torch.device("cpu"))
    arguments = {
        "qweight": packed.qweight,
        "qzeros": packed.qzeros,
        "scales": packed.scales,
        "g_idx": None,
        "bits": 4,
        "group_size": 32,
    }
    with pytest.raises(ValueError, match=f"dequantize_gptq: {message}"):
        dequantize_gptq(**{**arguments, **WRONG[message]})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 14336), (14336, 4096), (11008, 4096), (4096, 1024)])
def test_layers_of_real_models(inputs: int, outputs: int, bits: int, act_order: bool, device: torch.device) -> None:
    from foak.kernels.backend import forced_backend

    packed = Format(inputs, outputs, 128, act_order=act_order).pack(bits, device)
    g_idx = packed.g_idx if act_order else None
    arguments = (packed.qweight, packed.qzeros, packed.scales, g_idx, bits)
    found = dequantize_gptq(*arguments, group_size=128, dtype=torch.bfloat16)
    with forced_backend("reference"):
        assert torch.equal(found, dequantize_gptq(*arguments, group_size=128, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_more_than_two_to_the_31_values(device: torch.device) -> None:
    inputs, outputs = 2**15, 2**16 + 64
    words = torch.randint(2**31 - 1, (inputs // 8, outputs), dtype=torch.int32, device=device)
    zeros = torch.full((1, outputs // 8), 0x77777777, dtype=torch.int32, device=device)
    scales = torch.ones(1, outputs, dtype=torch.float16, device=device)
    found = dequantize_gptq(words, zeros, scales, None, 4, group_size=-1)
    tail = dequantize_gptq(
        words[:, -64:].contiguous(), zeros[:, -8:].contiguous(), scales[:, -64:].contiguous(), None, 4, group_size=-1
    )
    assert torch.equal(found[-64:], tail)
