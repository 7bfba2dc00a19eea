"""When in a backward which gradients are allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from foak.fast_kernels.checkpointing.plan import Size, Step


class Gradients:
    """The parameters of a model, by where in the backward their gradients come.

    Args:
        model: the whole model.
        owners: the layer of each segment, in the order of the forward.
        capacity: of the device, in bytes.
    """

    def __init__(self, model: nn.Module, owners: Sequence[nn.Module], capacity: int) -> None:
        self.capacity = capacity
        seen: set[int] = set()

        def unseen(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
            new = [parameter for parameter in parameters if id(parameter) not in seen]
            seen.update(map(id, new))
            return new

        # The backward goes the other way round: a layer that is called twice gets its gradients by its last call.
        self._segments = [unseen(owner.parameters()) for owner in reversed(owners)][::-1]
        tied = {id(parameter) for parameter in _parameters(model, "get_output_embeddings")}
        self._last = unseen(p for p in _parameters(model, "get_input_embeddings") if id(p) not in tied)
        self._others = unseen(model.parameters())

    @property
    def of_each(self) -> list[int]:
        """Bytes of the gradients of each segment, whether there already or not."""
        return [sum(p.nbytes for p in parameters if p.requires_grad) for parameters in self._segments]

    def step(self, start: int, base: float, size: Size) -> Step:
        """What is known of the step ahead, whose backward allocates the gradients that are not there yet."""
        segments = [_missing(parameters) for parameters in self._segments]
        before = _missing(self._others)
        return Step(start, base, size, segments, before, sum(segments) + before + _missing(self._last))


def _missing(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)


def _parameters(model: nn.Module, getter: str) -> list[nn.Parameter]:
    get = getattr(model, getter, None)
    module = get() if callable(get) else None
    return list(module.parameters()) if isinstance(module, nn.Module) else []
