"""The same training steps without and with foak, taken in turn so that both meet the same machine."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from foak.core.train.job import Job
from foak.core.train.model import LoadedModel
from foak.core.train.runfile import RunFile

LOSS_TOLERANCE = 1e-3
MIN_SPEED_RATIO = 0.97


@dataclass
class Side:
    """What one of the two did; the first step, which warms up, counts for the losses alone."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """Both sides of the same steps."""

    plain: Side
    foak: Side

    @property
    def speed_ratio(self) -> float:
        """How many times as fast a step is with foak: the median over pairs of neighbouring steps on one batch."""
        pairs = zip(self.plain.seconds, self.foak.seconds, strict=True)
        return statistics.median(plain / foak for plain, foak in pairs)

    @property
    def loss_difference(self) -> float:
        return max(abs(plain - foak) for plain, foak in zip(self.plain.losses, self.foak.losses, strict=True))


class Stepper:
    """Takes optimizer steps with the model, the loss and the optimizer of a job's trainer."""

    def __init__(self, job: Job) -> None:
        self.trainer = job.trainer
        self.model = job.trainer.model.train()
        self.optimizer = job.trainer.create_optimizer()
        self.device = job.args.device
        self.side = Side()

    def step(self, batch: Mapping[str, torch.Tensor], *, warm_up: bool) -> None:
        inputs = {name: value.to(self.device) for name, value in batch.items()}
        labels = (inputs["labels"][:, 1:] != -100).sum()
        resting = _reset_peak(self.device)
        start = self._now()
        loss = self.trainer.compute_loss(self.model, inputs, num_items_in_batch=labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = self._now() - start
        self.side.losses.append(loss.item())
        if warm_up:
            return
        self.side.seconds.append(seconds)
        self.side.tokens.append(int(batch["attention_mask"].sum()))
        self.side.peak_bytes = max(self.side.peak_bytes, _peak(self.device) - resting)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def compare(run: RunFile, loaded: LoadedModel, console: Console, *, pairs: int) -> Comparison:
    """Trains two copies of the model side by side, on the same batches from the same start.

    Args:
        run: the run; the plain side leaves its section `acceleration` out.
        loaded: the model before training; it is not changed.
        console: shows the progress.
        pairs: measured steps of each side; one more before them warms up.
    """
    quiet = Console(quiet=True)
    plain = Stepper(Job(replace(run, acceleration=None), quiet, _copy(loaded)))
    foak = Stepper(Job(run, quiet, _copy(loaded)))
    batches: list[Any] = list(itertools.islice(_for_ever(plain.trainer.get_train_dataloader()), pairs + 1))
    for number, batch in enumerate(track(batches, "steps in turn", console=console, transient=True)):
        # Whoever goes first changes from step to step.
        for stepper in (plain, foak) if number % 2 else (foak, plain):
            stepper.step(batch, warm_up=number == 0)
    return Comparison(plain.side, foak.side)


def _copy(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, model=copy.deepcopy(loaded.model))


def _for_ever(loader: Any) -> Any:
    while True:
        yield from loader


def _reset_peak(device: torch.device) -> int:
    """Starts a new peak; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark of the resident set starts again
    except OSError:
        return 0
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    """The peak since `_reset_peak`; where that cannot be had, 0."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
