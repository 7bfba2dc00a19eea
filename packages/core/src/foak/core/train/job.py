"""One run, from the run file to the saved adapter: build, report, train, evaluate, save."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PrinterCallback, set_seed

from foak.core.config import read_config
from foak.core.errors import ConfigError
from foak.core.framework import AccelerationFramework
from foak.core.precision import find_misfit
from foak.core.train.data import RunData, load_data
from foak.core.train.interrupt import Interrupted, StopOnSignal
from foak.core.train.model import LoadedModel, load_model
from foak.core.train.plot import plot_loss
from foak.core.train.progress import ProgressBar
from foak.core.train.record import Recorder, peak_memory_bytes, write_report
from foak.core.train.runfile import RunFile
from foak.core.train.storage import (
    checkpoint_step,
    is_complete_checkpoint,
    last_checkpoint,
    named_failure,
    replace_folder,
)

if TYPE_CHECKING:
    from trl import SFTConfig

    from foak.core.report import PatchReport
    from foak.core.train.trainer import RunTrainer

__all__ = ["FINAL_FOLDER", "PLOT_FILE", "REPORT_FILE", "Job", "JobResult"]

FINAL_FOLDER = "final"
REPORT_FILE = "foak_report.json"
PLOT_FILE = "loss.png"


@dataclass(frozen=True)
class JobResult:
    """What a finished run left.

    Attributes:
        folder: the saved adapter (PEFT) or model, with the tokenizer.
        report: the content of `foak_report.json`.
    """

    folder: Path
    report: dict[str, Any]


class Job:
    """A run that is built and ready to train.

    Building loads the model and the data, makes the trainer and applies the acceleration; nothing is written but the
    empty folder `training.output_dir`.

    Args:
        run: the run file.
        console: where progress and tables go on rank 0; other ranks stay silent.
        loaded: a model and tokenizer to use instead of loading `model.name_or_path`.

    Attributes:
        trainer: the trainer, accelerated.
        framework: the framework that accelerates it; None without `acceleration`.
        patches: the patch report; None without `acceleration`.

    Raises:
        ConfigError: something that the run file names is wrong.
        UnsupportedError: the acceleration cannot work on this model.
    """

    def __init__(self, run: RunFile, console: Console, loaded: LoadedModel | None = None) -> None:
        self.run = run
        with _quiet_deprecations():
            self.args = _training_arguments(run)
            self.console = console if self.args.process_index == 0 else Console(quiet=True)
            self.checkpoint = _checkpoint_to_resume(run, self.args)
            _make_output_folder(run, self.args)
            self.framework = _framework(run)
            data = load_data(run, seed=self.args.seed)
            if loaded is None:
                with self.console.status(f"Loading {run.model.name_or_path} …"):
                    loaded = load_model(run, self.framework)
            self._check_template(data, loaded)
            self.trainer = self._make_trainer(loaded, data)
            self._check_precision()
        self.trainer.remove_callback(PrinterCallback)
        self.recorder = Recorder()
        self._progress = ProgressBar(self.console)
        self.trainer.add_callback(self.recorder)
        self.trainer.add_callback(self._progress)
        self.patches: PatchReport | None = None if self.framework is None else self.framework.apply(self.trainer)

    def train(self) -> None:
        """Trains to the end, or from the checkpoint to the end, and evaluates where there is held-out data.

        Raises:
            Interrupted: SIGINT or SIGTERM ended the run; the last checkpoint is whole.
            OSError: a checkpoint could not be written; the ones before are whole.
        """
        self._announce()
        stop = StopOnSignal(graceful=self.args.world_size == 1)
        self.trainer.add_callback(stop)
        try:
            with stop, _quiet_deprecations():
                self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
                if stop.received is not None:
                    raise Interrupted(stop.received)
                self._evaluate_at_end()
        finally:
            self._progress.close()
            self.trainer.remove_callback(stop)

    def save(self) -> JobResult:
        """Saves the adapter or model, the tokenizer, the report and the loss plot; shows the closing table.

        Raises:
            OSError: something could not be written; the message names it, and what was saved before is untouched.
        """
        output = Path(self.args.output_dir)
        folder = output / FINAL_FOLDER
        before = last_checkpoint(output)
        kept = f"the last whole checkpoint is {before}" if before is not None else ""
        with named_failure("The trained model", folder, kept), _quiet_deprecations():
            output.mkdir(parents=True, exist_ok=True)
            replace_folder(
                folder, lambda path: self.trainer.save_model(str(path)), owner=self.trainer.is_world_process_zero()
            )
        report: dict[str, Any] = {}
        peak = self._peak_memory()
        if self.trainer.is_world_process_zero():
            with named_failure("The report", output / REPORT_FILE, f"the trained model is in {folder}"):
                report = write_report(
                    output / REPORT_FILE,
                    trainer=self.trainer,
                    recorder=self.recorder,
                    config=self.run.to_dict(),
                    patches=None if self.patches is None else self.patches.to_dict(),
                    peak_memory=peak,
                )
            with named_failure("The loss plot", output / PLOT_FILE, f"the trained model is in {folder}"):
                held_out = [(entry["step"], entry["loss"]) for entry in report["eval_loss"]]
                plot_loss(
                    output / PLOT_FILE, report["logged_steps"], report["loss"], held_out, title=self.run.path.stem
                )
            self._close(folder, report)
        return JobResult(folder, report)

    def _make_trainer(self, loaded: LoadedModel, data: RunData) -> RunTrainer:
        from peft import LoraConfig

        from foak.core.train.trainer import RunTrainer

        # The adapter is drawn while the trainer is made, before Trainer seeds anything itself.
        set_seed(self.args.seed)
        try:
            peft = None if self.run.peft is None else LoraConfig(task_type="CAUSAL_LM", **self.run.peft)
            trainer = RunTrainer(
                loaded.model,
                self.args,
                train_dataset=data.train,
                eval_dataset=data.eval,
                processing_class=loaded.tokenizer,
                peft_config=peft,
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            if self.run.peft is not None and _raised_in("peft", error):
                raise self.run.origin.error(
                    _key_of(self.run.peft, "peft", str(error)), f"is refused by PEFT: {_sentence(error)}"
                ) from error
            raise ConfigError(f"{self.run.path}: {_sentence(error)}") from error
        if not _has_something_to_learn(trainer.train_dataset):
            raise self.run.origin.error(
                "data.train", "leaves no usable example: none has a token to learn within training.max_length"
            )
        return trainer

    def _check_template(self, data: RunData, loaded: LoadedModel) -> None:
        if data.conversational and not loaded.tokenizer.chat_template and not self.args.chat_template_path:
            raise self.run.origin.error(
                "data.train",
                "holds messages, but the tokenizer has no chat template; name one in training.chat_template_path",
            )

    def _check_precision(self) -> None:
        misfit = find_misfit(self.trainer.model, self.args)
        if misfit is not None:
            raise self.run.origin.error(f"training.{misfit.argument}", misfit.problem)

    def _evaluate_at_end(self) -> None:
        if self.trainer.eval_dataset is None:
            return
        evaluated = any(
            "eval_loss" in entry and entry["step"] == self.trainer.state.global_step
            for entry in self.trainer.state.log_history
        )
        if not evaluated:
            self.trainer.evaluate()

    def _peak_memory(self) -> int:
        """The largest peak over all ranks."""
        own = torch.tensor([peak_memory_bytes(self.args)], device=self.args.device)
        return int(self.trainer.accelerator.gather(own).max().item())

    def _announce(self) -> None:
        trainable = sum(parameter.numel() for parameter in self.trainer.model.parameters() if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        self.console.print(
            f"[bold]{escape(self.run.model.name_or_path)}[/]: {trainable:,} of {total:,} parameters train, "
            f"{len(self.trainer.train_dataset):,} examples, {self.args.world_size} x {self.args.device.type}",
            highlight=False,
            soft_wrap=True,
        )
        if self.patches is not None:
            self.console.print(str(self.patches), highlight=False, markup=False, soft_wrap=True)
        if self.checkpoint is not None:
            self.console.print(f"Going on from {self.checkpoint}", highlight=False, markup=False, soft_wrap=True)

    def _close(self, folder: Path, report: dict[str, Any]) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        loss = report["loss"]
        if loss:
            table.add_row("loss", f"{_number(loss[0], '.4f')} → {_number(loss[-1], '.4f')}")
        if report["eval_loss"]:
            values = [entry["loss"] for entry in report["eval_loss"]]
            table.add_row(
                "held-out loss", " → ".join(_number(value, ".4f") for value in dict.fromkeys((values[0], values[-1])))
            )
        table.add_row("tokens", f"{report['tokens']:,}")
        table.add_row("tokens/s", _number(report["tokens_per_second"], ",.0f"))
        table.add_row("step", f"{_number(report['step_seconds_median'], '.3f')} s (median)")
        table.add_row("peak memory", f"{report['peak_memory_bytes'] / 2**20:,.0f} MiB")
        table.add_row("adapter" if self.run.peft is not None else "model", str(folder))
        table.add_row("report", str(folder.parent / REPORT_FILE))
        table.add_row("loss plot", str(folder.parent / PLOT_FILE))
        self.console.print(table)


def _training_arguments(run: RunFile) -> SFTConfig:
    from trl import SFTConfig

    fields = {"report_to": "none", **run.training, "disable_tqdm": True}
    if not torch.accelerator.is_available():
        # Otherwise transformers takes bf16 for a GPU's, and the loader pins memory for a device that is not there.
        fields = {"use_cpu": True, "dataloader_pin_memory": False, **fields}
    try:
        return SFTConfig(**fields)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"{run.path}: training: {_sentence(error)}") from error


def _framework(run: RunFile) -> AccelerationFramework | None:
    if run.acceleration is None:
        return None
    return AccelerationFramework(read_config({"acceleration": run.acceleration}, source=str(run.path)))


def _checkpoint_to_resume(run: RunFile, args: SFTConfig) -> Path | None:
    """The checkpoint that the run goes on from; refuses a folder that holds another run's checkpoints."""
    output = Path(args.output_dir)
    if isinstance(run.resume, str):
        named = run.find(run.resume)
        if not is_complete_checkpoint(named):
            raise run.origin.error(
                "training.resume_from_checkpoint", f"is {run.resume!r}, which is no complete checkpoint"
            )
        return _with_steps_left(run, args, named)
    found = last_checkpoint(output)
    if run.resume and found is None:
        raise run.origin.error("training.resume_from_checkpoint", f"is true, but {output} holds no complete checkpoint")
    if not run.resume and found is not None:
        raise run.origin.error(
            "training.output_dir",
            f"is {str(output)!r}, which holds {found.name} of an earlier run: go on with it "
            "(training.resume_from_checkpoint: true), name another folder, or remove it",
        )
    return None if found is None else _with_steps_left(run, args, found)


