"""A meter for CPU tensors: counts the bytes of every living storage, as a device's allocator would."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foak.fast_kernels.checkpointing.meter import Reading


class LivingStorages(TorchDispatchMode):
    """Context manager and meter: every storage that an operator made inside the block, until it is freed.

    Gradients count too: the backward of CPU tensors runs in the thread, and so in the mode, that called it.
    """

    def __init__(self, *there: torch.Tensor, limit: int = 2**60) -> None:
        super().__init__()
        self.limit = limit
        self.allocated = self.peak = self.total = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._count(there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it gives."""
        result = func(*args, **(kwargs or {}))
        self._count(result)
        return result

    def read(self) -> Reading:
        """The state now."""
        return Reading(self.allocated, self.peak, self.total)

    def capacity(self) -> int:
        """As much as the test says."""
        return self.limit

    def _count(self, values: Any) -> None:
        for value in tree_iter(values):
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                continue
            self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._free(key, size))
            self.allocated += size
            self.total += size
            self.peak = max(self.peak, self.allocated)

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.allocated -= size
