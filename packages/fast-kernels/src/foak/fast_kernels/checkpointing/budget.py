"""Decides in every forward which of a model's checkpointed layers keep their activations."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foak.core.patching import ModelPatcher
from foak.fast_kernels.checkpointing.gradients import Gradients
from foak.fast_kernels.checkpointing.limit import show_bytes
from foak.fast_kernels.checkpointing.meter import Meter, meter_for
from foak.fast_kernels.checkpointing.plan import Profile, Size, most_kept, peak, unavoidable
from foak.fast_kernels.checkpointing.rebuild import Slim, can_slim
from foak.fast_kernels.checkpointing.record import Recording
from foak.fast_kernels.checkpointing.segment import Decision, Forward, Hook, Recorded, Segment, Watched, itself
from foak.fast_kernels.checkpointing.structure import holds_scores, kinds_of, sharded_by

FUNCTION = "_gradient_checkpointing_func"
"""The attribute by which transformers' layers reach the checkpointing function."""

ATTRIBUTE = "_foak_activation_budget"
"""Where a model's budget is found: a plain attribute of the module whose forward runs all checkpointed layers."""

MARGIN = 1 / 256
"""The part of a budget that a plan leaves free: memory that rounding and an uneven batch may take."""

RESERVE = 0.94
"""The part of a device's memory that is planned with at most, for the allocator's fragmentation."""

_log = logging.getLogger(__name__)


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
        self.slim: Profile | None = None  # of segments that drop what is quick to compute again; None: nothing is
        self._patcher = patcher
        self._forward: Forward | None = None
        self._learning: Forward | None = None
        self._gradients: Gradients | None = None
        self._off = ""
        self._highest = 0.0  # the most that a step has needed, or needs by arithmetic, with every segment checkpointed
        self._rest: int | None = None  # the peak before that part of a step which needs no more for what was kept
        self._unjudged: Forward | None = None  # the latest forward, while it holds activations that it has kept
        self._excess = 0.0  # by which plans were found to be wrong
        self._note: str | None = None
        self._range: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of an accelerated model, or of a part of it, checkpoints every layer and has no budget."""
        return itself, (None,)

    # -- on and off ---------------------------------------------------------------------------------------------------

    def install(self, patcher: ModelPatcher) -> None:
        """Take the place of the checkpointing functions, from now until the patcher restores."""
        patcher.set_attribute(self.root, ATTRIBUTE, self)
        patcher.on_restore(self.root.register_forward_pre_hook(Hook(self.begin)).remove)
        patcher.on_restore(self.root.register_forward_hook(Hook(self.end), always_call=True).remove)
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
            self._say_compiled()
            return
        self._forward = None
        self._settle()
        if not (torch.is_grad_enabled() and root.training):
            return
        self._take_places()
        if not self._ready():
            return
        assert self.meter is not None
        start = self.meter.read()
        self._finish_learning()
        self._forward = Forward(start, alone=self._unjudged is None)
        self._unjudged = None

    def end(self, root: nn.Module, args: Any, output: Any) -> None:
        """After each forward of the root; one that raised has no output, and nothing is learned from it."""
        if torch.compiler.is_compiling():
            return
        forward, self._forward = self._forward, None
        if forward is None or output is None:
            return
        if forward.first_kept is not None:
            self._unjudged = forward
        elif forward.alone:
            self._rest = forward.start.peak
        if forward.recording is None:
            return
        if forward.slim and not forward.dropped:
            self.slim = None
        profile = self.profile if self.slim is None or not forward.slim else self.slim
        if profile is None:
            self._learning = forward
        elif forward.calls == profile.segments:
            profile.learn(forward.recording, forward.sizes[-1])
        else:  # a forward of another kind: what was learned is of no use
            self.profile = self.slim = None

    def run(self, segment: Segment, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one segment: checkpointed, unless the forward at hand is one in which it keeps its activations."""
        forward = self._forward
        if forward is None or forward.depth or not torch.is_grad_enabled():
            return segment.function(run, *args, **kwargs)
        if kwargs:  # only the function knows which of them are the layer's
            self._forward = None
            self._switch_off("its layers give keyword arguments to the checkpointing function")
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
                run = Recorded(run, recording, index)
        if forward.first_kept is not None and index == forward.first_kept - 1:
            run = Watched(run, self, forward)
        forward.depth += 1
        try:
            if not keeps:
                output = segment.function(run, *args)
            elif forward.slim and can_slim():
                with Slim() as slim:
                    output = segment.keep(run, args)
                forward.dropped += slim.dropped
            else:
                output = segment.keep(run, args)
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

    def _plan(self, forward: Forward, size: Size) -> None:
        """Decide which segments, from the next on, keep their activations, and whether to record."""
        assert self.meter is not None
        forward.first_kept, forward.slim = None, False
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
        free = limit * (1 - MARGIN) - self._excess if least <= limit else 0
        kept = most_kept(profile, step, free)
        if kept < profile.segments - profile.first and self.slim is not None:
            forward.slim, known = True, self.slim
            profile = known.at(size)
            kept = most_kept(profile, step, free)
        kept = min(kept, profile.segments - forward.calls)
        if kept:
            forward.first_kept = profile.segments - kept
        predicted = int(peak(profile, step, kept))
        forward.decision = self.decision = Decision(kept, profile.segments, predicted, int(limit), forward.slim)
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
        kinds = kinds_of(forward.owners)
        self.profile = Profile.of(forward.recording, forward.sizes, self._gradients.of_each, kinds)
        self.slim = copy.deepcopy(self.profile)

    def judge(self, forward: Forward) -> None:
        """Where the part of a step that was planned for has passed the limit, plan with that much less from now on."""
        assert self.meter is not None
        decision, forward.decision = forward.decision, None
        now = self.meter.read()
        if forward is self._unjudged:
            self._unjudged = None
            self._rest = now.peak if forward.alone else None
        if decision is None or now.peak <= forward.start.peak or now.peak <= decision.limit:
            return
        excess = now.peak - decision.limit
        self._excess += excess
        _log.warning(
            "a step took %s, %s more than the activation budget: from now on that much less is planned with",
            show_bytes(now.peak),
            show_bytes(excess),
        )

    def _settle(self) -> None:
        """Where the rest of a step has raised the peak, a step needs that much however many segments keep theirs."""
        before, self._rest = self._rest, None
        if before is not None and self.meter is not None:
            peak_now = self.meter.read().peak
            if peak_now > before:
                self._highest = max(self._highest, peak_now)

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
                allocator = ": its allocator is not PyTorch's own, or does not cache" if device.type == "cuda" else ""
                self._switch_off(f"how much memory is allocated cannot be read on {device.type}{allocator}")
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
            if self.decision.slim and self.slim is not None:
                text += ", but for what is quick to compute again"
        self.say(text)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _say_compiled(self) -> None:
        # Runs once, while torch.compile traces, and leaves nothing in the graph.
        self.say("every layer stays checkpointed: torch.compile takes the model as one")

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
