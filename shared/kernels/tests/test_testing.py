"""The comparison itself: what it must not let pass."""

import math

import pytest
import torch

from foak.kernels.testing import LAYOUTS, assert_close_to_fp64, check_against_fp64, evaluate, laid_out, tolerance


def test_tolerance_is_one_rounding_and_the_sum() -> None:
    assert tolerance(torch.bfloat16) == pytest.approx(2**-8 + 8 * 2**-24)
    assert tolerance(torch.float32, 100) == pytest.approx(2**-24 + 80 * 2**-24)
    assert tolerance(torch.float64) < 1e-14


def test_rounding_once_passes_and_twice_as_much_does_not() -> None:
    expected = torch.linspace(1.0, 2.0, 1001, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_close_to_fp64(expected.to(dtype), expected)
        wrong = (expected * (1 + 4 * tolerance(dtype))).to(dtype)
        with pytest.raises(AssertionError, match="relative L2 error"):
            assert_close_to_fp64(wrong, expected)


def test_one_wrong_element_among_many_does_not_pass() -> None:
    expected = torch.ones(1_000_000, dtype=torch.float64)
    actual = expected.to(torch.bfloat16)
    actual[17] += 0.0625
    with pytest.raises(AssertionError, match="largest error"):
        assert_close_to_fp64(actual, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(value: float) -> None:
    actual = torch.ones(3)
    actual[1] = value
    with pytest.raises(AssertionError, match="1 of 3 values are NaN or infinite"):
        assert_close_to_fp64(actual, torch.ones(3, dtype=torch.float64))
    with pytest.raises(AssertionError, match="itself is not finite"):
        assert_close_to_fp64(actual, actual.double())


def test_a_missing_or_detached_gradient_does_not_pass() -> None:
    x = torch.ones(3, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    with pytest.raises(AssertionError, match="gradient of argument 1 is missing"):
        check_against_fp64(lambda x, y: x * y.detach(), lambda x, y: x * y, [x, y])


def test_evaluate_leaves_the_leaves_alone() -> None:
    x = torch.randn(3, 4).t().requires_grad_()
    seen = []
    evaluation = evaluate(lambda x: (seen.append(x.stride()), x * 2)[1], [x], lambda _, output: torch.ones_like(output))
    assert seen == [x.stride()]
    assert x.grad is None
    assert evaluation.gradients[0] is not None
    assert torch.equal(evaluation.gradients[0], torch.full((4, 3), 2.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout: str) -> None:
    tensor = torch.randn(2, 3, 4)
    assert torch.equal(laid_out(tensor, layout), tensor)
    assert laid_out(tensor, layout).is_contiguous() is (layout == "contiguous")
