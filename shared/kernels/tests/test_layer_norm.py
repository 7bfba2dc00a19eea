"""`layer_norm` against fp64: values and every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from foak.kernels import layer_norm
from foak.kernels.layer_norm.reference import layer_norm_reference
from foak.kernels.testing import LAYOUTS, check_against_fp64, laid_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6, **options: object) -> None:
    check_against_fp64(
        lambda x, weight, bias: layer_norm(x, weight, bias, eps),
        lambda x, weight, bias: layer_norm_reference(x, weight, bias, eps),
        [x, weight, bias],
        reduction_length=max(x.shape[-1], x.numel() // max(x.shape[-1], 1)),
        **options,  # type: ignore[arg-type]
    )


def layer_norm_reference64(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm_reference(x, weight, bias, 1e-5)


@pytest.mark.parametrize("length", [3, 70, 128])
@pytest.mark.parametrize(("dtype", "parameter_dtype"), itertools.product(DTYPES, DTYPES))
def test_values_and_gradients(
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    length: int,
    backend: str,
    device: torch.device,
    poisoned: None,
) -> None:
    x = leaf(3, 5, length, dtype=dtype, device=device)
    weight = leaf(length, dtype=parameter_dtype, device=device, seed=1)
    bias = leaf(length, dtype=parameter_dtype, device=device, seed=2)
    # A row of three values leaves the gradient little but rounding when eps is small.
    check(x, weight, bias, eps=0.5 if length == 3 else 1e-6)
    assert layer_norm(x, weight, bias).dtype is torch.promote_types(dtype, parameter_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
def test_without_weight_or_bias(
    has_weight: bool, has_bias: bool, dtype: torch.dtype, backend: str, device: torch.device, poisoned: None
) -> None:
    weight = leaf(70, dtype=dtype, device=device, seed=1) if has_weight else None
    bias = leaf(70, dtype=dtype, device=device, seed=2) if has_bias else None
    check(leaf(5, 70, dtype=dtype, device=device), weight, bias)


def test_weight_and_bias_of_different_dtypes(backend: str, device: torch.device) -> None:
    x = leaf(5, 70, dtype=torch.bfloat16, device=device)
    weight = leaf(70, dtype=torch.bfloat16, device=device, seed=1)
    check(x, weight, leaf(70, dtype=torch.float32, device=device, seed=2))


@pytest.mark.parametrize("upstream_layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout: str, upstream_layout: str, backend: str, device: torch.device, poisoned: None) -> None:
    x = laid_out(leaf(2, 5, 72, dtype=torch.bfloat16, device=device).detach(), layout).requires_grad_()
    weight = laid_out(leaf(72, dtype=torch.bfloat16, device=device, seed=1).detach(), "every_second").requires_grad_()
    bias = laid_out(leaf(72, dtype=torch.bfloat16, device=device, seed=2).detach(), "every_second").requires_grad_()

    def upstream(_: int, output: Tensor) -> Tensor:
        if upstream_layout == "expanded":
            return leaf(72, dtype=output.dtype, device=device, seed=3).detach().expand(output.shape)
        return laid_out(leaf(*output.shape, dtype=output.dtype, device=device, seed=3).detach(), upstream_layout)

    check(x, weight, bias, upstream=upstream)


@pytest.mark.parametrize("trains", list(itertools.product([True, False], repeat=3)))
def test_frozen_inputs(trains: tuple[bool, bool, bool], backend: str, device: torch.device) -> None:
    x = leaf(5, 70, dtype=torch.bfloat16, device=device).requires_grad_(trains[0])
    weight = leaf(70, dtype=torch.bfloat16, device=device, seed=1).requires_grad_(trains[1])
    bias = leaf(70, dtype=torch.bfloat16, device=device, seed=2).requires_grad_(trains[2])
    check(x, weight, bias)


@pytest.mark.parametrize("shape", [(0, 70), (3, 0, 70)])
def test_no_rows(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    x = torch.empty(shape, device=device, requires_grad=True)
    weight, bias = (leaf(70, dtype=torch.float32, device=device) for _ in range(2))
    y = layer_norm(x, weight, bias)
    y.sum().backward()
    assert y.shape == shape
    for parameter in (weight, bias):
        assert parameter.grad is not None
        assert bool((parameter.grad == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_far_from_zero(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """A variance taken as the mean square less the squared mean would lose every digit here."""
    x = (leaf(5, 70, dtype=torch.float32, device=device).detach() + 1000).to(dtype).requires_grad_()
    parameters = [leaf(70, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    # What is summed is 1000 times larger than the deviations that are left, and so are its rounding errors.
    check_against_fp64(layer_norm, layer_norm_reference64, [x, *parameters], reduction_length=70 * 1000**2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (1, 2)])
def test_rows_walked_in_blocks(
    dtype: torch.dtype,
    frozen: tuple[int, ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    poisoned: None,
) -> None:
    """The kernels of very long rows, on rows that are long for a smaller block."""
    from foak.kernels.layer_norm import triton as kernels

    monkeypatch.setattr(kernels, "WIDEST_TILE", 32)
    monkeypatch.setattr(kernels, "WIDE_BLOCK", 32)
    x = laid_out(leaf(5, 70, dtype=dtype, device=device).detach(), "sliced").requires_grad_(0 not in frozen)
    weight = leaf(70, dtype=dtype, device=device, seed=1).requires_grad_(1 not in frozen)
    bias = leaf(70, dtype=dtype, device=device, seed=2).requires_grad_(2 not in frozen)
    check(x, weight, bias)
    if not frozen:
        check(x, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [768, 4096, 5120, 16384, 16385, 65536, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_of_real_models(dtype: torch.dtype, length: int, device: torch.device) -> None:
    x = leaf(700, length, dtype=dtype, device=device)
    check(x, leaf(length, dtype=dtype, device=device, seed=1), leaf(length, dtype=dtype, device=device, seed=2))


@pytest.mark.parametrize("shape", [(), (1,), (69,), (5, 70)])
def test_parameters_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer_norm: weight has shape"):
        layer_norm(torch.ones(5, 70), torch.ones(shape))
    with pytest.raises(ValueError, match="layer_norm: bias has shape"):
        layer_norm(torch.ones(5, 70), None, torch.ones(shape))
