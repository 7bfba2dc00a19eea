"""`lora_linear` and layers that share an input, against fp64 with the same dropout masks: values and gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from foak.kernels import LoraMember, lora_gated_linear, lora_linear, promise_lora_linears
from foak.kernels.lora import concatenation
from foak.kernels.lora.autograd import kernels
from foak.kernels.lora.dropout import keep_mask
from foak.kernels.testing import LAYOUTS, assert_close_to_fp64, evaluate, laid_out, random_upstream, tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROBABILITIES = (0.0, 0.1, 0.5)
SEED = 0x123456789ABCDEF


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device).requires_grad_()


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> int:
    """The seed that the next call draws."""
    monkeypatch.setattr("foak.kernels.lora.autograd.draw_seed", lambda: SEED)
    return SEED


def wide_reference(weights: list[Tensor], scalings: list[float], drops: list[float], biases: list[Tensor | None]):  # type: ignore[no-untyped-def]
    """The definition, for fp64 operands: what PEFT computes, with given masks."""

    def run(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        outputs = []
        for index, (weight, scaling, p, bias) in enumerate(zip(weights, scalings, drops, biases, strict=True)):
            a, b = factors[2 * index : 2 * index + 2]
            kept = rows * keep_mask(SEED, index, *rows.shape, p, x.device) / (1 - p) if p else rows
            y = rows @ weight.double().t() + scaling * (kept @ a.t()) @ b.t()
            outputs.append((y if bias is None else y + bias.double()).view(*x.shape[:-1], -1))
        return tuple(outputs)

    return run


def check(
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
    device: torch.device,
    *,
    shape: tuple[int, ...] = (2, 9, 72),
    sizes: tuple[int, ...] = (40,),
    ranks: tuple[int, ...] = (4,),
    drops: tuple[float, ...] = (0.0,),
    has_bias: bool = False,
    rounds_factors: bool = False,
    layout: str = "contiguous",
) -> None:
    """Outputs and the gradients of x, A and B of layers of the given sizes on one input."""
    length = shape[-1]
    x = laid_out(leaf(*shape, dtype=dtype, device=device, seed=1).detach(), layout).requires_grad_()
    weights = [leaf(o, length, dtype=dtype, device=device, seed=10 + o).detach() for o in sizes]
    biases = [leaf(o, dtype=dtype, device=device, seed=20 + o).detach() if has_bias else None for o in sizes]
    factors = []
    for index, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        factors.append(leaf(rank, length, dtype=factor_dtype, device=device, seed=30 + index, scale=0.5))
        factors.append(leaf(size, rank, dtype=factor_dtype, device=device, seed=40 + index, scale=0.5))
    scalings = [2.0, 0.75, 1.0][: len(sizes)]

    def run(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        members = [
            LoraMember(weight.to, weight.shape[0], factors[2 * i], factors[2 * i + 1], scaling, p, bias)
            for i, (weight, scaling, p, bias) in enumerate(zip(weights, scalings, drops, biases, strict=True))
        ]
        promises = promise_lora_linears(x, members, rounds_factors=rounds_factors)
        return tuple(promise.fulfil() for promise in reversed(promises))[::-1]

    upstream = random_upstream()
    actual = evaluate(run, [x, *factors], upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    reference = wide_reference(weights, scalings, list(drops), biases)
    expected = evaluate(reference, wide, lambda i, _: upstream(i, actual.outputs[i]).double())
    # A factor that is rounded to the narrow dtype, and z and dz likewise, each leave one more rounding in what follows.
    narrow_factors = rounds_factors or factor_dtype is dtype
    for got, want in zip(actual.outputs, expected.outputs, strict=True):
        assert got.dtype is dtype
        assert_close_to_fp64(got, want, reduction_length=length, roundings=4 if narrow_factors else 1)
    for index, (given, got_, want_) in enumerate(zip((x, *factors), actual.gradients, expected.gradients, strict=True)):
        assert got_ is not None
        assert want_ is not None
        assert got_.dtype is given.dtype
        rounded_to = dtype if index == 0 or narrow_factors else None
        # the input's gradient is summed over the layers in the narrow dtype, and the adapters' part is added to it
        roundings = len(sizes) + 4 if index == 0 else 4
        assert_close_to_fp64(
            got_,
            want_,
            reduction_length=max(length, *sizes, x[..., 0].numel()),
            roundings=roundings,
            rounded_to=rounded_to,
            name=f"gradient {index}",
        )


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize(
    ("dtype", "factor_dtype"), [*((d, d) for d in DTYPES), *((d, torch.float32) for d in DTYPES[1:])]
)
def test_values_and_gradients(
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
    p: float,
    backend: str,
    device: torch.device,
    seed: int,
    poisoned: None,
) -> None:
    check(dtype, factor_dtype, device, drops=(p,))


@pytest.mark.parametrize("p", PROBABILITIES)
def test_factors_rounded_as_autocast_does(
    p: float, backend: str, device: torch.device, seed: int, poisoned: None
) -> None:
    check(torch.bfloat16, torch.float32, device, drops=(p,), rounds_factors=True)


@pytest.mark.parametrize("drops", [(0.0, 0.0, 0.0), (0.1, 0.5, 0.0), (0.0, 0.1, 0.1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layers_on_one_input(
    drops: tuple[float, ...], has_bias: bool, backend: str, device: torch.device, seed: int, poisoned: None
) -> None:
    """Of unequal sizes and ranks, fulfilled in another order than promised."""
    check(torch.bfloat16, torch.bfloat16, device, sizes=(40, 8, 72), ranks=(4, 16, 20), drops=drops, has_bias=has_bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts_of_factors_and_bias(layout: str, backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2).detach() for s in [(4, 64), (32, 4)])
    bias = leaf(32, dtype=torch.bfloat16, device=device, seed=3).detach()

    def run(layout: str) -> tuple[Tensor, ...]:
        factors = [laid_out(t, layout).requires_grad_() for t in (a, b)]
        other = bias if layout in ("contiguous", "transposed") else laid_out(bias, layout)
        result = evaluate(lambda x, a, b: lora_linear(x, weight, a, b, 2.0, other), [x, *factors], random_upstream())
        return (*result.outputs, *(g for g in result.gradients if g is not None))

    for got, want in zip(run(layout), run("contiguous"), strict=True):
        assert torch.equal(got, want)


def test_the_range_of_fp16_is_not_that_of_the_products_between(backend: str, device: torch.device) -> None:
    """A large `x @ a.T` beside a small b is finite, and so small a gradient of the output is not lost."""
    x = torch.full((2, 64), 100.0, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.zeros(32, 64, dtype=torch.float16, device=device)
    a = torch.ones(4, 64, device=device, requires_grad=True)
    b = torch.full((32, 4), 1e-4, device=device, requires_grad=True)
    y = lora_linear(x, weight, a, b, 16.0)
    assert_close_to_fp64(y, torch.full_like(y, 16 * 4 * 6400 * 1e-4, dtype=torch.float64), roundings=2)
    upstream = torch.full_like(y, 1e-4)
    da, db = torch.autograd.grad(y, (a, b), upstream)
    dy = upstream.double()
    assert_close_to_fp64(da, 16 * (dy @ b.double()).t() @ x.double(), reduction_length=64)
    assert_close_to_fp64(db, 16 * dy.t() @ (x.double() @ a.double().t()), reduction_length=64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout: str, backend: str, device: torch.device, seed: int, poisoned: None) -> None:
    check(torch.bfloat16, torch.float32, device, drops=(0.5,), layout=layout)


@pytest.mark.parametrize("rows", ["sequence first", "one for all", "overlapping"])
def test_strides_that_say_nothing_of_the_rows(rows: str, backend: str, device: torch.device) -> None:
    """A batch of one with its sequence first, whose dimension of size 1 has any stride; rows that share memory."""
    storage = leaf(1, 24, 64, dtype=torch.bfloat16, device=device, seed=0).detach()
    if rows == "sequence first":
        x = storage.transpose(0, 1)
        assert x.is_contiguous()
        assert x.stride(1) != 64
    else:
        x = storage.as_strided((16, 64), (0 if rows == "one for all" else 8, 1))
    weight = leaf(64, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2).detach() for s in [(4, 64), (64, 4)])
    exact = x.double() @ weight.double().t() + x.double() @ a.double().t() @ b.double().t()
    assert_close_to_fp64(lora_linear(x, weight, a, b), exact, reduction_length=64)


@pytest.mark.parametrize("stride", [0, 8, 56])
def test_the_memory_unit_gets_no_rows_that_share_memory(stride: int) -> None:
    x = torch.zeros(64 * 64, dtype=torch.bfloat16)
    weight = x.view(64, 64)
    product = kernels("product_triton")
    assert product.fits(x.as_strided((16, 64), (64, 1)), weight, 16, 1)
    assert not product.fits(x.as_strided((16, 64), (stride, 1)), weight, 16, 1)


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_layer_on_another_device_is_refused(which: str, backend: str, device: torch.device) -> None:
    x = leaf(16, 64, dtype=torch.bfloat16, device=device, seed=0).detach()
    weight = leaf(64, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.bfloat16, device=device, seed=2).detach() for s in [(4, 64), (64, 4)])
    bias = torch.zeros(64, dtype=torch.bfloat16, device=device)
    if which == "weight":
        weight = weight.to("meta")
    else:
        bias = bias.to("meta")
    with pytest.raises(ValueError, match=f"lora_linear: the input is on {x.device}, the layer's {which} on meta"):
        lora_linear(x, weight, a, b, 1.0, bias)


@pytest.mark.parametrize(
    ("shape", "size", "rank"),
    [((1, 8), 8, 1), ((64,), 32, 4), ((3, 7), 5, 3), ((1, 1, 130), 33, 17), ((150, 64), 264, 64)],
)
def test_sizes(
    shape: tuple[int, ...], size: int, rank: int, backend: str, device: torch.device, seed: int, poisoned: None
) -> None:
    """Sizes that fill no tile, whose rows cannot be addressed by the memory unit, and that need several tiles."""
    check(torch.bfloat16, torch.float32, device, shape=shape, sizes=(size,), ranks=(rank,), drops=(0.1,), has_bias=True)


@pytest.mark.parametrize(("parts", "has_bias"), itertools.product([0, 1, 3], [True, False]))
def test_concatenated_operands_give_the_same(parts: int, has_bias: bool, device: torch.device) -> None:
    x, weight = (
        leaf(*s, dtype=torch.bfloat16, device=device, seed=i).detach() for i, s in enumerate([(9, 72), (40, 72)])
    )
    z, b = (leaf(*s, dtype=torch.float32, device=device, seed=i).detach() for i, s in enumerate([(9, 16), (40, 5)]))
    z[:, 5:] = 0
    bias = leaf(40, dtype=torch.bfloat16, device=device, seed=5).detach() if has_bias else None
    y = concatenation.product(x, weight, z, b, bias, parts)
    exact = x.double() @ weight.double().t() + z[:, :5].double() @ b.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_close_to_fp64(y, exact, reduction_length=72, roundings=3 if parts == 1 else 1)


def test_a_small_update_survives_the_rounding(backend: str, device: torch.device) -> None:
    """The sum is rounded once: an update of a tenth of bf16's last place moves the outputs on average by itself."""
    x = leaf(64, 64, dtype=torch.bfloat16, device=device, seed=0).detach()
    weight = leaf(256, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2, scale=0.01).detach() for s in [(4, 64), (256, 4)])
    delta = (x.double() @ a.double().t()) @ b.double().t()
    moved = lora_linear(x, weight, a, b).double() - lora_linear(x, weight, a, torch.zeros_like(b)).double()
    base_first = (x @ weight.t() + (x.float() @ a.t() @ b.t()).bfloat16()).double() - (x @ weight.t()).double()
    kept = float((moved * delta).sum() / (delta * delta).sum())
    lost = float((base_first * delta).sum() / (delta * delta).sum())
    # 16384 outputs of standard deviation 8, delta about 0.002: rounding noise of the two sums leaves 0.2 or so
    assert abs(kept - 1) < 0.5
    assert lost < 0.7


