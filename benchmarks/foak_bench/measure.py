"""One scenario in this process: the job of `foak train` is built on it, trains, and is measured.

The run file, the job and its trainer are those of `foak train`. Two things differ from the command: a model that nobody
must load is made on the device and handed to the job, because writing and reading 14 GB of random numbers measures
nothing; and the trained model is not saved.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from foak.core.train.job import REPORT_FILE, Job
from foak.core.train.model import LoadedModel
from foak.core.train.record import peak_memory_bytes, write_report
from foak.core.train.runfile import RunFile, read_run_file
from foak_bench.data import make_tokenizer, write_data
from foak_bench.models import checkpoint_folder, decoded_model, make_config, random_model
from foak_bench.peers import ON_OUR_LOADER, acceleration, attention_of, batches, compile_layers, load_unsloth, targets
from foak_bench.quantized import quantized_model
from foak_bench.scenarios import Scenario

__all__ = ["Clock", "device_of_this_process", "measure", "spread"]

_LEARNING_RATE = {"full": 2e-5}
_LORA_LEARNING_RATE = 2e-4


class Clock(TrainerCallback):
    """Takes the time at the log of each step.

    There the trainer has just read the loss from the device, so all work of the step is done: the time between two logs
    is that of a whole step, its batch and its log included.
    """

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.tokens: list[int] = [0]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.marks = [time.perf_counter()]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if "loss" in (logs or {}):
            self.marks.append(time.perf_counter())
            self.tokens.append(int((logs or {})["num_tokens"]))

    def after(self, warmup: int) -> tuple[list[float], int]:
        """The seconds of each step after the warm-up, and the tokens of these steps on all ranks, without padding."""
        seconds = [end - begin for begin, end in zip(self.marks, self.marks[1:], strict=False)]
        return seconds[warmup:], self.tokens[-1] - self.tokens[warmup]


def device_of_this_process() -> torch.device:
    """The GPU of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def measure(scenario: Scenario, scratch: Path, console: Console, *, quantize_here: bool = False) -> dict[str, Any]:
    """Trains one scenario.

    Args:
        scenario: what to train.
        scratch: a folder for checkpoints, which later scenarios find, and for what is removed at the end.
        console: where the job's own table and lines go.
        quantize_here: make a quantized base on the device instead of loading it from a checkpoint.

    Returns:
        `versions` and `device` as in foak_report.json, and the `figures` of the run.

    Raises:
        torch.OutOfMemoryError: it does not fit.
        ConfigError: what the scenario asks for is refused.
    """
    work, device = scenario.work, device_of_this_process()
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run, loaded = _prepare(scenario, Path(folder), scratch, device, quantize_here)
        job = Job(run, console, loaded)
        del loaded
        if scenario.row.by == "compile":
            compile_layers(job.trainer.model)
        clock = Clock()
        job.trainer.add_callback(clock)
        _forget(device)
        built = time.perf_counter()
        job.train()
        report = write_report(
            Path(folder) / REPORT_FILE,
            trainer=job.trainer,
            recorder=job.recorder,
            config=run.to_dict(),
            patches=None if job.patches is None else job.patches.to_dict(),
            peak_memory=_over_ranks(job, peak_memory_bytes(job.args)),
        )
    seconds, tokens = clock.after(work.warmup)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    figures = {
        "tokens_per_second": tokens / sum(seconds),
        "tokens": tokens,
        "step_seconds": spread(seconds),
        "peak_allocated_bytes": report["peak_memory_bytes"],
        "peak_reserved_bytes": None if reserved is None else _over_ranks(job, reserved),
        "loss": [round(value, 6) if value is not None else None for value in report["loss"]],
        "grad_norm": [round(value, 6) if value is not None else None for value in report["grad_norm"]],
        "patched": None if report["patches"] is None else report["patches"]["patched"],
        "build_seconds": round(built - began, 2),
        "train_seconds": round(report["train_runtime_seconds"], 2),
    }
    if job.framework is not None:
        job.framework.restore()
    job.trainer.accelerator.free_memory()
    del job
    _forget(device)
    return {"versions": {**report["versions"], **_peers()}, "device": report["device"], "figures": figures}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, and extremes."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else list(seconds) * 9
    found = {
        "median": statistics.median(seconds),
        "p10": tenths[0],
        "p90": tenths[8],
        "min": min(seconds),
        "max": max(seconds),
    }
    return {name: round(value, 6) for name, value in found.items()}


