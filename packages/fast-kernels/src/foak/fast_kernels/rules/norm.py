"""RMSNorm and LayerNorm, recognised by structure and told apart by what they compute.

A candidate has at most a weight and a bias, both one-dimensional, an epsilon and no children. Which formula it follows
(mean subtracted or not, ``weight`` or ``1 + weight``, the output in the input's dtype or in the promotion with the
weight's) is found by running its stand-in on a few rows, not by the name of its class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from foak.core.patching import NotApplicable, Rule
from foak.core.patching.binding import own_forward
from foak.core.patching.fp64 import Float64Mode
from foak.core.patching.rule import Case
from foak.core.patching.structure import structure
from foak.core.patching.twin import stand_in
from foak.core.patching.verify import isolated
from foak.fast_kernels.checkpointing.rebuild import rebuildable
from foak.kernels import layer_norm, rms_norm

_MATCH = 1e-9
"""Relative distance in float64 below which a norm follows a formula; two formulas differ by far more."""


@dataclass(frozen=True)
class Formula:
    """How a norm computes.

    Attributes:
        subtracts_mean: LayerNorm, otherwise RMSNorm.
        offset: what is added to the weight: 0 or 1.
        dtype: where input and weight differ, the output has the dtype of the ``input``, of the ``weight``, or PyTorch's
            ``promotion`` of both.
        eps: name of the attribute that holds epsilon.
        argument: name of the forward's one argument.
        parameters: which of ``weight`` and ``bias`` it has. They are read as attributes: FSDP and parametrizations
            take them out of the module's own parameters.
        autocast_widens: the original calls a PyTorch norm, which autocast runs in float32 on accelerators.
    """

    subtracts_mean: bool
    offset: float
    dtype: Literal["input", "weight", "promotion"]
    eps: str
    argument: str
    parameters: tuple[str, ...]
    autocast_widens: bool = False

    def __call__(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute the norm by the kernel; ``x`` is ``[..., H]``."""
        weight: Any = norm.weight if "weight" in self.parameters else None
        bias: Any = norm.bias if "bias" in self.parameters else None
        eps = getattr(norm, self.eps)
        if eps is None:  # torch.nn.RMSNorm's default
            eps = torch.finfo(x.dtype).eps
        return rebuildable(self._compute, x, weight, bias, eps)

    def _compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        if self.autocast_widens and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
            x = x.float()
        if self.subtracts_mean:
            y = layer_norm(x, weight + 1 if self.offset and weight is not None else weight, bias, eps)
        else:
            y = rms_norm(x, weight, eps, self.offset)
        if weight is None or self.dtype == "promotion" or weight.dtype == x.dtype:
            return y
        return y.to(x.dtype if self.dtype == "input" else weight.dtype)


def _epsilon_name(module: nn.Module) -> str | None:
    for name, value in vars(module).items():
        if "eps" in name.lower() and (isinstance(value, float) or (value is None and isinstance(module, nn.RMSNorm))):
            return name
    return None


def match(module: nn.Module) -> str | None:
    """Why a module looks like a norm over the last dimension, or None."""
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm) or module._modules or module._buffers:
        return None
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    if not shapes.keys() <= {"weight", "bias"} or any(len(shape) != 1 for shape in shapes.values()):
        return None
    eps = _epsilon_name(module)
    if eps is None:
        return None
    required = [
        p
        for p in list(inspect.signature(type(module).forward).parameters.values())[1:]
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if len(required) != 1:
        raise NotApplicable(f"a norm whose forward takes more than its input: {', '.join(p.name for p in required)}")
    return f"norm with {' and '.join(shapes) or 'no weight'}"


def _hidden_size(module: nn.Module) -> int:
    for parameter in module._parameters.values():
        if parameter is not None:
            return int(parameter.shape[0])
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, tuple) else 64


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module._parameters.values() if p is not None), torch.float32)


def sample(module: nn.Module) -> Case:
    """A few rows in the weight's dtype."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    x = torch.randn(2, 3, _hidden_size(module), device=device)
    return (x.to(_dtype(module)).requires_grad_(),), {}


def more_samples(module: nn.Module) -> Iterable[Case]:
    """Rows of large values, tiny ones (where epsilon counts), and of another dtype than the weight's."""
    (x,), _ = sample(module)
    yield ((x.detach() * 50 + 3).requires_grad_(),), {}
    yield ((x.detach() * 1e-3).requires_grad_(),), {}
    if not takes_one_dtype(module):
        other = torch.bfloat16 if _dtype(module) == torch.float32 else torch.float32
        yield (x.detach().to(other).requires_grad_(),), {}


def takes_one_dtype(module: nn.Module) -> bool:
    """Whether the original refuses an input whose dtype is not the weight's, as `torch.nn.LayerNorm` does."""
    return isinstance(module, nn.LayerNorm)


