"""Decides in every forward which of a model's checkpointed layers keep their activations.

Transformers' layers call ``self._gradient_checkpointing_func(run, *args)`` where they are to be checkpointed. Here that
attribute of each instance becomes a `Segment`, which either passes the call on or just runs the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foak.core.patching import ModelPatcher
from foak.fast_kernels.checkpointing.gradients import Gradients
from foak.fast_kernels.checkpointing.limit import show_bytes
from foak.fast_kernels.checkpointing.meter import Meter, Reading, meter_for
from foak.fast_kernels.checkpointing.plan import Profile, Size, most_kept, peak, unavoidable
from foak.fast_kernels.checkpointing.record import Recording
from foak.fast_kernels.checkpointing.structure import holds_scores, sharded_by

FUNCTION = "_gradient_checkpointing_func"
"""The attribute by which transformers' layers reach the checkpointing function."""

ATTRIBUTE = "_foak_activation_budget"
"""Where a model's budget is found: a plain attribute of the module whose forward runs all checkpointed layers."""

MARGIN = 1 / 128
"""The part of a budget that a plan leaves free: memory that rounding and an uneven batch may take."""

RESERVE = 0.94
"""The part of a device's memory that is planned with at most, for the allocator's fragmentation."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What was decided for the latest forward.

    Attributes:
        kept: how many of the last segments keep their activations.
        segments: how many segments the forward has.
        predicted: upper bound of the peak that the forward and the kept segments' backward bring, in bytes.
        limit: what it was held against, in bytes.
    """

    kept: int
    segments: int
    predicted: int
    limit: int


class _Hook:
    """A hook whose copies do nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = hook

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (_do_nothing,)

    def __call__(self, *args: Any) -> None:
        self.hook(*args)


def _do_nothing(*_: Any) -> None:
    return


def _itself(function: Any) -> Any:
    return function


class Segment:
    """Stands in a layer's attribute for the checkpointing function `function`."""

    def __init__(self, function: Callable[..., Any], module: nn.Module, budget: ActivationBudget) -> None:
        self.function, self.module, self.budget = function, module, budget

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the function that it stands for."""
        return _itself, (self.function,)

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer, checkpointed or not."""
        if torch.compiler.is_compiling():
            return self.function(run, *args, **kwargs)
        return self.budget.run(self, run, args, kwargs)


class _Recorded:
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


class _Watched:
    """The run of the last checkpointed layer: when it comes again, those behind it have given their memory back."""

    def __init__(self, run: Callable[..., Any], budget: ActivationBudget, forward: _Forward) -> None:
        self.run, self.budget, self.forward, self.ran = run, budget, forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ran:
            self.budget.judge(self.forward)
        self.ran = True
        return self.run(*args, **kwargs)


class _Forward:
    """One forward of the model, while it runs."""

    def __init__(self, start: Reading) -> None:
        self.start = start
        self.calls = 0
        self.depth = 0
        self.first_kept: int | None = None  # None: every segment is checkpointed
        self.sizes: list[Size] = []
        self.owners: list[nn.Module] = []
        self.recording: Recording | None = None
        self.decision: Decision | None = None


