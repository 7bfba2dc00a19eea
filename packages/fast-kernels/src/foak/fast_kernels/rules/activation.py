"""Gated MLPs: ``down(act(gate(x)) * up(x))``, recognised by their layers and told apart by what they compute.

A candidate has three linear layers (or two, the first of which gives gate and up packed in its output) and an
activation. Which layer is the gate, how a packed output is split and which activation it is, is found by running the
stand-in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foak.core.patching import NotApplicable, Rule
from foak.core.patching.binding import own_forward
from foak.core.patching.fp64 import Float64Mode
from foak.core.patching.rule import Case
from foak.core.patching.structure import structure
from foak.core.patching.twin import compute_dtype, is_linear_like, linear_sizes, stand_in
from foak.core.patching.verify import isolated
from foak.fast_kernels.checkpointing.rebuild import rebuildable
from foak.fast_kernels.hooks import is_listened_to
from foak.fast_kernels.lora.forward import gated_forward
from foak.kernels import geglu, swiglu

_MATCH = 1e-9
"""Relative distance in float64 below which an MLP follows a formula."""


@dataclass(frozen=True)
class Formula:
    """How a gated MLP computes.

    Attributes:
        gate: name of the gate's layer, or of the packed one.
        up: name of the up layer; None where the gate's layer gives both.
        down: name of the layer that follows.
        gate_first: whether a packed output begins with the gate.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
        argument: name of the forward's one argument.
        skipped: names of the children that the fused forward does not call: the activation's module.
    """

    gate: str
    up: str | None
    down: str
    gate_first: bool
    activation: str
    argument: str
    skipped: tuple[str, ...]

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "swiglu" if self.activation == "silu" else "geglu"

    def __call__(self, mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute the MLP with the fused activation; ``x`` is ``[..., H]``."""
        children = mlp._modules
        gate = children[self.gate](x)  # type: ignore[misc]
        if self.up is not None:
            up = children[self.up](x)  # type: ignore[misc]
        else:
            first, second = gate.chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
        fused = gated_forward(children[self.down], gate, up, self.activation)
        if fused is not None:
            return fused
        if self.activation == "silu":
            hidden = rebuildable(swiglu, gate, up)
        else:
            hidden = rebuildable(geglu, gate, up, "tanh" if self.activation == "gelu_tanh" else "none")
        result: torch.Tensor = children[self.down](hidden)  # type: ignore[misc]
        return result


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None and is_linear_like(child)]


def match(module: nn.Module) -> str | None:
    """Why a module looks like a gated MLP, or None."""
    if type(module).forward is nn.Module.forward or isinstance(module, nn.Sequential):
        return None  # a container
    packed = [n for n, p in module._parameters.items() if p is not None and p.dim() == 3]
    if len(packed) >= 2 and any("down" in n or "w2" in n or "output" in n for n in packed):
        raise NotApplicable(f"packed experts ({', '.join(packed)}): they are one batched product, not an MLP each")
    layers = _layers(module)
    others = [child for name, child in module._modules.items() if child is not None and not is_linear_like(child)]
    if len(layers) not in (2, 3) or any(True for child in others for _ in child.parameters()):
        return None
    if module._parameters or not _shapes(layers):
        return None
    arguments = _arguments(module)
    if sum(argument.default is inspect.Parameter.empty for argument in arguments) != 1:
        return None
    if len(arguments) != 1:
        if len({size for _, layer in layers for size in linear_sizes(layer)}) == 1:
            return None  # query, key and value of an attention
        raise NotApplicable(f"a forward that takes more than its input: {', '.join(a.name for a in arguments)}")
    return f"gated MLP of {', '.join(name for name, _ in layers)}"


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]


def _shapes(layers: list[tuple[str, nn.Module]]) -> bool:
    sizes = [linear_sizes(layer) for _, layer in layers]
    if len(sizes) == 3:
        return any(
            sizes[a] == sizes[b] and sizes[c] == (sizes[a][1], sizes[a][0])
            for a, b, c in ((0, 1, 2), (0, 2, 1), (1, 2, 0))
        )
    (first, second) = sizes
    return first[1] == 2 * second[0] and first[0] == second[1]


def _input_layer(module: nn.Module) -> nn.Module:
    """A layer that takes the MLP's input: with three layers, two of them do."""
    layers = [layer for _, layer in _layers(module)]
    if len(layers) == 2:
        return layers[0]
    return max(layers, key=lambda layer: sum(other.in_features == layer.in_features for other in layers))


