"""What the autograd functions of all ops share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MESSAGE = b"foak's kernels are differentiable once: a second derivative was taken through one of them"

_functorch_is_active = torch._C._are_functorch_transforms_active

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorator of a backward that cannot be differentiated itself: whoever does so gets an error, not a wrong number.

    `torch.autograd.function.once_differentiable` lets the gradients pass as constants where the upstream gradient
    requires none, which is so for every loss: the second derivative of a gradient penalty would lack a part, silently.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # it is under create_graph=True only
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        refused: Callable[..., Any] = torch._C._functions.DelayedError(_MESSAGE, len(found))
        attached: tuple[Tensor | None, ...] = refused(
            *(None if one is None else one.detach().requires_grad_() for one in found)
        )
        return attached

    return wrapper


class without_autocast:
    """Context in which autocast casts nothing on devices of one type.

    As `torch.autocast(device_type, enabled=False)`, which takes several microseconds to be made.
    """

    __slots__ = ("_device_type", "_was_enabled")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_enabled(self._device_type)
        if self._was_enabled:
            torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            torch.set_autocast_enabled(self._device_type, True)


def apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """`function.apply(*args)`, without what `torch.autograd.Function` does in Python before each call.

    That looks at every argument for a wrapper that a transform of `torch.func` has left behind, which takes nearly
    half as long as all the rest of a call. Within a transform, and while torch.compile traces, nothing is left out.
    """
    if torch.compiler.is_compiling() or _functorch_is_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
