"""What is gained, measured while it trains: how full batches are, beside how full padded ones would be, and speed."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback

from foak.core.report import PatchReport
from foak.padding_free.forward import Settings
from foak.padding_free.packed import PACKED, PackedSequences

__all__ = ["CountedStep", "FillCallback"]


class FillCallback(TrainerCallback):
    """Counts tokens of this process and seconds of its steps, and writes both into the report when training ends.

    Attributes:
        tokens: real tokens.
        padded_tokens: what the same batches take padded.
        seconds: in training steps; data loading between them, evaluation and saving left out.
    """

    def __init__(self, report: PatchReport) -> None:
        self.report = report
        self._note: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.tokens = self.padded_tokens = self.sequences = self.batches = 0
        self.seconds = self._begun = 0.0

    def count(self, packed: PackedSequences) -> None:
        """Count a micro-batch."""
        self.tokens += packed.total
        self.padded_tokens += packed.padded_total
        self.sequences += len(packed.lengths)
        self.batches += 1

    @property
    def note(self) -> str:
        """What was measured, in a sentence."""
        if not self.batches:
            return "padding-free: no packed batch was trained"
        fill = self.tokens / self.padded_tokens
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s on each process" if self.seconds else ""
        return (
            f"padding-free: {self.tokens:,} tokens of {self.sequences:,} sequences in {self.batches:,} batches; "
            f"fill {fill:.1%} before (the same batches padded), 100.0% now{rate}"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self._begun

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.device.type == "cuda":  # the steps were launched, not waited for
            begun = time.perf_counter()
            torch.cuda.synchronize(args.device)
            self.seconds += time.perf_counter() - begun
        if self._note in self.report.notes:
            self.report.notes.remove(self._note)
        self._note = self.note
        self.report.notes.append(self._note)


class CountedStep:
    """Takes the place of a trainer's `training_step`; counts what goes into it, and lets the model know of it."""

    def __init__(self, trainer: Any, counter: FillCallback, settings: Settings) -> None:
        self.inner, self.counter, self.settings = trainer.training_step, counter, settings

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        packed = inputs.get(PACKED)
        if packed is not None:
            self.counter.count(packed)
        self.settings.training = packed
        try:
            return self.inner(model, inputs, *args, **kwargs)
        finally:
            self.settings.training = None
