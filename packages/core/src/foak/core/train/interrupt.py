"""SIGINT and SIGTERM during a run: finish the step, save a checkpoint, stop; at once when asked twice."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["Interrupted", "StopOnSignal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the run.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopOnSignal(TrainerCallback):
    """Stops training after the step in which a signal arrives; a context manager that holds the handlers meanwhile.

    Ranks of a distributed run receive the signal at different steps and would wait for each other for ever in a
    collective, so there the run ends at once; its last checkpoint stays.

    Args:
        graceful: whether the first signal waits for the end of the step and saves; False for more than one process.
    """

    def __init__(self, *, graceful: bool) -> None:
        self.graceful = graceful
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None or not self.graceful:
            self.received = signum
            raise Interrupted(signum)
        self.received = signum

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if self.received is not None:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        return control
