"""What is asked of an output head when the time has come: its product, or a loss over it, and from which state."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from foak.core import UnsupportedError
from foak.kernels import linear_cross_entropy

_OWN_HOOKS = ("torch.distributed.", "foak.")
"""Packages whose hooks on a head may run once more for the loss: FSDP's gather and free its weight."""


def head_parameters(head: nn.Module) -> list[torch.Tensor]:
    """A head's weight, and its bias if it has one, as they are at this moment.

    They are read as attributes: FSDP and parametrizations take them out of the module's own parameters.
    """
    return [tensor for tensor in (head.weight, head.bias) if isinstance(tensor, torch.Tensor)]


_FEW = 64


def _few_values(parameter: torch.Tensor) -> torch.Tensor | None:
    """A few values of a parameter that trains, spread over its rows; None for a frozen one."""
    if not parameter.requires_grad or parameter.is_meta:
        return None
    values = parameter.detach()
    step = max(1, values.shape[0] // _FEW)
    return (values[::step, :1] if values.dim() == 2 else values[::step]).clone()


def _is_unchanged(
    parameter: torch.Tensor, was: tuple[torch.Tensor, int, torch.Tensor | None], compare_values: bool
) -> bool:
    known, version, values = was
    if parameter is not known or parameter._version != version:
        return False
    if values is None or not compare_values:
        return True
    now = _few_values(parameter)
    return now is not None and torch.equal(now, values)


@dataclass(frozen=True)
class HeadState:
    """The state of a head when its product was asked for: what must be the same when it is computed.

    Attributes:
        parameters: the head's parameters, their versions, and of those that train a few values: some optimizers write
            through ``.data``, which leaves no version behind.
        hidden: the head's input and its version.
        autocast: the dtype of the autocast that was on, or None.
        gradients: whether gradients were recorded.
    """

    parameters: tuple[tuple[torch.Tensor, int, torch.Tensor | None], ...]
    hidden: tuple[torch.Tensor, int]
    autocast: torch.dtype | None
    gradients: bool

    @classmethod
    def of(cls, head: nn.Module, hidden: torch.Tensor) -> HeadState:
        """Read a head's state as it is now."""
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        parameters = tuple((p, p._version, _few_values(p)) for p in head_parameters(head))
        return cls(parameters, (hidden, hidden._version), autocast, torch.is_grad_enabled())

    def check(self, head: nn.Module, *, values: bool) -> None:
        """Refuse to compute from tensors that are no longer those of the forward; raises `UnsupportedError`.

        Args:
            head: the head as it is now.
            values: whether to compare the few remembered values too, which waits for the device.
        """
        hidden, version = self.hidden
        if hidden._version != version:
            raise UnsupportedError(
                "the logits of an earlier forward were read after the hidden states that the output head was given had "
                "been changed in place: read outputs.logits first, or set fast_loss to true or false"
            )
        now = head_parameters(head)
        if len(now) != len(self.parameters) or not all(
            _is_unchanged(parameter, was, values) for parameter, was in zip(now, self.parameters, strict=True)
        ):
            raise UnsupportedError(
                "the logits of an earlier forward were read after the output head's weights had changed or been "
                "resharded: read outputs.logits before the optimizer step, or set fast_loss to true or false"
            )

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """The autocast state of the forward."""
        if device.type == "meta":
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None)


@dataclass(frozen=True)
class LossCall:
    """The arguments of a cross entropy over logits, as `foak.kernels.linear_cross_entropy` takes them."""

    labels: torch.Tensor
    ignore_index: int = -100
    reduction: Literal["mean", "sum", "none"] = "mean"
    num_items_in_batch: torch.Tensor | int | None = None
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadRequest:
    """The private argument with which a head's patched forward is asked to compute, not to postpone.

    Attributes:
        state: what the head must still be.
        loss: the loss to compute from the product; None asks for the product itself.
    """

    state: HeadState
    loss: LossCall | None = None

    def run(self, head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Compute inside the head's forward.

        Args:
            head: a linear layer ``[V, H]``.
            hidden: ``[..., H]``; ``[N, H]`` for a loss.

        Returns:
            The product ``[..., V]``, or the loss.
        """
        self.state.check(head, values=self.loss is None)
        weight, bias = head.weight, head.bias
        assert isinstance(weight, torch.Tensor)
        assert bias is None or isinstance(bias, torch.Tensor)
        with self.state.context(hidden.device):
            if self.loss is None:
                return F.linear(hidden, weight, bias)
            call = self.loss
            loss: torch.Tensor = linear_cross_entropy(
                hidden,
                weight,
                call.labels.to(hidden.device),
                bias,
                ignore_index=call.ignore_index,
                reduction=call.reduction,
                num_items_in_batch=call.num_items_in_batch,
                label_smoothing=call.label_smoothing,
                logit_scale=call.logit_scale,
                softcap=call.softcap,
            )
            return loss


class Sealed:
    """Carries a request through ``head.__call__``: FSDP looks for tensors in dataclasses, and would replace them."""

    __slots__ = ("request",)

    def __init__(self, request: HeadRequest) -> None:
        self.request = request


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is that of a package that expects foak's second call (see `_OWN_HOOKS`)."""
    function = getattr(hook, "func", hook)  # functools.partial
    return str(getattr(function, "__module__", "")).startswith(_OWN_HOOKS)
