"""Who listens to a module: then it must be called, and nothing may be computed in its place."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_listened_to(module: nn.Module | None) -> bool:
    """Whether a module has a hook, or every module has; None stands for a module that is not there."""
    return everyone_is_listened_to() or (module is not None and has_hooks(module))


def everyone_is_listened_to() -> bool:
    """Whether there is a hook that every module runs."""
    everywhere: Any = nn.modules.module
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook of its own."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
