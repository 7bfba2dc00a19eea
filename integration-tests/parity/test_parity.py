"""Each case of the table trains as plain transformers and PEFT do: losses, gradient norms, gradients, weights.

In fp32 the two may differ by the order of sums alone. In bf16 both are held against the plain training in fp32, from
which foak must be no further away than plain bf16 is, up to a stated bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
import trainings
from cases import AXES, COVERING, EVERY, SWITCHES, Case
from covering import pairs_of
from trainings import STEPS, Training

FP32_TOLERANCE = 128 * torch.finfo(torch.float32).eps
"""Relative, of two fp32 computations of a two-layer model that differ in the order of their sums: a sum over 64 to 101
terms carries about ten roundings, a gradient passes about a dozen such sums. Eight steps add nothing to it: those of
SGD are linear in the gradient."""

BF16_UNIT = 2.0**-9
"""Relative error of one rounding to bf16."""

SAMPLING = 1.5
"""How far two root mean squares of the same rounding noise, over eight steps or more, may lie apart."""

NO_GRADIENT = 1e-3
"""A gradient smaller than this part of all is measured by that part: it may be zero but for rounding (the bias of a
key projection, which softmax does not see)."""

RULES = {
    "norm": {"rms_norm", "layer_norm"},
    "rope": {"rope"},
    "activation": {"swiglu", "geglu"},
    "loss": {"cross_entropy"},
    "loss without logits": {"linear_cross_entropy"},
    "lora": {"lora_linear"},
}


def rms(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares))


def distances(tensors: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], part: float) -> dict[str, float]:
    """Relative L2 distances; of a tensor below `part` of all, relative to that part of all."""
    assert tensors.keys() == reference.keys()
    norms = {name: float(tensor.double().norm()) for name, tensor in reference.items()}
    least = part * math.hypot(*norms.values())
    return {
        name: float((tensors[name].double() - tensor.double()).norm()) / max(norms[name], least)
        for name, tensor in reference.items()
    }


def assert_served(case: Case, training: Training) -> None:
    """What the case switches on is at work: a comparison of nothing shows nothing."""
    assert training.report is not None
    patched = {record.kernel for record in training.report.patched}
    if case.kernels == "all":
        for kernel in SWITCHES:
            if kernel != "loss" and case.has(kernel):
                assert patched & RULES[kernel], kernel
    else:
        assert patched & RULES[case.kernels]
    packed = any(record.rule == "packed_batches" for record in training.report.patched)
    assert packed == (case.padding == "padding-free")


def assert_whole(training: Training) -> None:
    assert len(training.losses) == len(training.norms) == len(training.gradients) == STEPS
    assert all(map(math.isfinite, [*training.losses, *training.norms]))


def assert_equal(fast: Training, plain: Training) -> None:
    for name in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(zip(getattr(fast, name), getattr(plain, name), strict=True)):
            assert abs(ours - theirs) <= FP32_TOLERANCE * theirs, (name, step, ours, theirs)
    for step, (ours, theirs) in enumerate(zip(fast.gradients, plain.gradients, strict=True)):
        for name, distance in distances(ours, theirs, NO_GRADIENT).items():
            assert distance <= FP32_TOLERANCE, (step, name, distance)
    for name, distance in distances(fast.weights, plain.weights, 0.0).items():
        assert distance <= FP32_TOLERANCE, (name, distance)


def assert_no_further(fast: Training, plain: Training, exact: Training) -> None:
    """Of `exact`, the training in fp32."""

    def check(what: str, error: Callable[[Training], float], bit: float, factor: float = SAMPLING) -> None:
        ours, theirs = error(fast), error(plain)
        assert ours <= factor * theirs + bit, f"{what}: {ours:.2e} from fp32, plain bf16 is {theirs:.2e}"

    def relative(name: str) -> Callable[[Training], float]:
        expected = getattr(exact, name)
        return lambda run: rms((x - y) / y for x, y in zip(getattr(run, name), expected, strict=True))

    def of_gradients(run: Training) -> list[dict[str, float]]:
        return [distances(g, e, NO_GRADIENT) for g, e in zip(run.gradients, exact.gradients, strict=True)]

    # a loss is a mean over a dozen tokens or more, each with a logit or two that were rounded
    check("loss", relative("losses"), BF16_UNIT / 8)
    check("gradient norm", relative("norms"), BF16_UNIT)
    check("gradients", lambda run: rms(d for step in of_gradients(run) for d in step.values()), BF16_UNIT)
    # of a single step there is one sample: twice the noise, and one rounding of what comes in and one of what goes out
    for name in exact.gradients[0]:
        check(f"gradient of {name}", lambda run, name=name: of_gradients(run)[0][name], 2 * BF16_UNIT, 2.0)  # type: ignore[misc]
    check("weights", lambda run: rms(distances(run.weights, exact.weights, 0.0).values()), BF16_UNIT / 4)


def check(case: Case) -> None:
    fast = trainings.train(case, fast=True)
    plain = trainings.plain(case.architecture, case.method, case.precision, case.accumulation)
    for training in (fast, plain):
        assert_whole(training)
    assert_served(case, fast)
    if case.precision == "fp32":
        assert_equal(fast, plain)
    else:
        assert_no_further(fast, plain, trainings.plain(case.architecture, case.method, "fp32", case.accumulation))


def test_parity(case: Case, record_property: Callable[[str, object], None]) -> None:
    check(case)
    record_property("counts", {"cases": 1})


@pytest.mark.gpu
def test_parity_on_a_gpu(case: Case, record_property: Callable[[str, object], None]) -> None:
    """The same, compiled: `test_parity` runs on whatever there is, and fails to be a GPU's test where none is."""
    assert torch.cuda.is_available()
    check(case)
    record_property("counts", {"cases on a GPU": 1})


def test_the_covering_cases_hold_every_pair() -> None:
    def pairs(cases: Iterable[Case]) -> set[object]:
        return {pair for case in cases for pair in pairs_of([getattr(case, axis) for axis in AXES])}

    assert pairs(COVERING) == pairs(EVERY)
    assert len(set(COVERING)) == len(COVERING) < len(EVERY) / 50
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in EVERY} == set(values)
