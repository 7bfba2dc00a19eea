"""`geglu` against fp64: values and every gradient."""

import itertools
from typing import Literal

import pytest
import torch
from torch import Tensor

from foak.kernels import geglu
from foak.kernels.geglu.reference import geglu_reference
from foak.kernels.testing import LAYOUTS, check_against_fp64, laid_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


APPROXIMATIONS = ("none", "tanh")


def check(gate: Tensor, up: Tensor, approximate: Literal["none", "tanh"] = "none", **options: object) -> None:
    check_against_fp64(
        lambda gate, up: geglu(gate, up, approximate),
        lambda gate, up: geglu_reference(gate, up, approximate),
        [gate, up],
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("length", [1, 70, 300])
@pytest.mark.parametrize(("dtype", "up_dtype"), itertools.product(DTYPES, DTYPES))
def test_values_and_gradients(
    dtype: torch.dtype,
    up_dtype: torch.dtype,
    length: int,
    approximate: Literal["none", "tanh"],
    backend: str,
    device: torch.device,
    poisoned: None,
) -> None:
    gate = leaf(2, 3, length, dtype=dtype, device=device)
    up = leaf(2, 3, length, dtype=up_dtype, device=device, seed=1)
    check(gate, up, approximate)
    assert geglu(gate, up).dtype is torch.promote_types(dtype, up_dtype)


@pytest.mark.parametrize("layout", [*LAYOUTS, "packed"])
@pytest.mark.parametrize("upstream_layout", [*LAYOUTS, "expanded"])
def test_memory_layouts(layout: str, upstream_layout: str, backend: str, device: torch.device, poisoned: None) -> None:
    gate = leaf(2, 5, 24, dtype=torch.bfloat16, device=device).detach()
    up = leaf(2, 5, 24, dtype=torch.bfloat16, device=device, seed=1).detach()
    if layout == "packed":
        gate, up = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
    else:
        gate, up = laid_out(gate, layout), laid_out(up, layout)

    def upstream(_: int, output: Tensor) -> Tensor:
        if upstream_layout == "expanded":
            return torch.full((), 0.75, dtype=output.dtype, device=device).expand(output.shape)
        return laid_out(leaf(*output.shape, dtype=output.dtype, device=device, seed=3).detach(), upstream_layout)

    check(gate.requires_grad_(), up.requires_grad_(), upstream=upstream)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize(("gate_trains", "up_trains"), itertools.product([True, False], repeat=2))
def test_frozen_inputs(
    gate_trains: bool,
    up_trains: bool,
    approximate: Literal["none", "tanh"],
    backend: str,
    device: torch.device,
    poisoned: None,
) -> None:
    gate = leaf(5, 70, dtype=torch.bfloat16, device=device).requires_grad_(gate_trains)
    check(gate, leaf(5, 70, dtype=torch.bfloat16, device=device, seed=1).requires_grad_(up_trains), approximate)


@pytest.mark.parametrize("shape", [(0, 70), (3, 0, 70), (3, 0)])
def test_no_rows(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    gate, up = (torch.empty(shape, device=device, requires_grad=True) for _ in range(2))
    y = geglu(gate, up)
    y.sum().backward()
    assert y.shape == shape
    assert gate.grad is not None
    assert gate.grad.shape == shape


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_magnitudes(
    dtype: torch.dtype, approximate: Literal["none", "tanh"], backend: str, device: torch.device
) -> None:
    """The cube in the approximation and the square in the derivative must not become infinity times zero."""
    gate = torch.tensor([[-1e4, -300.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]], device=device).to(dtype)
    up = leaf(1, 8, dtype=dtype, device=device)
    check(gate.requires_grad_(), up, approximate)


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("length", [1536, 8192, 11008, 14336, 18944])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_of_real_models(
    dtype: torch.dtype, length: int, approximate: Literal["none", "tanh"], device: torch.device
) -> None:
    gate = leaf(333, length, dtype=dtype, device=device)
    check(gate, leaf(333, length, dtype=dtype, device=device, seed=1), approximate)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="geglu: gate has shape"):
        geglu(torch.ones(5, 70), torch.ones(5, 1))


def test_another_approximation_is_refused() -> None:
    with pytest.raises(ValueError, match="geglu: approximate is 'sigmoid'"):
        geglu(torch.ones(5, 70), torch.ones(5, 70), "sigmoid")  # type: ignore[arg-type]