def test_one_narrow_adapter_rounds_no_other(backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0).detach()
    weight = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
    factors = [leaf(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate([(4, 64), (32, 4)] * 2)]
    narrow = [f.detach().bfloat16() for f in factors[2:]]
    members = [LoraMember(weight.to, 32, *factors[:2], 1.0), LoraMember(weight.to, 32, *narrow, 1.0)]
    y = promise_lora_linears(x, members)[0].fulfil()
    upstream = leaf(6, 32, dtype=torch.bfloat16, device=device, seed=7).detach()
    (da,) = torch.autograd.grad(y, factors[0], upstream)
    exact = (upstream.double() @ factors[1].double()).t() @ x.double()
    assert_close_to_fp64(da, exact.detach(), reduction_length=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_another_dtype_than_the_input(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """As under autocast over fp32 hidden states: the output is narrow, the input's gradient is not."""
    x = leaf(6, 64, dtype=torch.float32, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.float32, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    y = lora_linear(x, weight, a, b, dtype=dtype, rounds_factors=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.dtype is dtype
    assert dx.dtype is torch.float32
    exact = x.double() @ weight.double().t() + (x.double() @ a.double().t()) @ b.double().t()
    assert_close_to_fp64(y, exact.detach(), reduction_length=64, roundings=4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic: bool, device: torch.device) -> None:
    """Another formula is traced: PyTorch's own operations, which concatenate the operands."""
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.bfloat16, device=device, seed=2) for s in [(4, 64), (32, 4)])
    torch.compiler.reset()
    compiled = torch.compile(lora_linear, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    upstream = random_upstream()
    actual = evaluate(lambda *t: compiled(t[0], weight, t[1], t[2], 2.0), [x, a, b], upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    definition = wide_reference([weight], [2.0], [0.0], [None])
    expected = evaluate(definition, wide, lambda i, _: upstream(i, actual.outputs[i]).double())
    for got, want in zip((*actual.outputs, *actual.gradients), (*expected.outputs, *expected.gradients), strict=True):
        assert got is not None
        assert want is not None
        # z and its gradient are rounded twice each (before and after the scaling), and so are the sums
        assert_close_to_fp64(got, want, reduction_length=64, roundings=6)


def check_gated(
    dtype: torch.dtype,
    factor_dtype: torch.dtype,
    activation: str,
    p: float,
    device: torch.device,
    *,
    shape: tuple[int, ...] = (2, 9, 72),
    size: int = 40,
    rank: int = 4,
    layout: str = "contiguous",
) -> None:
    length = shape[-1]
    gate, up = (laid_out(leaf(*shape, dtype=dtype, device=device, seed=i).detach(), layout) for i in (1, 2))
    weight = leaf(size, length, dtype=dtype, device=device, seed=3).detach()
    a = leaf(rank, length, dtype=factor_dtype, device=device, seed=4, scale=0.5)
    b = leaf(size, rank, dtype=factor_dtype, device=device, seed=5, scale=0.5)

    def run(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_gated_linear(gate, up, activation, LoraMember(weight.to, size, a, b, 2.0, p))

    def definition(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if activation == "silu":
            h = torch.nn.functional.silu(gate) * up
        else:
            h = torch.nn.functional.gelu(gate, approximate="tanh" if "tanh" in activation else "none") * up
        return wide_reference([weight], [2.0], [p], [None])(h, a, b)[0]

    leaves = [t.requires_grad_() for t in (gate, up, a, b)]
    upstream = random_upstream()
    actual = evaluate(run, leaves, upstream)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = evaluate(definition, wide, lambda i, _: upstream(i, actual.outputs[i]).double())
    # h is rounded, then what the plain layer rounds; dh likewise
    reduction = max(length, size, gate[..., 0].numel())
    for got, want in zip((*actual.outputs, *actual.gradients), (*expected.outputs, *expected.gradients), strict=True):
        assert got is not None
        assert want is not None
        assert_close_to_fp64(got, want, reduction_length=reduction, roundings=6, rounded_to=dtype)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("dtype", "factor_dtype"), [*((d, d) for d in DTYPES), *((d, torch.float32) for d in DTYPES[1:])]
)
def test_behind_a_gated_activation(
    dtype: torch.dtype, factor_dtype: torch.dtype, activation: str, p: float, backend: str, device: torch.device,
    seed: int, poisoned: None,
) -> None:  # fmt: skip
    check_gated(dtype, factor_dtype, activation, p, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "size", "rank"), [((3, 7), 5, 3), ((1, 130), 33, 17), ((150, 64), 64, 40)])
def test_sizes_behind_a_gated_activation(
    shape: tuple[int, ...], size: int, rank: int, layout: str, backend: str, device: torch.device, seed: int,
    poisoned: None,
) -> None:  # fmt: skip
    check_gated(torch.bfloat16, torch.float32, "silu", 0.1, device, shape=shape, size=size, rank=rank, layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "sizes"), [(4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,))])
def test_sizes_of_models(
    length: int, sizes: tuple[int, ...], factor_dtype: torch.dtype, p: float, device: torch.device, seed: int
) -> None:
    count = len(sizes)
    check(
        torch.bfloat16, factor_dtype, device, shape=(1000, length), sizes=sizes, ranks=(16,) * count, drops=(p,) * count
    )


@pytest.mark.gpu
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16])
def test_as_many_rows_as_a_gpu_has_programs_for(factor_dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Where two programs share a row of the thin product; 8192 rows are 128 programs, as in training."""
    sizes = (4096, 1024, 1024)
    check(torch.bfloat16, factor_dtype, device, shape=(8192, 4096), sizes=sizes, ranks=(16,) * 3, drops=(0.1,) * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_model_s_size_behind_a_gated_activation(p: float, activation: str, device: torch.device, seed: int) -> None:
    check_gated(torch.bfloat16, torch.float32, activation, p, device, shape=(1000, 14336), size=4096, rank=16)


def test_tolerance_of_the_tests_is_that_of_the_dtype() -> None:
    assert tolerance(torch.bfloat16, 72) < 0.005
