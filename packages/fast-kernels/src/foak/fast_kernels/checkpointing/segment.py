"""One call of a checkpointed layer, and the forward that it belongs to.

Transformers' layers call ``self._gradient_checkpointing_func(run, *args)`` where they are to be checkpointed. Here that
attribute of each instance becomes a `Segment`, which either passes the call on or just runs the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foak.fast_kernels.checkpointing.meter import Reading
from foak.fast_kernels.checkpointing.plan import Size
from foak.fast_kernels.checkpointing.record import Recording

if TYPE_CHECKING:
    from foak.fast_kernels.checkpointing.budget import ActivationBudget


@dataclass(frozen=True)
class Decision:
    """What was decided for the latest forward.

    Attributes:
        kept: how many of the last segments keep their activations.
        segments: how many segments the forward has.
        predicted: upper bound of the peak that the forward and the kept segments' backward bring, in bytes.
        limit: what it was held against, in bytes.
        slim: whether those that keep them drop what is quick to compute again.
    """

    kept: int
    segments: int
    predicted: int
    limit: int
    slim: bool


class Hook:
    """A hook whose copies do nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (_do_nothing,)

    def __call__(self, *args: Any) -> None:
        self.hook(*args)


def _do_nothing(*_: Any) -> None:
    return


def itself(function: Any) -> Any:
    """What a copy of something is made by that has none: gives back its argument."""
    return function


class Segment:
    """Stands in a layer's attribute for the checkpointing function `function`."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, budget: ActivationBudget) -> None:
        self.function, self.module, self.budget = function, module, budget

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the function that it stands for."""
        return itself, (self.function,)

    def keep(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a layer that keeps its activations.

        Reentrant checkpointing sums the gradients that one layer gives to a tensor before it adds them to those of
        other layers (an encoder's output has several uses in each layer of a decoder). So do we, for the rounding.
        """
        if getattr(self.function, "keywords", {}).get("use_reentrant"):
            args = tuple(a.view_as(a) if isinstance(a, Tensor) and a.requires_grad else a for a in args)
        return run(*args)

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer, checkpointed or not."""
        if torch.compiler.is_compiling():
            return self.function(run, *args, **kwargs)
        return self.budget.run(self, run, args, kwargs)


class Recorded:
    """A layer's run, read before and after where it is a recomputation: not at the first call, but at later ones."""

    def __init__(self, run: Callable[..., Any], recording: Recording, index: int) -> None:
        self.run, self.recording, self.index, self.ran = run, recording, index, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.ran:
            self.ran = True
            return self.run(*args, **kwargs)
        meter = self.recording.meter
        self.recording.again[self.index] = meter.read()
        try:
            return self.run(*args, **kwargs)
        finally:  # checkpointing leaves by an exception once it has what it needs
            self.recording.done[self.index] = meter.read()


class Watched:
    """The run of the last checkpointed layer: when it comes again, those behind it have given their memory back."""

    def __init__(self, run: Callable[..., Any], budget: ActivationBudget, forward: Forward) -> None:
        self.run, self.budget, self.forward, self.ran = run, budget, forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ran:
            self.budget.judge(self.forward)
        self.ran = True
        return self.run(*args, **kwargs)


class Forward:
    """One forward of the model, while it runs.

    Attributes:
        start: what was allocated before it.
        alone: whether no earlier forward holds activations that it has kept.
        calls: how many segments have started.
        depth: of the segment that is running: one inside another is none of ours.
        first_kept: the first segment that keeps its activations; None: every segment is checkpointed.
        slim: whether those drop what is quick to compute again.
        dropped: how many tensors they have dropped.
        sizes, owners: of the segments, and the layers that they are calls of.
        recording: of readings, where there is something to learn.
        decision: what was decided, until it has been judged.
    """

    def __init__(self, start: Reading, alone: bool) -> None:
        self.start = start
        self.alone = alone
        self.calls = 0
        self.depth = 0
        self.first_kept: int | None = None
        self.sizes: list[Size] = []
        self.owners: list[nn.Module] = []
        self.slim = False
        self.dropped = 0
        self.recording: Recording | None = None
        self.decision: Decision | None = None
