"""Who listens to a module: then it must be called, and nothing may be computed in its place."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_listened_to(module: nn.Module | None) -> bool:
    """Whether a module has a hook, or every module has; None stands for a module that is not there."""
    everywhere: Any = nn.modules.module
    if (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    ):
        return True
    return module is not None and bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