def _peers() -> dict[str, str]:
    """The versions of the peers that are installed, whether this scenario is theirs or not."""
    found = {}
    for name in ("gptqmodel", "liger-kernel", "unsloth", "unsloth-zoo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _prepare(
    scenario: Scenario, folder: Path, scratch: Path, device: torch.device, quantize_here: bool
) -> tuple[RunFile, LoadedModel | None]:
    """The run file of a scenario, and its model where the job does not load one by itself."""
    work = scenario.work
    config = make_config(scenario.geometry, work)
    if (attention := attention_of(scenario.row)) is not None:
        config._attn_implementation = attention
    write_data(folder / "data.jsonl", work, config.vocab_size)
    quantized = work.method in ("qlora-nf4", "gptq")
    loads_itself = scenario.row.by == "unsloth" or (work.method == "gptq" and scenario.row.by not in ON_OUR_LOADER)
    made_here = quantized and quantize_here and work.precision != "fp32" and not loads_itself
    checkpoint = None
    if (quantized and not made_here) or scenario.row.by == "unsloth":
        checkpoint = checkpoint_folder(scenario.geometry, work, scratch, device)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(_run_content(scenario, folder, checkpoint)), encoding="utf-8")
    run = read_run_file(path)
    if scenario.row.by == "unsloth":
        assert checkpoint is not None
        return run, LoadedModel(*load_unsloth(checkpoint, work))
    if made_here:
        return run, LoadedModel(quantized_model(config, work, device), make_tokenizer(config.vocab_size))
    if checkpoint is None:
        return run, LoadedModel(random_model(config, work, device), make_tokenizer(config.vocab_size))
    if work.precision == "fp32":
        model = decoded_model(checkpoint, config, work, device)
        return run, LoadedModel(model, make_tokenizer(config.vocab_size))
    return run, None


def _run_content(scenario: Scenario, folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    """RUN.yaml as a mapping; every field that a trainer's own default could decide is written out."""
    work, by = scenario.work, scenario.row.by
    training: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": work.warmup + work.steps,
        **batches(scenario),
        "gradient_checkpointing": work.checkpointing,
        "bf16": work.precision in ("amp", "mixed"),
        "learning_rate": _LEARNING_RATE.get(work.method, _LORA_LEARNING_RATE),
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 0,
        "use_liger_kernel": by == "liger",
        **work.training,
    }
    if work.checkpointing:
        training["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    peft = {
        "r": work.rank,
        "lora_alpha": work.rank,
        "lora_dropout": work.dropout,
        "target_modules": targets(work),
    }
    return {
        "model": {
            "name_or_path": str(checkpoint or work.model),
            "dtype": "float32" if work.precision in ("fp32", "mixed") else "bfloat16",
            "attn_implementation": attention_of(scenario.row),
        },
        "data": {"train": str(folder / "data.jsonl")},
        "peft": None if work.method == "full" or by == "unsloth" else peft,
        "training": training,
        "acceleration": acceleration(scenario),
    }


def _over_ranks(job: Job, value: int) -> int:
    """The largest of a number over all ranks."""
    own = torch.tensor([value], device=job.args.device)
    return int(job.trainer.accelerator.gather(own).max().item())


def _forget(device: torch.device) -> None:
    """Gives back what nobody refers to, so that the next peak is that of the next run alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