def sample(module: nn.Module) -> Case:
    """A few rows, of a size at which the activation is bent."""
    layer = _input_layer(module)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    x = torch.randn(2, 3, linear_sizes(layer)[0], device=device)
    return (x.to(compute_dtype(layer)).requires_grad_(),), {}


def more_samples(module: nn.Module) -> Iterable[Case]:
    """Large values, where a clamp would show; rows without a batch, as shared experts get them."""
    (x,), _ = sample(module)
    yield (x.detach().flatten(0, 1).requires_grad_(),), {}
    for factor in (40, 1000) if x.dtype != torch.float16 else (40,):
        yield ((x.detach() * factor).requires_grad_(),), {}


class ActivationRule:
    """Finds each MLP's formula once per structure."""

    def __init__(self) -> None:
        self._formulas: dict[Hashable, Formula | None] = {}

    def formula(self, module: nn.Module) -> Formula:
        """The formula that an MLP follows; raises `NotApplicable` where it is none that the kernels know."""
        forward = own_forward(module)
        if forward is None:
            raise NotApplicable("somebody else has replaced this instance's forward")
        key = structure(module)
        if key not in self._formulas:
            with isolated(torch.device("cpu")):
                self._formulas[key] = _find_formula(module, forward)
        formula = self._formulas[key]
        if formula is None:
            raise NotApplicable("computes neither silu(gate) * up nor gelu(gate) * up")
        return formula

    def build(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """The replacement of an MLP's forward."""
        return _forward_of(self.formula(module))

    def rule(self, kernel: str, key: str | None) -> Rule:
        """The rule for one of the two kernels: ``swiglu`` or ``geglu``."""

        def match_formula(module: nn.Module) -> str | None:
            try:
                reason = match(module)
                formula = self.formula(module) if reason is not None else None
            except NotApplicable:
                if kernel != "swiglu":  # one of the two rules speaks for what neither knows
                    return None
                raise
            return reason if formula is not None and formula.kernel == kernel else None

        return Rule(
            name=kernel,
            target="forward",
            match=match_formula,
            sample=sample,
            build=self.build,
            key=key,
            more_samples=more_samples,
        )


@functools.cache
def _forward_of(formula: Formula) -> Callable[..., torch.Tensor]:
    def mlp_forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        if not any(is_listened_to(self._modules[name]) for name in formula.skipped):
            if len(args) == 1 and not kwargs:
                return formula(self, args[0])
            if not args and len(kwargs) == 1 and formula.argument in kwargs:
                return formula(self, kwargs[formula.argument])
        result: torch.Tensor = type(self).forward(self, *args, **kwargs)  # somebody listens, or passes something more
        return result

    return mlp_forward


def _candidates(layers: list[tuple[str, nn.Module]]) -> Iterable[tuple[str, str | None, str, bool]]:
    names = [name for name, _ in layers]
    if len(names) == 2:
        for gate_first in (True, False):
            yield names[0], None, names[1], gate_first
        return
    for gate, up, down in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        yield names[gate], names[up], names[down], True


def _find_formula(module: nn.Module, forward: Callable[..., Any]) -> Formula | None:
    wide = stand_in(module).to("cpu").double()
    (x,), _ = sample(wide)
    x = x.detach().double() * 3
    try:
        with torch.no_grad(), Float64Mode():
            expected = forward(wide, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    if not isinstance(expected, torch.Tensor):
        return None
    argument = list(inspect.signature(forward).parameters)[1]
    skipped = tuple(n for n, child in module._modules.items() if child is not None and not is_linear_like(child))
    for gate, up, down, gate_first in _candidates(_layers(module)):
        for activation in ("silu", "gelu", "gelu_tanh"):
            formula = Formula(gate, up, down, gate_first, activation, argument, skipped)
            try:
                with torch.no_grad():
                    actual = formula(wide, x)
            except RuntimeError:  # shapes that do not fit: not this order of layers
                continue
            if actual.shape == expected.shape and (actual - expected).norm() <= _MATCH * expected.norm():
                return formula
    return None


def rules(key: str | None) -> list[Rule]:
    """The rules behind ``fast_activation``: SwiGLU and GeGLU."""
    finder = ActivationRule()
    return [finder.rule("swiglu", key), finder.rule("geglu", key)]
