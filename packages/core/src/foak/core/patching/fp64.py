"""A mode under which a module's forward runs in float64 throughout.

Many forwards convert to float32 inside, whatever they are given, so that a module converted to float64 would still show
float32's rounding. Under this mode every conversion to a narrower floating dtype becomes one to float64, and every
factory call that asks for a narrower floating dtype gets float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


def _widen(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


class Float64Mode(TorchFunctionMode):
    """Context manager: floating conversions and factories give float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})
