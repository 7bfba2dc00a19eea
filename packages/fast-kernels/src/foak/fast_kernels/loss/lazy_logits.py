"""A tensor that stands for logits which have not been computed.

A language model computes ``logits = lm_head(hidden)``, perhaps scales and soft-caps them, and hands them to the cross
entropy. With a vocabulary of 128k the logits are the largest tensor of the step, and nobody else reads them. So the
head returns a `LazyLogits`: it has the shape, dtype and device of the logits, remembers what was done to them, and

* when a cross entropy consumes it, the loss is computed by `foak.kernels.linear_cross_entropy` without any logits;
* when anything else touches it, the real logits are computed, once, and take its place.

No architecture has to be known for that: whatever a forward does between the head and the loss is either recorded
exactly (scaling, soft-capping, casts, views and slices of the leading dimensions) or done on the real logits.

The head's module is kept, not its weight: both ways go through ``head.__call__``, so that the hooks of FSDP, offloading
and PEFT run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from foak.core import UnsupportedError
from foak.fast_kernels.loss.recorded import METADATA, RECORDED, Op
from foak.fast_kernels.loss.request import HeadRequest, HeadState, LossCall, Sealed, head_parameters


class LazyLogits(torch.Tensor):
    """Logits ``[..., V]`` that are computed when somebody reads them (see the module's text).

    Attributes:
        head: the linear layer whose product this is.
        hidden: its input ``[..., H]``, with the recorded views and slices applied.
        ops: the recorded element-wise steps, in order.
        state: the head's state at the time of the forward.
        row_major: whether the real logits would be contiguous; False where that is not known.

    What was derived from the same product is one family: as soon as one member must be computed all of them are, so
    that whatever is then done to the real tensors finds copies that are copies and views that are views.
    """

    head: nn.Module
    hidden: torch.Tensor
    ops: tuple[Op, ...]
    state: HeadState
    row_major: bool
    _parent: LazyLogits | None
    _replay: Callable[[torch.Tensor], torch.Tensor] | None
    _children: weakref.WeakSet[LazyLogits]
    _hooks: list[Callable[..., Any]]
    _real: torch.Tensor | None
    _consumed: bool
    _watched: bool

    @staticmethod
    def __new__(
        cls,
        head: nn.Module,
        hidden: torch.Tensor,
        state: HeadState,
        dtype: torch.dtype,
        ops: tuple[Op, ...] = (),
        parent: LazyLogits | None = None,
        replay: Callable[[torch.Tensor], torch.Tensor] | None = None,
        row_major: bool = True,
    ) -> LazyLogits:
        """Stand for the logits; nothing is computed or allocated."""
        weight = head.weight
        assert isinstance(weight, torch.Tensor)  # the rule takes no other head
        needs_grad = state.gradients and (hidden.requires_grad or any(p.requires_grad for p in head_parameters(head)))
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], weight.shape[0]),
            dtype=dtype,
            device=hidden.device,
            requires_grad=needs_grad,
        )
        lazy.head, lazy.hidden, lazy.state, lazy.ops = head, hidden, state, ops
        lazy._parent, lazy._replay, lazy._real, lazy.row_major = parent, replay, None, row_major
        lazy._children, lazy._hooks = weakref.WeakSet(), []
        lazy._consumed = lazy._watched = False
        if parent is not None:
            parent._children.add(lazy)
        if needs_grad:
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.register_hook(lazy, _refuse_gradient)  # type: ignore[no-untyped-call]
        return lazy

    __hash__ = object.__hash__

    @property
    def is_computed(self) -> bool:
        """Whether the real logits exist already."""
        return self._real is not None

    @property
    def root(self) -> LazyLogits:
        """The product that these logits were derived from."""
        root = self
        while root._parent is not None:
            root = root._parent
        return root

    def watch(self) -> None:
        """Note that somebody wants to see the gradient that flows into these logits.

        A loss that was taken from them without computing them sends none there; its backward raises from now on.
        """
        self.root._watched = True

    def compute(self) -> torch.Tensor:
        """The real logits, as the plain model would have given them; computed once.

        Raises:
            UnsupportedError: the head's weights have changed since the forward.
        """
        if self._real is None:
            self._refuse_foreign_graph()
            waiting = [self.root]
            while waiting:
                member = waiting.pop()
                member._compute_from_parent()
                waiting.extend(member._children)
        assert self._real is not None
        return self._real

    def _refuse_foreign_graph(self) -> None:
        """Refuse logits that a custom autograd function has returned: its backward would not run."""
        lazy: LazyLogits | None = self
        while lazy is not None and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                foreign = torch.Tensor.grad_fn.__get__(lazy)  # type: ignore[union-attr]
            if foreign is not None:
                raise UnsupportedError(
                    "a custom autograd function was applied to logits that had not been computed, and would be left "
                    "out of the backward: set fast_loss to true or false"
                )
            lazy = lazy._parent

    def _compute_from_parent(self) -> None:
        if self._real is not None:
            return
        with torch.set_grad_enabled(self.state.gradients):
            if self._parent is not None and self._replay is not None:
                assert self._parent._real is not None
                self._real = self._replay(self._parent._real)
            else:
                self._real = self.head(self.hidden, foak_request=Sealed(HeadRequest(self.state)))
        for hook in self._hooks:
            if self._real.requires_grad:
                self._real.register_hook(hook)

    def derive(
        self,
        replay: Callable[[torch.Tensor], torch.Tensor],
        *,
        hidden: torch.Tensor | None = None,
        op: Op | None = None,
        dtype: torch.dtype | None = None,
        gradients: bool = True,
        row_major: bool | None = None,
    ) -> LazyLogits:
        """The lazy result of one recorded step; ``replay`` is that step on real logits."""
        state = replace(self.state, gradients=self.state.gradients and gradients and torch.is_grad_enabled())
        return LazyLogits(
            self.head,
            self.hidden if hidden is None else hidden,
            state,
            self.dtype if dtype is None else dtype,
            self.ops if op is None else (*self.ops, op),
            self,
            replay,
            self.row_major if row_major is None else row_major,
        )

    def scale_and_softcap(self) -> tuple[float, float | None] | None:
        """The recorded steps as ``softcap * tanh(scale * z / softcap)``; None where they are not of that form."""
        scale, after, capped = 1.0, 1.0, False
        for name, value in self.ops:
            if name == "tanh":
                if capped:
                    return None
                capped = True
            elif name == "scale":
                if capped:
                    after *= value
                else:
                    scale *= value
        if not capped:
            return scale, None
        return (scale * after, after) if after > 0 else None

    def cross_entropy(self, call: LossCall) -> torch.Tensor | None:
        """The loss over these logits ``[N, V]`` without computing them; None where that is not possible."""
        form = self.scale_and_softcap()
        if self.is_computed or self.dim() != 2 or call.labels.dim() != 1 or form is None:
            return None
        self._refuse_foreign_graph()
        call = replace(call, logit_scale=form[0], softcap=form[1])
        with torch.set_grad_enabled(self.state.gradients and torch.is_grad_enabled()):
            loss: torch.Tensor = self.head(self.hidden, foak_request=Sealed(HeadRequest(self.state, call)))
        root = self.root
        root._consumed = True
        if loss.requires_grad:
            loss.register_hook(functools.partial(_refuse_if_watched, weakref.ref(root)))  # type: ignore[no-untyped-call]
        return loss

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape and dtype, record what can be recorded, else compute."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.is_computed:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            record = RECORDED.get(func)
            result = NotImplemented if record is None else record(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached by code below Python's tensor functions only: give it the values."""
        args, kwargs = tree_map(_detached, args), tree_map(_detached, kwargs or {})
        return func(*args, **kwargs)


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, LazyLogits) else value