class NormRule:
    """Finds each norm's formula once per structure."""

    def __init__(self) -> None:
        self._formulas: dict[Hashable, Formula | None] = {}

    def formula(self, module: nn.Module) -> Formula:
        """The formula that a norm follows; raises `NotApplicable` where it is none that the kernels know."""
        eps = _epsilon_name(module)
        forward = own_forward(module)
        if eps is None or forward is None:
            raise NotApplicable("somebody else has replaced this instance's forward")
        key = structure(module)
        if key not in self._formulas:
            with isolated(torch.device("cpu")):
                self._formulas[key] = _find_formula(module, forward, eps)
        formula = self._formulas[key]
        if formula is None:
            raise NotApplicable("computes neither an RMSNorm nor a LayerNorm over the last dimension")
        return formula

    def build(self, module: nn.Module) -> Callable[..., torch.Tensor]:
        """The replacement of a norm's forward."""
        return _forward_of(self.formula(module))

    def rule(self, name: str, key: str | None, *, subtracts_mean: bool) -> Rule:
        """The rule for one of the two kernels."""

        def match_formula(module: nn.Module) -> str | None:
            try:
                reason = match(module)
                formula = self.formula(module) if reason is not None else None
            except NotApplicable:
                if subtracts_mean:  # one of the two rules speaks for what neither knows
                    return None
                raise
            return reason if formula is not None and formula.subtracts_mean == subtracts_mean else None

        return Rule(
            name=name,
            target="forward",
            match=match_formula,
            sample=sample,
            build=self.build,
            key=key,
            more_samples=more_samples,
        )


@functools.cache
def _forward_of(formula: Formula) -> Callable[..., torch.Tensor]:
    def norm_forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        if len(args) == 1 and not kwargs:
            return formula(self, args[0])
        if not args and len(kwargs) == 1 and formula.argument in kwargs:
            return formula(self, kwargs[formula.argument])
        result: torch.Tensor = type(self).forward(self, *args, **kwargs)  # something more was passed
        return result

    return norm_forward


def _find_formula(module: nn.Module, forward: Callable[..., Any], eps: str) -> Formula | None:
    wide = stand_in(module).to("cpu").double()
    x = torch.randn(3, _hidden_size(module), dtype=torch.float64)
    argument = list(inspect.signature(forward).parameters)[1]
    parameters = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    try:
        with torch.no_grad(), Float64Mode():
            expected = forward(wide, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return None
    for subtracts_mean, offset in ((False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0)):
        formula = Formula(subtracts_mean, offset, "promotion", eps, argument, parameters)
        with torch.no_grad():
            actual = formula(wide, x)
        if (actual - expected).norm() <= _MATCH * expected.norm():
            dtype = _dtype_of_output(module, forward)
            if dtype is None:
                return None
            widens = _calls_a_norm_of_torch(module, forward)
            return replace(formula, dtype=dtype, autocast_widens=widens)
    return None


class _Calls(TorchFunctionMode):
    """Notes the names of the tensor functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _calls_a_norm_of_torch(module: nn.Module, forward: Callable[..., Any]) -> bool:
    with torch.no_grad(), _Calls() as calls:
        forward(stand_in(module).to("cpu").float(), torch.randn(3, _hidden_size(module)))
    return bool(calls.names & {"layer_norm", "native_layer_norm", "rms_norm"})


def _dtype_of_output(module: nn.Module, forward: Callable[..., Any]) -> Literal["input", "weight", "promotion"] | None:
    """What the output's dtype follows, found by trying a narrow input and a narrow weight; None for another way."""

    def tried(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype | None:
        norm = stand_in(module).to("cpu", weight_dtype)
        try:
            with torch.no_grad():
                found: torch.dtype = forward(norm, torch.randn(3, _hidden_size(module)).to(x_dtype)).dtype
        except RuntimeError:  # such as F.layer_norm, which takes one dtype only; then nothing depends on the answer
            return None
        return found

    if not any(True for _ in module.parameters()):
        return "input" if tried(torch.bfloat16, torch.float32) == torch.bfloat16 else None
    narrow_input, narrow_weight = tried(torch.bfloat16, torch.float32), tried(torch.float32, torch.bfloat16)
    if narrow_input in (None, torch.float32) and narrow_weight in (None, torch.float32):
        return "promotion"
    if narrow_input == torch.bfloat16 and narrow_weight in (None, torch.float32):
        return "input"
    if narrow_weight == torch.bfloat16 and narrow_input in (None, torch.float32):
        return "weight"
    return None


def rules(key: str | None) -> list[Rule]:
    """The rules behind ``fast_rms_layernorm``: RMSNorm and LayerNorm."""
    finder = NormRule()
    return [
        finder.rule("rms_norm", key, subtracts_mean=False),
        finder.rule("layer_norm", key, subtracts_mean=True),
    ]
