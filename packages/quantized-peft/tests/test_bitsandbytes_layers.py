"""The weights of bitsandbytes' layers as fused ops read them: bit for bit what bitsandbytes decodes, or refused."""

from __future__ import annotations

import itertools

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt, LinearFP4, LinearNF4
from torch import Tensor, nn

from foak.kernels.dense_weight import dense_weight_of
from foak.quantized_peft.bitsandbytes.layers import LINEAR_4BIT, LINEAR_8BIT, decode_4bit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STORAGES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


def quantized(
    *shape: int,
    quant_type: str = "nf4",
    nested: bool = True,
    blocksize: int = 64,
    storage: torch.dtype = torch.uint8,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[Tensor, QuantState]:
    """A random weight as bitsandbytes stores it."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    # Where it has no CPU kernel for a shape, bitsandbytes compiles one, for seconds.
    with torch.compiler.set_stance("force_eager"):
        packed, state = quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
        )
    assert state.nested is nested
    return packed, state


def expected(packed: Tensor, state: QuantState, dtype: torch.dtype) -> Tensor:
    """What bitsandbytes decodes into `dtype`."""
    before, state.dtype = state.dtype, dtype
    try:
        return dequantize_4bit(packed, state)
    finally:
        state.dtype = before


def assert_same_bits(actual: Tensor, wanted: Tensor) -> None:
    """Bit equality, but for the sign of zeros: bitsandbytes' decoders of FP4 give its nibble 8 either sign."""
    assert actual.dtype is wanted.dtype
    assert actual.shape == wanted.shape
    integers = torch.int32 if actual.dtype is torch.float32 else torch.int16
    assert torch.equal((actual + 0).view(integers), (wanted + 0).view(integers))


def layer(
    quant_type: str = "nf4",
    compute_dtype: torch.dtype | None = torch.bfloat16,
    bias: bool = False,
    storage: torch.dtype = torch.uint8,
) -> Linear4bit:
    made = Linear4bit(64, 48, bias=bias, compute_dtype=compute_dtype, quant_type=quant_type, quant_storage=storage)
    return made.to("cpu").train()  # moving it is what quantizes it


@pytest.mark.parametrize(("quant_type", "nested"), itertools.product(["nf4", "fp4"], [True, False]))
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_block_sizes_are_decoded_bit_for_bit(quant_type: str, nested: bool, blocksize: int) -> None:
    packed, state = quantized(96, 200, quant_type=quant_type, nested=nested, blocksize=blocksize)
    for dtype in DTYPES:
        assert_same_bits(decode_4bit(packed, state, dtype), expected(packed, state, dtype))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 33), (5, 100), (9, 1000)])
@pytest.mark.parametrize(("quant_type", "nested"), itertools.product(["nf4", "fp4"], [True, False]))
def test_shapes_that_do_not_divide_into_blocks(shape: tuple[int, int], quant_type: str, nested: bool) -> None:
    packed, state = quantized(*shape, quant_type=quant_type, nested=nested)
    for dtype in DTYPES:
        assert_same_bits(decode_4bit(packed, state, dtype), expected(packed, state, dtype))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("turned", [False, True])
