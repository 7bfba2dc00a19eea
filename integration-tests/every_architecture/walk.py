"""Walks one causal language model type of transformers: what foak says about it, does to it, and takes off again.

The report on the meta device (what ``foak explain`` prints); one training step of a model with random weights and one
of its plain copy, compared in loss, logits and every gradient; and the modules after ``restore()``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from tiny_batches import batch_for
from tiny_configs import TinyType, tiny_type
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foak.core import AccelerationFramework
from foak.core.activation import everything_auto
from foak.core.report import PatchReport
from foak.fast_kernels.loss.lazy_logits import LazyLogits
from foak.fast_kernels.plugin import FastKernelsPlugin

_EPS = torch.finfo(torch.float32).eps
SUMS = 64 * _EPS
"""Allowed distance relative to the largest entry of a tensor: some ten sums of some hundred float32 products stand
between it and the weights (two layers, forward and backward): 10 * sqrt(100) roundings of half an eps are 50 eps."""
CANCELLATION = 8 * _EPS
"""Allowed distance relative to the largest gradient of the model, for the few parameters whose gradient is zero but for
rounding (a router whose weights are normalized over the chosen expert, the bias of the keys of an attention)."""


@dataclass
class Step:
    """One training step.

    Attributes:
        loss: the loss, a scalar.
        logits: the logits ``[B, S, V]``, read after the backward.
        gradients: parameter name to its gradient, None where it got none.
    """

    loss: torch.Tensor
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


@dataclass
class LossCount:
    """What became of the lazy logits in one step.

    Attributes:
        fused: losses that were computed without logits.
        computed: times that real logits had to be computed before the step was over.
    """

    fused: int = 0
    computed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one type showed.

    Attributes:
        model_class: name of its class.
        explained: the report on the meta device.
        applied: the report on the CPU.
        meta_operations: the tensor operations that ran on meta tensors during ``apply``.
        random_state_kept: whether ``apply`` left torch's generator alone.
        loss: what became of the lazy logits.
        differences: what differs from the plain step beyond its limit, and by how much.
        traces: ``module.attribute`` that ``restore()`` did not put back.
    """

    model_class: str
    explained: PatchReport
    applied: PatchReport
    meta_operations: frozenset[str]
    random_state_kept: bool
    loss: LossCount
    differences: tuple[str, ...]
    traces: tuple[str, ...]


def differences(plain: Step, accelerated: Step) -> list[str]:
    """Loss, logits and gradients that differ by more than float32 rounding, each with its distance and its limit."""
    largest = max(float(g.abs().max()) for g in plain.gradients.values() if g is not None and g.numel())
    found = [
        _difference("loss", plain.loss, accelerated.loss, 0.0),
        _difference("logits", plain.logits, accelerated.logits, 0.0),
    ]
    for name, gradient in plain.gradients.items():
        found.append(_difference(f"gradient of {name}", gradient, accelerated.gradients[name], CANCELLATION * largest))
    return [difference for difference in found if difference]