def _with_steps_left(run: RunFile, args: SFTConfig, checkpoint: Path) -> Path:
    """The checkpoint; refuses one that has reached `max_steps`, from where Trainer would take one step more."""
    step = checkpoint_step(checkpoint)
    if 0 < args.max_steps <= step:
        raise run.origin.error(
            "training.max_steps",
            f"is {args.max_steps}, but {checkpoint} is at step {step}: it holds what was trained; "
            "to train on, write a larger number",
        )
    return checkpoint


def _make_output_folder(run: RunFile, args: SFTConfig) -> None:
    """Makes `training.output_dir` now, so that a place where nothing can be written costs no loading."""
    output = Path(args.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run.origin.error(
            "training.output_dir", f"is {str(output)!r}, which cannot be made: {error.strerror}"
        ) from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise run.origin.error("training.output_dir", f"is {str(output)!r}, where nothing can be written")


def _raised_in(package: str, error: Exception) -> bool:
    """Whether an error came out of a package's code, or through it."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == package for name in modules)


def _key_of(section: Mapping[str, Any], name: str, message: str) -> str:
    """The dotted key that a message of PEFT is about, told by its words; the section where it names none."""
    for key in sorted(section, key=len, reverse=True):
        if re.search(rf"\b{key.replace('_', '[_ ]')}\b", message, re.IGNORECASE):
            return f"{name}.{key}"
    return name


def _has_something_to_learn(dataset: Any) -> bool:
    """Whether any example has a label that a token before it can predict."""
    if len(dataset) == 0 or "labels" not in dataset.column_names:
        return len(dataset) > 0
    return any(label != -100 for example in dataset for label in example["labels"][1:])


@contextlib.contextmanager
def _quiet_deprecations() -> Iterator[None]:
    """transformers and TRL warn of each other's renamed arguments; a reader of a run file can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Could not find a config file in .*", UserWarning)
        yield


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _number(value: float | None, form: str) -> str:
    return "not a number" if value is None else format(value, form)
