"""What kept layers compute again instead of keeping: the same bits, less memory, and everything else saved as ever."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budgeted import LAYERS, Run, assert_same_run, budget_of, checkpointed, framework, llama
from storages import LivingStorages
from torch import Tensor
from torch.nn import functional as F

from foak.fast_kernels.checkpointing.rebuild import Slim, can_slim, rebuildable
from foak.kernels import layer_norm, rms_norm, swiglu
from foak.kernels.backend import forced_backend

KERNELS = {"fast_rms_layernorm": True, "fast_activation": True, "fast_loss": "fused_linear"}


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows, a norm's weight, and the weights of gate, up and down."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5, 8), (8,), (12, 8), (12, 8), (8, 12)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def block(x: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A norm and a gated MLP, as a layer calls them."""
    y = rebuildable(rms_norm, x, weight, 1e-6)
    return x + F.linear(rebuildable(swiglu, F.linear(y, gate), F.linear(y, up)), down)


def gradients_of(function: Callable[..., Tensor], *args: Tensor, slim: Slim | None = None) -> list[Tensor]:
    if slim is None:
        loss = function(*args).square().sum()
    else:
        with slim:
            result = function(*args)
        loss = result.square().sum()
        del result
    return list(torch.autograd.grad(loss, args))


def assert_equal(expected: list[Tensor], actual: list[Tensor]) -> None:
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits(dtype: torch.dtype) -> None:
    slim = Slim()
    assert_equal(gradients_of(block, *tensors(dtype)), gradients_of(block, *tensors(dtype), slim=slim))
    assert slim.dropped == 3  # the norm's output in two products, the gated product in one


def test_a_layer_norm_a_view_and_two_backwards() -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        y = rebuildable(layer_norm, x, weight, bias, 1e-5)
        return y[:, 1:].flatten(0, 1) @ down.T + y.flatten(0, 1)[:8] @ down.T

    x, weight, *_, down = tensors()
    inputs = (x, weight, weight.detach().clone().requires_grad_(), down[:, :8].detach().requires_grad_())
    expected = gradients_of(function, *inputs)
    slim = Slim()
    with slim:
        loss = function(*inputs).square().sum()
    assert slim.dropped >= 1
    for _ in range(2):
        assert_equal(expected, list(torch.autograd.grad(loss, inputs, retain_graph=True)))


def test_a_second_derivative() -> None:
    def penalty(slim: Slim | None) -> list[Tensor]:
        inputs = tensors()
        if slim is None:
            result = block(*inputs)
        else:
            with slim:
                result = block(*inputs)
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))

    slim = Slim()
    assert_equal(penalty(None), penalty(slim))
    assert slim.dropped > 0


def test_a_result_that_is_changed_before_it_is_saved_is_saved_as_it_is() -> None:
    def function(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        y = rebuildable(rms_norm, x, weight, 1e-6)
        y.mul_(2)
        return F.linear(y, gate)

    slim = Slim()
    inputs = tensors()[:3]
    assert_equal(gradients_of(function, *inputs), gradients_of(function, *inputs, slim=slim))
    assert slim.dropped == 0


@pytest.mark.parametrize("which", [0, 2], ids=["an input of a recipe", "what is saved as it is"])
def test_a_change_between_forward_and_backward_is_an_error(which: int) -> None:
    inputs = tensors()
    with Slim():
        loss = block(*inputs).square().sum()
    with torch.no_grad():
        inputs[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_address_that_is_used_again_is_no_result() -> None:
    """As many tensors are freed and made: some have the address of a result that is gone."""
    reused: list[bool] = []

    def function(x: Tensor, weight: Tensor) -> Tensor:
        addresses: set[int] = set()
        total = x.sum() * 0
        for factor in range(1, 20):
            y = rebuildable(rms_norm, x, weight, 1e-6)
            addresses.add(y.data_ptr())
            total = total + y.sum()
            del y
            z = x.detach() * factor
            reused.append(z.data_ptr() in addresses)
            total = total + (z * x).sum()  # saves z
        return total

    x, weight = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in [(64, 64), (64,)])
    assert_equal(gradients_of(function, x, weight), gradients_of(function, x, weight, slim=Slim()))
    assert any(reused)


def test_autocast_is_the_forwards() -> None:
    def function(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
        return rebuildable(F.linear, x, weight) @ down

    x, _, gate, _, down = tensors()
    down = down.detach().T[:, :8].contiguous().bfloat16().requires_grad_()
    x = x.detach().bfloat16().requires_grad_()
    found = []
    slim = Slim()
    for context in (None, slim):
        with torch.autocast("cpu", torch.bfloat16):
            if context is None:
                result = function(x, gate, down)
            else:
                with context:
                    result = function(x, gate, down)
        found.append(list(torch.autograd.grad(result.float().square().sum(), (x, gate, down))))
    assert_equal(*found)
    assert slim.dropped == 1


def test_a_result_without_gradients_keeps_its_inputs_from_nobody() -> None:
    x, weight, gate, *_ = tensors()
    frozen, fixed = x.detach(), weight.detach()
    slim = Slim()
    with slim:
        F.linear(rebuildable(rms_norm, frozen, fixed, 1e-6), gate)
    assert slim.dropped == 0


def test_it_is_less_and_nothing_stays() -> None:
    inputs = tensors()

    def grow(slim: Slim | None) -> int:
        before = meter.allocated
        if slim is None:
            result = block(*inputs)
        else:
            with slim:
                result = block(*inputs)
        grown = meter.allocated - before
        result.sum().backward()
        for tensor in inputs:
            tensor.grad = None
        del result
        assert meter.allocated == before
        return grown

    gc.disable()  # nothing may wait for it
    try:
        # Triton's interpreter leaves circles behind, so not by it.
        with forced_backend("reference"), LivingStorages(*inputs) as meter:
            whole, slim = grow(None), grow(Slim())
    finally:
        gc.enable()
    assert whole - slim == 4 * 2 * 5 * (8 + 12)  # the norm's output, the gated product


def test_others_who_pack_tensors_go_first() -> None:
    assert can_slim()
    with torch.autograd.graph.save_on_cpu():
        assert not can_slim()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not can_slim()
    assert torch.func.grad(lambda x: x * (2 if can_slim() else 1))(torch.ones(())) == 1


def test_more_layers_fit_into_a_budget(meter: LivingStorages, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(8, 48)] * 5

    def train(budget: Any) -> Run:
        model = checkpointed(llama())
        framework(budget, **KERNELS).apply(model)
        return Run(model, meter).steps(shapes)

    plain = train(None)
    limit = meter.allocated + (max(plain.peaks) - meter.allocated) + 2 * 2**20
    slim = train(limit / 2**30)
    decision = budget_of(slim.model).decision
    assert decision is not None
    assert decision.slim
    assert max(slim.peaks) <= limit
    with monkeypatch.context() as patch:
        patch.setattr("foak.fast_kernels.checkpointing.budget.can_slim", lambda: False)
        thick = train(limit / 2**30)
    assert thick.kept[-1] < slim.kept[-1] < LAYERS
    for run in (slim, thick):
        assert_same_run(plain, run)
