"""Does a replacement compute what the original computes? Decided by trying both beside a float64 run of the original.

The replacement passes when, for every output and every gradient, its distance to the float64 result is at most
`SLACK` times the original's own distance, or within `ULPS` units of rounding of the tensor's dtype where the original
happens to be nearer than its dtype lets one expect. Dtypes, shapes and which gradients exist must be equal. An original
that is implausibly far from its own float64 run cannot be judged by it, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from foak.core.patching.fp64 import Float64Mode

SLACK = 3.0
ULPS = 4.0
FARTHEST = 0.25
"""Relative distance of an original from its float64 run beyond which that run is of another function."""
_SEED = 20250117


@dataclass(frozen=True)
class Verdict:
    """Whether a replacement may stay, and by what it was judged."""

    passed: bool
    reason: str


@dataclass(frozen=True)
class Trial:
    """One run of a function: its floating outputs, and the gradients of its floating inputs."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Gradients on, autocast off, random generators seeded and put back afterwards."""
    devices = [device] if device.type == "cuda" else []
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type if device.type != "meta" else "cpu", enabled=False),
        torch.device(device),  # whatever the default device is
    ):
        for generator in generators:  # not torch.manual_seed, which seeds every GPU of the process
            generator.manual_seed(_SEED)
        yield


def compare(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    parameters: Sequence[torch.Tensor] = (),
    wide: Callable[..., Any] | None = None,
    wide_parameters: Sequence[torch.Tensor] | None = None,
) -> Verdict:
    """Try an original and its replacement on the same call, values and every gradient.

    Args:
        original: the function to be replaced.
        replacement: what would take its place.
        args: positional arguments; floating tensors that require a gradient are differentiated.
        kwargs: keyword arguments, likewise.
        parameters: further tensors whose gradients count: what both functions read from their module.
        wide: the original on float64 state; the original itself by default.
        wide_parameters: the float64 state, in the order of ``parameters``.

    Returns:
        The verdict, with the larger of the two relative errors in its reason.
    """
    kwargs = kwargs or {}
    try:
        with Float64Mode():
            reference = _run(wide or original, _map(_double, (args, kwargs)), wide_parameters or parameters)
        expected = _run(original, _map(_fresh, (args, kwargs)), parameters)
        again = _run(original, _map(_fresh, (args, kwargs)), parameters)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
        return Verdict(False, f"the original could not be tried: {_first_line(error)}")
    if not _same(expected, again):
        return Verdict(False, "the original gives another result each time, as dropout does")
    try:
        actual = _run(replacement, _map(_fresh, (args, kwargs)), parameters)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
        return Verdict(False, f"the replacement failed where the original works: {_first_line(error)}")
    return _judge(reference, expected, actual)


def _same(first: Trial, second: Trial) -> bool:
    """Whether two runs of one function agree to within rounding."""
    pairs = zip([*first.outputs, *first.gradients], [*second.outputs, *second.gradients], strict=True)
    return all(
        a is None or b is None or not torch.isfinite(a).all() or _relative_l2(b, a) <= ULPS * torch.finfo(a.dtype).eps
        for a, b in pairs
    )


def _judge(reference: Trial, expected: Trial, actual: Trial) -> Verdict:
    if len(expected.outputs) != len(actual.outputs):
        return Verdict(False, f"gives {len(actual.outputs)} tensors where the original gives {len(expected.outputs)}")
    worst, compared = 0.0, False
    pairs = [
        *(("output", *triple) for triple in zip(reference.outputs, expected.outputs, actual.outputs, strict=True)),
        *(
            ("gradient", *triple)
            for triple in zip(reference.gradients, expected.gradients, actual.gradients, strict=True)
        ),
    ]
    for what, exact, old, new in pairs:
        if (old is None) != (new is None):
            return Verdict(False, f"one of the two gives no {what} where the other does")
        if old is None or new is None or exact is None:
            continue
        if old.dtype != new.dtype or old.shape != new.shape:
            return Verdict(
                False,
                f"{what} is {new.dtype} {tuple(new.shape)} where the original's is {old.dtype} {tuple(old.shape)}",
            )
        if new.numel() == 0 or not torch.isfinite(exact).all():
            continue
        compared = compared or what == "output"
        floor = ULPS * torch.finfo(new.dtype).eps
        for distance in (_relative_l2, _relative_max):
            old_error, new_error = distance(old, exact), distance(new, exact)
            worst = max(worst, new_error)
            if not old_error <= FARTHEST:
                return Verdict(False, f"the original's {what} differs from its own float64 run by {old_error:.1e}")
            if not new_error <= max(SLACK * old_error, floor):
                return Verdict(
                    False, f"{what} differs from float64 by {new_error:.1e}, the original's by {old_error:.1e}"
                )
    if not compared:
        return Verdict(False, "no output could be compared")
    return Verdict(True, f"within {worst:.1e} of float64")


def _run(function: Callable[..., Any], call: Any, parameters: Sequence[torch.Tensor]) -> Trial:
    args, kwargs = call
    leaves = [t for t in tree_flatten(call)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves += [p for p in parameters if p.requires_grad]
    outputs = [
        t
        for t in tree_flatten(function(*args, **kwargs))[0]
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    ]
    differentiable = [t for t in outputs if t.requires_grad]
    if not leaves or not differentiable:
        return Trial([t.detach() for t in outputs], [None] * len(leaves))
    generator = torch.Generator("cpu").manual_seed(_SEED)
    # quarters, which every dtype holds exactly: all runs differentiate with the same upstream gradient
    quarters = (torch.randint(-8, 9, t.shape, generator=generator, device="cpu") / 4 for t in differentiable)
    upstream = [values.to(t.device, t.dtype) for values, t in zip(quarters, differentiable, strict=True)]
    gradients = torch.autograd.grad(differentiable, leaves, upstream, allow_unused=True)
    return Trial([t.detach() for t in outputs], list(gradients))


def _map(function: Callable[[Any], Any], call: Any) -> Any:
    return tree_map(function, call)


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return _fresh(value)


def _relative_l2(value: torch.Tensor, exact: torch.Tensor) -> float:
    norm = exact.double().norm()
    return float((value.double() - exact.double()).norm() / norm.clamp(min=torch.finfo(torch.float64).tiny))


def _relative_max(value: torch.Tensor, exact: torch.Tensor) -> float:
    if value.numel() == 0:
        return 0.0
    scale = exact.double().abs().max()
    return float((value.double() - exact.double()).abs().max() / scale.clamp(min=torch.finfo(torch.float64).tiny))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
