"""What a layer that keeps its activations need not keep: results that are quick to compute again, bit for bit.

A norm's output is saved by the products that take it, and a gated MLP's product by the one behind it. Their inputs are
saved anyway, by the norm and by the gate. While a layer runs inside `Slim`, autograd is given a `_Recipe` in the place
of such a result, which the backward follows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Running(threading.local):
    layer: Slim | None = None


_running = _Running()


def rebuildable(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, which the layer that is running may compute again instead of keeping it.

    Args:
        function: gives the same bits every time, and saves those tensors for its backward that it is given.
        args: tensors and constants.
    """
    result = function(*args)
    if torch.compiler.is_compiling():
        return result
    layer = _running.layer
    if layer is not None:
        layer.note(result, function, args)
    return result


def can_slim() -> bool:
    """Whether autograd lets tensors be packed here, and nobody else does (a user who moves them to the host)."""
    return (
        not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class Slim:
    """Context of one layer's forward, in which autograd saves recipes instead of results that are `rebuildable`.

    Attributes:
        dropped: how many tensors were not saved.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._recipes: dict[int, _Recipe] = {}  # by the address of the result
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._outer: Slim | None = None

    def __enter__(self) -> Slim:
        self._hooks.__enter__()
        self._outer, _running.layer = _running.layer, self
        return self

    def __exit__(self, *_: object) -> None:
        _running.layer = self._outer
        self._hooks.__exit__()
        self._recipes.clear()  # autograd holds on to the hooks

    def note(self, result: Tensor, function: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        """Remember how a result was made, without keeping it alive."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if (
            type(result) is Tensor
            and result.requires_grad  # otherwise nobody has saved its inputs
            and result.is_contiguous()
            and result.untyped_storage().nbytes() == result.nbytes > 0
            and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
            and all(tensor.dtype == result.dtype for tensor in tensors[:1])  # a cast would have been saved instead
        ):
            self._recipes[result.data_ptr()] = _Recipe(result, function, args)

    def _pack(self, tensor: Tensor) -> _Saved | _Rebuilt:
        if self._recipes and type(tensor) is Tensor and tensor.layout is torch.strided:
            recipe = self._recipes.get(tensor.data_ptr())
            if recipe is not None and recipe.made(tensor):
                self.dropped += 1
                return _Rebuilt(recipe, tensor)
        return _Saved(tensor)


class _Saved:
    """A tensor that is saved as it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # An operator's result must not lead back to the operator that saves it.
        self._tensor = tensor.detach() if type(tensor) is Tensor or not tensor.is_leaf else tensor
        self._version = tensor._version

    def get(self) -> Tensor:
        """The tensor, as long as it has the values that were saved: autograd looks only at what it saves itself."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self._tensor.shape)} is at version {self._tensor._version}; expected version "
                f"{self._version} instead"
            )
        return self._tensor


class _Recipe:
    """How a result was made, and which it was."""

    __slots__ = ("_args", "_autocast", "_dtype", "_function", "_storage", "_version")

    def __init__(self, result: Tensor, function: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = tuple(_Saved(arg) if isinstance(arg, Tensor) else arg for arg in args)
        self._autocast = _autocast(result.device.type)
        self._dtype = result.dtype
        # While this lives, no other storage is at its place and can be mistaken for it.
        self._storage = StorageWeakRef(result.untyped_storage())  # type: ignore[no-untyped-call]
        self._version = result._version

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor is the result or a view of it, unchanged."""
        return (
            tensor.untyped_storage()._cdata == self._storage.cdata
            and tensor._version == self._version
            and tensor.dtype is self._dtype
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def follow(self) -> Tensor:
        """The result once more."""
        args = [arg.get() if isinstance(arg, _Saved) else arg for arg in self._args]
        device_type, dtype, enabled = self._autocast
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if _autocast(device_type) != self._autocast:
            context = torch.autocast(device_type, dtype, enabled, cache_enabled=False)
        with torch.no_grad(), context:
            return self._function(*args)


class _Rebuilt:
    """The result of a recipe, or a view of it, in the place of the tensor itself."""

    __slots__ = ("_offset", "_recipe", "_size", "_stride")

    def __init__(self, recipe: _Recipe, tensor: Tensor) -> None:
        self._recipe = recipe
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def get(self) -> Tensor:
        """The tensor, computed again."""
        return self._recipe.follow().as_strided(self._size, self._stride, self._offset)


def _unpack(saved: _Saved | _Rebuilt) -> Tensor:
    return saved.get()


def _autocast(device_type: str) -> tuple[str, torch.dtype, bool]:
    return device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
