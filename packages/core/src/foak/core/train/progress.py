"""What a person sees while a run goes on: a bar, and a line for each logged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["ProgressBar"]


class ProgressBar(TrainerCallback):
    """Shows the run on a console; on a console that is no terminal only the lines remain.

    Args:
        console: where to; a quiet one on every rank but the first.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._bar.start()
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step, loss="")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        step = f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"
        if "loss" in logs:
            self.console.print(
                f"{step}  loss {logs['loss']:.4f}  {_optional('grad norm', logs.get('grad_norm'), '.3f')}",
                highlight=False,
            )
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, loss=f"loss {logs['loss']:.4f}")
        elif "eval_loss" in logs:
            self.console.print(f"{step}  held-out loss {logs['eval_loss']:.4f}", highlight=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away; also called when the run fails."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _optional(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"
