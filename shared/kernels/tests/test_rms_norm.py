"""`rms_norm` against fp64: values and every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from foak.kernels import rms_norm
from foak.kernels.rms_norm.reference import rms_norm_reference
from foak.kernels.testing import LAYOUTS, assert_close_to_fp64, check_against_fp64, laid_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def check(x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, **options: object) -> None:
    check_against_fp64(
        lambda x, weight: rms_norm(x, weight, eps, offset),
        lambda x, weight: rms_norm_reference(x, weight, eps, offset),
        [x, weight],
        reduction_length=max(x.shape[-1], x.numel() // max(x.shape[-1], 1)),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("length", [2, 70, 128])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "weight_dtype"), itertools.product(DTYPES, DTYPES))
def test_values_and_gradients(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    offset: float,
    length: int,
    backend: str,
    device: torch.device,
    poisoned: None,
) -> None:
    x = leaf(3, 5, length, dtype=dtype, device=device)
    weight = leaf(length, dtype=weight_dtype, device=device, seed=1)
    # A row of two values leaves the gradient little but rounding when eps is small.
    check(x, weight, eps=0.5 if length == 2 else 1e-6, offset=offset)
    assert rms_norm(x, weight).dtype is torch.promote_types(dtype, weight_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_weight(dtype: torch.dtype, backend: str, device: torch.device, poisoned: None) -> None:
    check(leaf(5, 70, dtype=dtype, device=device), None)


@pytest.mark.parametrize("upstream_layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout: str, upstream_layout: str, backend: str, device: torch.device, poisoned: None) -> None:
    x = laid_out(leaf(2, 5, 72, dtype=torch.bfloat16, device=device).detach(), layout).requires_grad_()
    weight = laid_out(leaf(72, dtype=torch.bfloat16, device=device).detach(), "every_second").requires_grad_()

    def upstream(_: int, output: Tensor) -> Tensor:
        if upstream_layout == "expanded":
            return leaf(72, dtype=output.dtype, device=device, seed=3).detach().expand(output.shape)
        return laid_out(leaf(*output.shape, dtype=output.dtype, device=device, seed=3).detach(), upstream_layout)

    check(x, weight, upstream=upstream)


def test_one_row_expanded_to_many(backend: str, device: torch.device) -> None:
    row = leaf(70, dtype=torch.float32, device=device)
    weight = leaf(70, dtype=torch.float32, device=device, seed=1)
    check_against_fp64(
        lambda row, weight: rms_norm(row.expand(4, 70), weight),
        lambda row, weight: rms_norm_reference(row.expand(4, 70), weight, 1e-6),
        [row, weight],
        reduction_length=70,
    )


@pytest.mark.parametrize(("x_trains", "weight_trains"), itertools.product([True, False], repeat=2))
def test_frozen_inputs(x_trains: bool, weight_trains: bool, backend: str, device: torch.device) -> None:
    x = leaf(5, 70, dtype=torch.bfloat16, device=device).requires_grad_(x_trains)
    weight = leaf(70, dtype=torch.bfloat16, device=device).requires_grad_(weight_trains)
    check(x, weight)
    assert rms_norm(x, weight).requires_grad is (x_trains or weight_trains)


def test_a_frozen_weight_costs_no_summing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from foak.kernels.rms_norm import triton as kernels

    monkeypatch.setattr(kernels, "sum_partials", None)
    x = leaf(5, 70, dtype=torch.float32, device=device)
    rms_norm(x, leaf(70, dtype=torch.float32, device=device).detach()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("shape", [(0, 70), (3, 0, 70)])
def test_no_rows(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    x = torch.empty(shape, device=device, requires_grad=True)
    weight = leaf(70, dtype=torch.float32, device=device)
    y = rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    assert weight.grad is not None
    assert bool((weight.grad == 0).all())


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e11),
        (torch.bfloat16, 1e11),
        (torch.float16, 1e4),
        (torch.float32, 1e-12),
        (torch.float16, 1e-5),
    ],
)
def test_magnitudes(dtype: torch.dtype, scale: float, backend: str, device: torch.device) -> None:
    """Activations of trained models have a few channels thousands of times larger than the rest."""
    x = leaf(5, 70, dtype=torch.float32, device=device).detach()
    x[:, 3] *= 6
    x = (x * scale).to(dtype).requires_grad_()
    if scale > 1:
        # dx is of the size of 1 / scale, below what fp16 and bf16 gradients can hold: the upstream makes up for it.
        upstream = lambda _, y: (leaf(*y.shape, dtype=torch.float32, device=device, seed=2) * 256).detach().to(y.dtype)
        check(x, leaf(70, dtype=dtype, device=device, seed=1), upstream=upstream)
    else:
        check(x, leaf(70, dtype=dtype, device=device, seed=1), eps=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
def test_rows_walked_in_blocks(
    dtype: torch.dtype,
    frozen: tuple[int, ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
) -> None:
    """The kernels of very long rows, on rows that are long for a smaller block."""
    from foak.kernels.rms_norm import triton as kernels

    monkeypatch.setattr(kernels, "WIDEST_TILE", 32)
    monkeypatch.setattr(kernels, "WIDE_BLOCK", 32)
    x = laid_out(leaf(5, 70, dtype=dtype, device=device).detach(), "sliced").requires_grad_(0 not in frozen)
    weight = leaf(70, dtype=dtype, device=device, seed=1).requires_grad_(1 not in frozen)
    check(x, weight, offset=1.0)
    if not frozen:
        check(x, None)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [576, 4096, 5120, 16384, 16385, 65536, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_of_real_models(dtype: torch.dtype, length: int, device: torch.device) -> None:
    x = leaf(700, length, dtype=dtype, device=device)
    check(x, leaf(length, dtype=dtype, device=device, seed=1))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device: torch.device) -> None:
    x = torch.zeros(2**31 // 4096 + 2, 4096, dtype=torch.bfloat16, device=device)
    x[-1] = leaf(4096, dtype=torch.bfloat16, device=device).detach()
    y = rms_norm(x)
    assert_close_to_fp64(y[-1], rms_norm_reference(x[-1:].double(), None, 1e-6)[0], reduction_length=4096)
    assert not bool(y[0].any())


def test_float64_is_computed_in_float64(device: torch.device) -> None:
    x = torch.randn(5, 70, dtype=torch.float64, device=device, requires_grad=True)
    assert rms_norm(x, torch.ones(70, device=device)).dtype is torch.float64
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None), (x,))


@pytest.mark.parametrize("shape", [(), (1,), (69,), (5, 70)])
def test_a_weight_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rms_norm: weight has shape"):
        rms_norm(torch.ones(5, 70), torch.ones(shape))
