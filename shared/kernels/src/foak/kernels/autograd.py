"""What the autograd functions of all ops share."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MESSAGE = b"foak's kernels are differentiable once: a second derivative was taken through one of them"

Backward = Callable[..., tuple[Tensor | None, ...]]


def once_differentiable(backward: Backward) -> Backward:
    """Decorator of a backward that cannot be differentiated itself: whoever does so gets an error, not a wrong number.

    `torch.autograd.function.once_differentiable` lets the gradients pass as constants where the upstream gradient
    requires none, which is so for every loss: the second derivative of a gradient penalty would lack a part, silently.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # it is under create_graph=True only
            return found
        refused: Callable[..., Any] = torch._C._functions.DelayedError(_MESSAGE, len(found))
        attached: tuple[Tensor | None, ...] = refused(
            *(None if one is None else one.detach().requires_grad_() for one in found)
        )
        return attached

    return wrapper