def _difference(what: str, plain: torch.Tensor | None, accelerated: torch.Tensor | None, floor: float) -> str:
    if plain is None or accelerated is None:
        return "" if plain is accelerated else f"{what}: exists in one of the two only"
    if plain.shape != accelerated.shape or plain.dtype != accelerated.dtype:
        return f"{what}: {accelerated.dtype} {tuple(accelerated.shape)} for {plain.dtype} {tuple(plain.shape)}"
    if not plain.numel():
        return ""
    distance = float((plain - accelerated).abs().max())
    limit = SUMS * float(plain.abs().max()) + floor
    return "" if distance <= limit else f"{what}: {distance:.1e} apart, {limit:.1e} allowed"


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers' warnings about tiny configurations off, for the extent of a block."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def build(tiny: TinyType, *, device: str = "cpu") -> PreTrainedModel:
    """A model of a type in training mode; on the CPU with random weights, those of the norms included."""
    config = tiny.config()
    torch.manual_seed(0)
    with torch.device(device):
        if tiny.part:  # AutoModelForCausalLM does not find this type's own configuration
            model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[tiny.model_type])
            model = model_class._from_config(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
    if device != "meta":
        _randomize(model)
    return model.train()


def _randomize(model: nn.Module) -> None:
    """Adds noise to every parameter that is one-dimensional or constant: ones and zeros would hide mistakes.

    The noise is a tenth of the parameter's own size, so that a small scale stays small and the step well conditioned.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter.dim() < 2 or bool((parameter == parameter.max()).all())):
                size = float(parameter.abs().mean()) or 1.0
                parameter.add_(torch.randn(parameter.shape, generator=generator) * (size / 10))


def forward_and_backward(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The model's output, and its loss after the backward (a loss over the logits where it has none of its own)."""
    torch.manual_seed(0)
    output = model(**batch)
    if "labels" in batch:
        loss = output.loss
    else:
        loss = F.cross_entropy(output.logits.flatten(0, -2), torch.arange(output.logits.shape[:-1].numel()))
    loss.backward()
    return output, loss.detach()


def step_of(model: PreTrainedModel, batch: dict[str, Any]) -> Step:
    """One training step; the logits are read after the backward."""
    return _as_step(model, *forward_and_backward(model, batch))


def _as_step(model: PreTrainedModel, output: Any, loss: torch.Tensor) -> Step:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(loss, output.logits.detach().clone() + 0, gradients)


@contextmanager
def counting_lazy_logits() -> Iterator[LossCount]:
    """Counts losses without logits, and logits that had to be computed."""
    count = LossCount()
    compute, cross_entropy = LazyLogits.compute, LazyLogits.cross_entropy

    def counting_compute(self: LazyLogits) -> torch.Tensor:
        count.computed += self._parent is None and not self.is_computed
        return compute(self)

    def counting_cross_entropy(self: LazyLogits, call: Any) -> torch.Tensor | None:
        loss = cross_entropy(self, call)
        count.fused += loss is not None
        return loss

    with mock.patch.multiple(LazyLogits, compute=counting_compute, cross_entropy=counting_cross_entropy):
        yield count


class _MetaOperations(TorchDispatchMode):
    """Records the operations that take or give tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            self.names.append(str(func))
        return result


_Attributes = dict[str, dict[str, Any]]


def attributes_of(model: nn.Module) -> _Attributes:
    """Every module's ``__dict__``, with the dictionaries in it copied, so that later changes show."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def changed_attributes(before: _Attributes, after: _Attributes) -> set[str]:
    """``module.attribute`` of what is another object, was added or is gone."""
    changed = set()
    for name in before.keys() | after.keys():
        old, new = before.get(name, {}), after.get(name, {})
        changed |= {f"{name}.{key}" for key in old.keys() | new.keys() if not _same(old.get(key), new.get(key))}
    return changed


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    return old is new or (isinstance(old, int | float | str | tuple | list) and old == new)


def new_framework() -> AccelerationFramework:
    """The framework with every kernel on ``auto``, as ``foak explain`` takes it without a configuration."""
    plugins = (FastKernelsPlugin,)
    return AccelerationFramework({"plugins": everything_auto(plugins)}, plugins=plugins)


def walk(model_type: str) -> Outcome:
    """Explain, step and restore one type; raises what building, foak or the step raises."""
    tiny = tiny_type(model_type)
    with quiet():
        meta_model = build(tiny, device="meta")
        with _MetaOperations() as meta_operations:
            explained = new_framework().apply(meta_model, strict=False)

        plain_model = build(tiny)
        model = copy.deepcopy(plain_model)
        batch = batch_for(tiny, model.config)

        before = attributes_of(plain_model)
        plain = step_of(plain_model, batch)
        changed_by_the_step = changed_attributes(before, attributes_of(plain_model))

        before = attributes_of(model)
        random_state = torch.get_rng_state()
        framework = new_framework()
        applied = framework.apply(model, strict=False)
        random_state_kept = torch.equal(random_state, torch.get_rng_state())
        with counting_lazy_logits() as loss_count:
            output, loss = forward_and_backward(model, batch)
        accelerated = _as_step(model, output, loss)
        framework.restore()
        traces = changed_attributes(before, attributes_of(model)) - changed_by_the_step
    return Outcome(
        type(model).__name__,
        explained,
        applied,
        frozenset(meta_operations.names),
        random_state_kept,
        loss_count,
        tuple(differences(plain, accelerated)),
        tuple(sorted(traces)),
    )
