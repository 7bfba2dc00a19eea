"""What a run measures, and `foak_report.json`."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from foak.core.train.storage import write_json

__all__ = ["Recorder", "describe_device", "peak_memory_bytes", "write_report"]

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "trl", "peft", "datasets", "bitsandbytes", "gguf")


class Recorder(TrainerCallback):
    """Measures steps and tokens of one process and one call of `train()`.

    Nothing is synchronised: where the device works ahead of Python, single steps blur into each other, and the sum and
    the median stay right because SFTTrainer reads the device once a step.
    """

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.tokens = 0
        self.runtime_seconds = 0.0
        self._step_start = 0.0
        self._run_start = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if torch.cuda.is_available() and args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        self._run_start = time.perf_counter()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step_seconds.append(time.perf_counter() - self._step_start)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        # SFTTrainer counts the tokens of this call of train(), over all ranks, from the attention mask.
        self.tokens = int((logs or {}).get("num_tokens", self.tokens))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.runtime_seconds = time.perf_counter() - self._run_start

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens without padding, of all ranks, per second in steps (loading, evaluating and saving left out)."""
        seconds = sum(self.step_seconds)
        return self.tokens / seconds if seconds > 0 else None

    @property
    def step_seconds_median(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None


def write_report(
    path: Path, *, trainer: Trainer, recorder: Recorder, config: Mapping[str, Any], patches: Any, peak_memory: int
) -> dict[str, Any]:
    """Writes `foak_report.json` and returns its content.

    `loss`, `grad_norm` and `logged_steps` belong together entry by entry and reach back over a resumed run's earlier
    steps; tokens, times and memory are those of this call of `train()`.
    """
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    content = {
        "versions": versions(),
        "device": describe_device(trainer.args),
        "config": dict(config),
        "patches": patches,
        "logged_steps": [entry["step"] for entry in logged],
        "loss": [entry["loss"] for entry in logged],
        "grad_norm": [entry.get("grad_norm") for entry in logged],
        "eval_loss": [
            {"step": entry["step"], "loss": entry["eval_loss"]}
            for entry in trainer.state.log_history
            if "eval_loss" in entry
        ],
        "tokens": recorder.tokens,
        "tokens_per_second": recorder.tokens_per_second,
        "step_seconds_median": recorder.step_seconds_median,
        "peak_memory_bytes": peak_memory,
        "train_runtime_seconds": recorder.runtime_seconds,
    }
    plain: dict[str, Any] = _jsonable(content)
    write_json(path, plain)
    return plain


def versions() -> dict[str, str]:
    """Versions of Python, of every foak package, and of what a run stands on."""
    found = {
        name: distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"] or "").startswith("foak-")
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def describe_device(args: TrainingArguments) -> dict[str, Any]:
    """Kind, name and number of the devices that a run uses."""
    kind = args.device.type
    name = torch.cuda.get_device_name(args.device) if kind == "cuda" else platform.processor() or platform.machine()
    return {"type": kind, "name": name, "processes": args.world_size, "threads": torch.get_num_threads()}


def peak_memory_bytes(args: TrainingArguments) -> int:
    """Peak of what torch allocated on the device since training began; on a CPU the process's peak resident set."""
    if args.device.type == "cuda":
        return torch.cuda.max_memory_allocated(args.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _jsonable(value: Any) -> Any:
    """Plain JSON: numbers that JSON has no word for become null, unknown types their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_jsonable(item) for item in value]
    return str(value)
