"""Verification: what a replacement must match, and what trying it may not touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foak.core.patching import Verdict, compare
from foak.core.patching.fp64 import Float64Mode
from foak.core.patching.rebinding import called_global, rebind
from foak.core.patching.twin import parameters_of, stand_in
from foak.core.patching.verify import isolated


def norm(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 33).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_an_equal_function_passes(dtype: torch.dtype) -> None:
    verdict = compare(norm, lambda x: norm(x.clone()), (rows(dtype),))
    assert verdict.passed, verdict.reason


def test_a_more_exact_function_passes_and_a_less_exact_one_does_not() -> None:
    def rounded_twice(x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() * 1.5).bfloat16().to(x.dtype)

    def exact(x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    assert compare(rounded_twice, exact, (rows(),)).passed
    assert not compare(exact, rounded_twice, (rows(),)).passed


@pytest.mark.parametrize("error", [1e-3, 1e-5])
def test_small_differences_in_float32_are_seen(error: float) -> None:
    assert not compare(norm, lambda x: norm(x) * (1 + error), (rows(),)).passed


def test_a_wrong_gradient_is_seen_though_the_values_agree() -> None:
    verdict = compare(norm, lambda x: norm(x.detach()) + 0 * x, (rows(),))
    assert not verdict.passed
    assert "gradient" in verdict.reason


def test_a_missing_gradient_is_seen() -> None:
    weight = torch.randn(33, requires_grad=True)
    verdict = compare(lambda x: x * weight, lambda x: x * weight.detach(), (rows(),), parameters=[weight])
    assert not verdict.passed


def test_another_dtype_or_shape_is_seen() -> None:
    assert "float64" in compare(norm, lambda x: norm(x).double(), (rows(),)).reason
    assert "(33,)" in compare(norm, lambda x: norm(x)[0], (rows(),)).reason
    assert "2 tensors" in compare(norm, lambda x: (norm(x), x), (rows(),)).reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_never_passes(value: float) -> None:
    def poisoned(x: torch.Tensor) -> torch.Tensor:
        y = norm(x).clone()
        y[0, 0] = value
        return y

    assert not compare(norm, poisoned, (rows(),)).passed


def test_one_wrong_element_in_many_is_seen() -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        return norm(x) + torch.zeros_like(x).index_fill(1, torch.tensor([7]), 1e-3)

    torch.manual_seed(0)
    x = torch.randn(64, 4096, requires_grad=True)
    assert not compare(norm, off, (x,)).passed


def test_float64_mode_widens_every_narrow_conversion() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    with Float64Mode():
        assert x.float().dtype == torch.float64
        assert x.to(torch.bfloat16).dtype == torch.float64
        assert x.to(dtype=torch.float16).dtype == torch.float64
        assert x.type(torch.float32).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert x.to(torch.int64).dtype == torch.int64
    assert x.float().dtype == torch.float32


class Block(nn.Module):
    def __init__(self, hidden_size: int, inner: int, **kwargs: Any) -> None:
        super().__init__()
        self.inner = inner
        self.up = nn.Linear(hidden_size, 2 * inner, **kwargs)
        self.down = nn.Linear(inner, hidden_size, bias=False, **kwargs)
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(x).split([self.inner, self.inner], -1)
        return self.down(first * second)


def test_a_stand_in_is_small_and_shares_nothing() -> None:
    block = Block(2048, 6144)
    block.register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    with isolated(torch.device("cpu")):
        twin = stand_in(block)
    assert (twin.up.in_features, twin.up.out_features, twin.down.in_features) == (8, 48, 24)
    assert twin.up.bias is not None
    assert twin.down.bias is None
    assert type(twin).forward(twin, torch.randn(2, 8)).shape == (2, 8)
    storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in twin.parameters()}
    assert block.inner == 6144


def test_a_stand_in_of_a_meta_module_lives_on_the_cpu() -> None:
    with isolated(torch.device("cpu")):
        twin = stand_in(Block(4096, 1024, device="meta", dtype=torch.bfloat16))
    assert {p.device.type for p in twin.parameters()} == {"cpu"}
    assert twin.up.weight.dtype == torch.bfloat16
    assert all(p.requires_grad for p in parameters_of(twin))


def test_isolation_puts_generator_and_modes_back() -> None:
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with isolated(torch.device("cpu")):
            torch.randn(3)
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(state, torch.get_rng_state())


def helper(x: int) -> int:
    return x + 1


def caller(x: int, *, times: int = 2) -> int:
    def inner(y: int) -> int:
        return helper(y)

    return sum(inner(x) for _ in range(times))


def test_rebinding_copies_a_function_and_leaves_it_alone() -> None:
    assert called_global(caller, "helper") is helper
    assert called_global(caller, "no_such_name") is None
    copy = rebind(caller, {"helper": lambda x: x + 100})
    assert copy(1) == 202
    assert copy(1, times=1) == 101
    assert caller(1) == 4
    assert copy.__kwdefaults__ == {"times": 2}
    assert (copy.__name__, copy.__module__) == (caller.__name__, caller.__module__)
    assert not hasattr(copy, "__wrapped__")


def test_verdicts_say_how_near() -> None:
    verdict = compare(norm, norm, (rows(),))
    assert isinstance(verdict, Verdict)
    assert "of float64" in verdict.reason


def test_nothing_compared_is_no_pass() -> None:
    assert not compare(norm, norm, (torch.empty(0, 33, requires_grad=True),)).passed
    assert not compare(lambda x: x.argmax(-1), lambda x: x.argmin(-1), (rows(),)).passed


def test_an_original_that_is_another_function_in_float64_is_not_judged_by_it() -> None:
    def eps_of_dtype(x: torch.Tensor) -> torch.Tensor:
        return x + torch.finfo(x.dtype).bits

    verdict = compare(eps_of_dtype, lambda x: x * 0, (rows(),))
    assert not verdict.passed
    assert "its own float64 run" in verdict.reason


def test_a_random_original_stays() -> None:
    verdict = compare(torch.nn.functional.dropout, lambda x: x, (rows(),))
    assert not verdict.passed
    assert "each time" in verdict.reason


def test_isolation_seeds_no_gpu_generator_but_the_trials_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("every GPU was seeded"))
    with isolated(torch.device("cpu")):
        first = torch.randn(3)
    with isolated(torch.device("cpu")):
        assert torch.equal(first, torch.randn(3))