def test_storage_dtypes_of_fsdp(storage: torch.dtype, turned: bool) -> None:
    packed, state = quantized(64, 128, storage=storage)
    assert packed.dtype is storage
    found = decode_4bit(packed.t() if turned else packed, state, torch.bfloat16)
    assert_same_bits(found, expected(packed, state, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_quantized_from_every_dtype(dtype: torch.dtype) -> None:
    packed, state = quantized(64, 128, dtype=dtype)
    for wanted in DTYPES:
        assert_same_bits(decode_4bit(packed, state, wanted), expected(packed, state, wanted))


def test_float64_is_the_exact_value_in_fp32() -> None:
    packed, state = quantized(64, 128)
    found = decode_4bit(packed, state, torch.float64, torch.empty(64, 128, dtype=torch.float64))
    assert torch.equal(found, expected(packed, state, torch.float32).double())


@pytest.mark.gpu
@pytest.mark.parametrize(("quant_type", "nested"), itertools.product(["nf4", "fp4"], [True, False]))
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_bitsandbytes_cuda_decode(
    quant_type: str, nested: bool, blocksize: int, storage: torch.dtype
) -> None:
    for shape in ((1024, 4096), (96, 200)):
        packed, state = quantized(
            *shape, quant_type=quant_type, nested=nested, blocksize=blocksize, storage=storage, device="cuda"
        )
        for dtype in DTYPES:
            assert_same_bits(decode_4bit(packed, state, dtype), expected(packed, state, dtype))
            buffer = torch.full((shape[0], shape[1] + 24), 7.0, dtype=dtype, device="cuda")
            out = decode_4bit(packed, state, dtype, buffer[:, : shape[1]])
            assert_same_bits(out, expected(packed, state, dtype))
            assert (buffer[:, shape[1] :] == 7).all()


def test_the_registry_knows_both_layers_and_their_subclasses() -> None:
    assert dense_weight_of(layer()) is LINEAR_4BIT
    assert dense_weight_of(LinearNF4(8, 8)) is LINEAR_4BIT
    assert dense_weight_of(LinearFP4(8, 8)) is LINEAR_4BIT
    assert dense_weight_of(Linear8bitLt(8, 8, has_fp16_weights=False)) is LINEAR_8BIT
    assert dense_weight_of(nn.Linear(8, 8)) is not LINEAR_4BIT


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_layer_is_read_as_its_own_forward_reads_it(quant_type: str, storage: torch.dtype) -> None:
    base = layer(quant_type, torch.float32, storage=storage)
    source = dense_weight_of(base)
    assert source is not None
    assert source.refusal(base) is None
    weight = source.decode(base, torch.float32, None)
    x = torch.eye(64)  # times the unit matrix: the layer's own weight comes out, without any rounding
    assert torch.equal(base(x), weight.t())
    out = torch.zeros(48, 72)
    assert source.decode(base, torch.float32, out[:, :64]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :64], weight)


def test_a_parameter_that_fsdp_has_replaced_is_read_through_the_layer() -> None:
    base = layer(compute_dtype=torch.float32)
    weight = LINEAR_4BIT.decode(base, torch.float32, None)
    base.weight = nn.Parameter(base.weight.data, requires_grad=False)
    assert LINEAR_4BIT.refusal(base) is None
    assert torch.equal(LINEAR_4BIT.decode(base, torch.float32, None), weight)


@pytest.mark.parametrize("given", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_dtype_is_the_layers_own(given: torch.dtype | None, dtype: torch.dtype) -> None:
    base = layer(compute_dtype=given)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = LINEAR_4BIT.product_dtype(base, x)
    seen: list[torch.dtype] = []
    original = bitsandbytes.matmul_4bit

    def spy(a: Tensor, *args: object, **kwargs: object) -> Tensor:
        seen.append(a.dtype)
        result: Tensor = original(a, *args, **kwargs)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitsandbytes, "matmul_4bit", spy)
        assert base(x).dtype is dtype
    assert seen == [found]
    # The first input settles it for those that follow.
    assert LINEAR_4BIT.product_dtype(base, x) is found


def test_what_cannot_be_read_exactly_is_refused_with_the_reason() -> None:
    assert LINEAR_4BIT.refusal(Linear4bit(64, 48)) == "its weight is not quantized yet"
    for change, reason in (
        ({"quant_type": "nf3"}, "unknown 4-bit type nf3"),
        ({"shape": (64, 48)}, r"quantized as (64, 48)"),
        ({"blocksize": 48}, "blocks of 48 values"),
        ({"packing_format_for_cpu": True}, "packed its weight for inference"),
    ):
        base = layer()
        for name, value in change.items():
            setattr(base.weight.quant_state, name, value)
        assert reason in str(LINEAR_4BIT.refusal(base))
    base = layer()
    base.weight.quant_state.state2.absmax = base.weight.quant_state.state2.absmax.half()
    assert "1 values in float16 for scales, but must have 1 in float32" in str(LINEAR_4BIT.refusal(base))
    base = layer()
    base.weight.quant_state.absmax = base.weight.quant_state.absmax[:-1]
    assert "47 values in uint8 for nested scales, but must have 48" in str(LINEAR_4BIT.refusal(base))
    base.weight.quant_state.nested = False
    assert "47 values in uint8 for scales, but must have 48 in float32" in str(LINEAR_4BIT.refusal(base))


def test_int8_is_refused_because_its_inputs_are_rounded_too() -> None:
    base = Linear8bitLt(64, 48, bias=False, has_fp16_weights=False)
    base.load_state_dict(nn.Linear(64, 48, bias=False).state_dict())
    base = base.to("cpu").eval()
    assert "rounds the inputs to 8 bits" in str(LINEAR_8BIT.refusal(base))
    # The refusal says the truth: no dense weight gives this layer's outputs, as it is not linear in its input.
    x, y = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(base(x + y), base(x) + base(y), rtol=0, atol=1e-4)