def _detached(value: Any) -> Any:
    return value.compute().detach() if isinstance(value, LazyLogits) else value


def _grad(outputs: Any, inputs: Any, *args: Any, allow_unused: bool | None = None, **kwargs: Any) -> Any:
    """``torch.autograd.grad``, which finds no way from a loss without logits to the logits."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    real_outputs, real_inputs, args, kwargs = tree_map(_computed, (outputs, wanted, args, kwargs))
    differentiate: Callable[..., tuple[torch.Tensor | None, ...]] = torch.autograd.grad
    found = differentiate(real_outputs, real_inputs, *args, allow_unused=True, **kwargs)
    for tensor, gradient in zip(wanted, found, strict=True):
        if gradient is None and isinstance(tensor, LazyLogits) and tensor.root._consumed:
            raise UnsupportedError(_UNSEEN)
    if allow_unused or not any(gradient is None for gradient in found):
        return found
    return differentiate(real_outputs, real_inputs, *args, allow_unused=allow_unused, **kwargs)


_UNSEEN = (
    "a gradient with respect to the logits was asked for, but the loss was computed without them: set fast_loss to "
    "true or false"
)


def _refuse_if_watched(root: weakref.ref[LazyLogits], gradient: torch.Tensor) -> None:
    lazy = root()
    if lazy is not None and lazy._watched:
        raise UnsupportedError(_UNSEEN)


def _refuse_gradient(gradient: torch.Tensor | None) -> None:
    if gradient is None:  # DDP's sink passes on that none has arrived
        return
    raise UnsupportedError(
        "a function outside PyTorch's tensor interface has read the logits and sent a gradient back to them, where it "
        "cannot be passed on: set fast_loss to true or false, or call that function on outputs.logits.clone()"
    )