class ActivationBudget:
    """The budget of one model.

    Args:
        model: the whole model, whose parameters' gradients count.
        root: the module whose forward runs all checkpointed layers.
        modules: the modules that checkpoint.
        limit: the peak that a step may allocate, in bytes; None for what it needs with every layer checkpointed.
        patcher: has the report.
    """

    def __init__(
        self, model: nn.Module, root: nn.Module, modules: Sequence[nn.Module], limit: int | None, patcher: ModelPatcher
    ) -> None:
        self.model, self.root, self.modules, self.limit = model, root, list(modules), limit
        self.meter: Meter | None = None
        self.decision: Decision | None = None
        self.profile: Profile | None = None
        self._patcher = patcher
        self._forward: _Forward | None = None
        self._learning: _Forward | None = None
        self._gradients: Gradients | None = None
        self._off = ""
        self._highest = 0.0  # the most that a step has needed with every segment checkpointed
        self._excess = 0.0  # by which plans were found to be wrong
        self._note: str | None = None
        self._range: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of an accelerated model, or of a part of it, checkpoints every layer and has no budget."""
        return _itself, (None,)

    # -- on and off ---------------------------------------------------------------------------------------------------

    def install(self, patcher: ModelPatcher) -> None:
        """Take the place of the checkpointing functions, from now until the patcher restores."""
        patcher.set_attribute(self.root, ATTRIBUTE, self)
        patcher.on_restore(self.root.register_forward_pre_hook(_Hook(self.begin)).remove)
        patcher.on_restore(self.root.register_forward_hook(_Hook(self.end)).remove)
        patcher.on_restore(self._take_places_back)
        self._take_places()

    def _take_places(self) -> None:
        # Again in each forward: whoever enables checkpointing anew (Trainer does at the start of training) sets others.
        for module in self.modules:
            function = module.__dict__.get(FUNCTION)
            if function is not None and not (isinstance(function, Segment) and function.budget is self):
                module.__dict__[FUNCTION] = Segment(function, module, self)

    def _take_places_back(self) -> None:
        for module in self.modules:
            function = module.__dict__.get(FUNCTION)
            if isinstance(function, Segment) and function.budget is self:
                module.__dict__[FUNCTION] = function.function

    # -- a forward ----------------------------------------------------------------------------------------------------

    def begin(self, root: nn.Module, args: Any) -> None:
        """Before each forward of the root."""
        if torch.compiler.is_compiling():
            return
        self._forward = None
        if not (torch.is_grad_enabled() and root.training):
            return
        self._take_places()
        if not self._ready():
            return
        assert self.meter is not None
        start = self.meter.read()
        self._finish_learning()
        self._forward = _Forward(start)

    def end(self, root: nn.Module, args: Any, output: Any) -> None:
        """After each forward of the root."""
        if torch.compiler.is_compiling():
            return
        forward, self._forward = self._forward, None
        if forward is None or forward.recording is None:
            return
        if self.profile is None:
            self._learning = forward
        elif forward.calls == self.profile.segments:
            self.profile.learn(forward.recording, forward.sizes[-1])
        else:  # a forward of another kind: what was learned is of no use
            self.profile = None

    def run(self, segment: Segment, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one segment: checkpointed, unless the forward at hand is one in which it keeps its activations."""
        forward = self._forward
        if forward is None or forward.depth or not torch.is_grad_enabled():
            return segment.function(run, *args, **kwargs)
        index, size = forward.calls, self._size(run, args)
        if index == 0 or forward.sizes[-1] != size:
            self._plan(forward, size)
        forward.calls += 1
        forward.sizes.append(size)
        forward.owners.append(segment.module)
        recording = forward.recording
        keeps = forward.first_kept is not None and index >= forward.first_kept and _requires_grad(args)
        if recording is not None:
            recording.before.append(recording.meter.read())
            if keeps:
                recording.kept.add(index)
            elif self.profile is None:
                run = _Recorded(run, recording, index)
        if forward.first_kept is not None and index == forward.first_kept - 1:
            run = _Watched(run, self, forward)
        forward.depth += 1
        try:
            output = run(*args) if keeps else segment.function(run, *args, **kwargs)
        finally:
            forward.depth -= 1
        if recording is not None:
            recording.after.append(recording.meter.read())
        return output

    def _size(self, run: Callable[..., Any], args: tuple[Any, ...]) -> Size:
        inputs = [*args, *getattr(run, "keywords", {}).values()]
        wide = [t for t in inputs if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1]
        if not wide:
            return Size((), 1, True)
        hidden = wide[0]
        elements = tuple(t.numel() for t in wide if t.shape[-1] == hidden.shape[-1])
        return Size(elements, hidden.shape[-2], holds_scores(self.root))

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _plan(self, forward: _Forward, size: Size) -> None:
        """Decide which segments, from the next on, keep their activations, and whether to record."""
        assert self.meter is not None
        forward.first_kept = None
        known, gradients = self.profile, self._gradients
        if known is None or gradients is None:
            if forward.calls == 0:
                forward.recording = Recording(self.meter)
            return
        factor = size.over(known.size)
        if forward.calls < known.first or factor == float("inf"):
            return
        profile = known.at(size)
        base = self.meter.read().allocated - sum(profile.output[: forward.calls])
        step = gradients.step(forward.start.allocated, base, size)
        least = unavoidable(profile, step)
        self._highest = max(self._highest, least)
        limit = self._highest if self.limit is None else min(self.limit, RESERVE * gradients.capacity)
        kept = most_kept(profile, step, limit * (1 - MARGIN) - self._excess) if least <= limit else 0
        kept = min(kept, profile.segments - forward.calls)
        if kept:
            forward.first_kept = profile.segments - kept
        forward.decision = self.decision = Decision(kept, profile.segments, int(peak(profile, step, kept)), int(limit))
        self._report(least)
        if kept and forward.calls == 0 and known.has_to_learn(kept, factor):
            forward.recording = Recording(self.meter)

    def _finish_learning(self) -> None:
        """Make a profile of the forward that was recorded, if its backward has run since.

        It has not where there is none, or where another forward comes before it: then that one is recorded too.
        """
        forward, self._learning = self._learning, None
        if forward is None or forward.recording is None or not forward.recording.complete:
            return
        assert self.meter is not None
        self._gradients = Gradients(self.model, forward.owners, self.meter.capacity())
        self.profile = Profile.of(forward.recording, forward.sizes, self._gradients.of_each)

    def judge(self, forward: _Forward) -> None:
        """Where the part of a step that was planned for has passed the limit, plan with that much less from now on."""
        assert self.meter is not None
        decision, forward.decision = forward.decision, None
        now = self.meter.read()
        if decision is None or now.peak <= forward.start.peak or now.peak <= decision.limit:
            return
        excess = now.peak - decision.limit
        self._excess += excess
        _log.warning(
            "a step took %s, %s more than the activation budget: from now on that much less is planned with",
            show_bytes(now.peak),
            show_bytes(excess),
        )

    def _ready(self) -> bool:
        """Whether there is a meter, and nothing in the way."""
        if self._off:
            return False
        if self.meter is None:
            devices = {next(m.parameters()).device for m in self.modules if next(m.parameters(), None) is not None}
            if len(devices) != 1:
                self._switch_off("its layers are on several devices")
                return False
            device = devices.pop()
            self.meter = meter_for(device)
            if self.meter is None:
                self._switch_off(f"how much memory is allocated cannot be read on {device.type}")
                return False
        reason = sharded_by(self.modules)
        if reason is not None:
            self._switch_off(reason)
        return not self._off

    def _switch_off(self, reason: str) -> None:
        self._off = reason
        self.say(f"every layer stays checkpointed: {reason}")

    # -- saying -------------------------------------------------------------------------------------------------------

    def _report(self, least: float) -> None:
        assert self.decision is not None
        kept, segments = self.decision.kept, self.decision.segments
        low, high = self._range or (kept, kept)
        if self._range == (low, high) and low <= kept <= high:
            return
        self._range = min(low, kept), max(high, kept)
        if self._range[1] == 0:
            if least > self.decision.limit:
                text = f"every layer stays checkpointed: even so a step needs at least {show_bytes(least)}"
            else:
                text = f"every layer stays checkpointed: of {show_bytes(self.decision.limit)} too little is free"
        else:
            low, high = self._range
            text = f"{high if low == high else f'{low} to {high}'} of {segments} layers keep their activations"
        self.say(text)

    def say(self, text: str) -> None:
        """Put a line into the report, in the place of the one before."""
        name = "auto" if self.limit is None else show_bytes(self.limit)
        text = f"activation budget ({name}): {text}"
        _log.info(text)
        notes = self._patcher.report.notes
        if self._note in notes:
            notes[notes.index(self._note)] = text
        else:
            notes.append(text)
        self._note = text


def _requires_grad(args: Sequence[Any]) -> bool:
    # Reentrant checkpointing gives no gradients to a layer none of whose inputs requires one; nor do we then.
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)
