"""Pairs of equal models, one of them accelerated, and what the tests compare between the two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from architectures import ARCHITECTURES, Architecture
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foak.core import AccelerationFramework
from foak.core.report import PatchReport
from foak.fast_kernels.loss.lazy_logits import LazyLogits

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}

FP32_TOLERANCE = 128 * torch.finfo(torch.float32).eps
"""Relative L2 distance of two fp32 computations of a two-layer model that differ in the order of their sums (1.5e-5).

A sum over H = 64 to V = 101 terms carries about ten roundings, a gradient passes about a dozen such sums.
"""


def configuration(**switches: Any) -> dict[str, Any]:
    """A configuration with every kernel where it fits and the loss without logits, but for the given switches."""
    values = {
        "fast_loss": "fused_linear",
        "fast_rms_layernorm": "auto",
        "fast_rope_embeddings": "auto",
        "fast_activation": "auto",
        **switches,
    }
    return {"plugins": {"training": {"fused_ops_and_kernels": values}}}


@dataclass
class Pair:
    """A plain model and its accelerated copy."""

    plain: Any
    fast: Any
    framework: AccelerationFramework
    report: PatchReport

    @property
    def both(self) -> tuple[Any, Any]:
        """Plain first."""
        return self.plain, self.fast


def accelerate(model: nn.Module, **switches: Any) -> AccelerationFramework:
    """Accelerate a model in place; the framework takes it off again."""
    framework = AccelerationFramework(configuration(**switches))
    framework.apply(model)  # type: ignore[arg-type]
    return framework


def pair_of(model: nn.Module, **switches: Any) -> Pair:
    """The model, and a copy of it that is accelerated."""
    fast = copy.deepcopy(model)
    framework = AccelerationFramework(configuration(**switches))
    return Pair(model, fast, framework, framework.apply(fast))  # type: ignore[arg-type]


def pair(architecture: str | Architecture = "Llama", dtype: torch.dtype = torch.float32, **switches: Any) -> Pair:
    """A pair of tiny models of one architecture."""
    found = BY_NAME[architecture] if isinstance(architecture, str) else architecture
    return pair_of(found.build(dtype), **switches)


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 distance; absolute where the reference is zero."""
    wide = reference.detach().double()
    norm = wide.norm()
    return float((value.detach().double() - wide).norm() / (norm if norm > 0 else 1.0))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Each parameter's gradient, copied."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def assert_same_gradients(plain: nn.Module, fast: nn.Module, tolerance: float = FP32_TOLERANCE) -> None:
    """The same parameters have gradients, and each is near the plain one (zero ones are zero)."""
    expected, actual = gradients(plain), gradients(fast)
    assert expected.keys() == actual.keys()
    assert any(gradient is not None for gradient in expected.values())
    for name, reference in expected.items():
        gradient = actual[name]
        assert (reference is None) == (gradient is None), name
        if reference is not None and gradient is not None:
            assert gradient.dtype == reference.dtype, name
            assert distance(gradient, reference) <= tolerance, name


def step(model: nn.Module, batch: Mapping[str, Any], **more: Any) -> torch.Tensor:
    """One forward and backward from zeroed gradients; the loss."""
    model.zero_grad()
    loss: torch.Tensor = model(**batch, **more).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def assert_runs_alike(run: Callable[[Any], Sequence[Any]], architecture: str = "Llama") -> None:
    """The run gives the same tensors, and leaves the same gradients, on a plain and an accelerated model."""
    models = pair(architecture)
    expected, actual = (run(model) for model in models.both)
    for reference, value in zip(expected, actual, strict=True):
        assert distance(torch.as_tensor(value), torch.as_tensor(reference)) <= FP32_TOLERANCE
    if any(parameter.grad is not None for parameter in models.plain.parameters()):
        assert_same_gradients(*models.both)


@contextmanager
def counting_computed() -> Iterator[list[LazyLogits]]:
    """The lazy logits that had to be computed inside the block, once for each time that they were asked to."""
    computed: list[LazyLogits] = []
    original = LazyLogits.compute

    def compute(self: LazyLogits) -> torch.Tensor:
        computed.append(self)
        return original(self)

    with mock.patch.object(LazyLogits, "compute", compute):
        yield computed


class LargestTensor(TorchDispatchMode):
    """Context manager: the number of elements of the largest tensor that an op gave inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and look at what it gives."""
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every module's ``__dict__``, with its registries of children and tensors copied."""
    return {
        name: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        for name, module in model.named_modules()
    }


def assert_untouched(model: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """No module has gained, lost or changed an entry since the snapshot."""
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, attributes in before.items():
        assert after[name].keys() == attributes.keys(), name
        for key, value in attributes.items():
            now = after[name][key]
            if isinstance(value, dict):
                assert now.keys() == value.keys(), (name, key)
                assert all(now[k] is value[k] for k in value), (name, key)
            else:
                assert now is value or (not isinstance(value, torch.Tensor) and now == value), (name, key)
