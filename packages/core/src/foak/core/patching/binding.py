"""One method bound to one module instance, and how it is taken off again.

What is bound is a trampoline: a function of the original's name and signature that calls an implementation found in its
own globals. The indirection is what makes a binding removable when somebody has wrapped it since (accelerate wraps a
model's forward for mixed precision): the wrapper stays, and the trampoline below it leads to the original again.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_MARK = "__foak_binding__"


def _trampoline(self, /, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _implementation(self, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _wrapping_trampoline(self, /, *args, **kwargs):  # type: ignore[no-untyped-def]
    return _implementation(_inner, self, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class _Adapter:
    """Gives a callable that is bound to its module already the shape of a plain function ``f(module, ...)``."""

    def __init__(self, bound: Callable[..., Any]) -> None:
        self.bound = bound

    def __call__(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.bound(*args, **kwargs)


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds the module's own forward.

    accelerate's hooks for ``device_map`` put a dispatching function under ``forward`` and keep the module's own under
    ``_old_forward``; replacing the former would lose the moves between devices.
    """
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def current_function(module: nn.Module, slot: str = "forward") -> Callable[..., Any]:
    """The slot's present content as a plain function ``f(module, ...)``."""
    bound = module.__dict__.get(slot)
    if bound is None:
        function: Callable[..., Any] = type(module).forward
        return function
    if isinstance(bound, types.MethodType) and bound.__self__ is module:
        return bound.__func__
    return _Adapter(bound)


def original_function(module: nn.Module) -> Callable[..., Any]:
    """The forward as a plain function, below what foak has bound on top: what rules recognise a module by."""
    slot = forward_slot(module)
    binding = _binding_on_top(module.__dict__.get(slot))
    if binding is None:
        return current_function(module, slot)
    while True:
        below = _binding_on_top(binding.previous)
        if below is None:
            return binding.previous_function
        binding = below


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that a rule may replace: the class's own; None where somebody has put another on the instance."""
    function = original_function(module)
    return function if function is type(module).forward else None


def binding_of(module: nn.Module) -> Binding | None:
    """The foak binding that is on top of a module's forward, if one is."""
    binding = _binding_on_top(module.__dict__.get(forward_slot(module)))
    return binding if binding is not None and binding.active else None


def _binding_on_top(bound: Any) -> Binding | None:
    """The binding whose outermost function this bound method is (a wrapper may have copied our function's marks)."""
    function = getattr(bound, "__func__", None)
    binding = getattr(function, _MARK, None)
    return binding if isinstance(binding, Binding) and binding.layers[-1] is function else None


@dataclass(eq=False)
class Binding:
    """What was bound on one module.

    Attributes:
        rules: names of the rules that are at work in it.
        active: False once it was taken off (or made a pass-through under somebody's wrapper).
    """

    rules: tuple[str, ...]
    slot: str
    had_instance_attribute: bool
    previous: Any
    previous_function: Callable[..., Any]
    active: bool = True
    layers: list[types.FunctionType] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return self  # a binding belongs to a function, and functions are not copied either

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a foak binding belongs to a living module and cannot be pickled")

    def remove(self, module: nn.Module) -> None:
        """Put back what was there; where the binding was wrapped since, make it a pass-through instead."""
        if not self.active:
            return
        self.active = False
        if _binding_on_top(module.__dict__.get(self.slot)) is self:
            self._put_back(module)
        else:
            for layer in self.layers:
                wraps = "_inner" in layer.__globals__
                layer.__globals__["_implementation"] = _call_inner if wraps else self.previous_function

    def _put_back(self, module: nn.Module) -> None:
        previous, had = self.previous, self.had_instance_attribute
        while had:  # what lay below may have been taken off in the meantime
            below = _binding_on_top(previous)
            if below is None or below.active:
                break
            previous, had = below.previous, below.had_instance_attribute
        if had:
            module.__dict__[self.slot] = previous
        else:
            module.__dict__.pop(self.slot, None)


def _call_inner(inner: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return inner(module, *args, **kwargs)


def bind(
    module: nn.Module,
    rules: tuple[str, ...],
    replacement: Callable[..., Any] | None,
    wrappers: list[Callable[..., Any]],
) -> Binding:
    """Bind a forward to one module instance.

    Args:
        module: the instance; its class is not touched.
        rules: names of the rules that contributed.
        replacement: a function ``f(module, ...)`` that takes the forward's place, or None to leave it.
        wrappers: functions ``w(inner, module, ...)``, applied from the first (innermost) to the last.

    Returns:
        The binding, which takes itself off again.
    """
    slot = forward_slot(module)
    had = slot in module.__dict__
    binding = Binding(rules, slot, had, module.__dict__.get(slot), current_function(module, slot))
    signature_of = (
        binding.previous_function if not isinstance(binding.previous_function, _Adapter) else binding.previous
    )
    function: Callable[..., Any] = binding.previous_function
    if replacement is not None:
        function = _make(_trampoline, signature_of, _implementation=replacement)
        binding.layers.append(function)
    for wrapper in wrappers:
        function = _make(_wrapping_trampoline, signature_of, _implementation=wrapper, _inner=function)
        binding.layers.append(function)
    setattr(function, _MARK, binding)
    module.__dict__[slot] = types.MethodType(function, module)
    return binding


def _make(template: Any, like: Callable[..., Any], **names: Any) -> types.FunctionType:
    # no `__name__`: Dynamo looks a global up in the module of that name instead of in these globals where there is one
    namespace = {"__builtins__": builtins, **names}
    function = types.FunctionType(template.__code__, namespace, "forward")
    functools.update_wrapper(function, like)
    function.__dict__.pop(_MARK, None)
    return function
