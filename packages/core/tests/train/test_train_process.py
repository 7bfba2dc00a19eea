"""The main job as a process of its own: exit codes, signals, a full disk, two ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foak.core.train.storage import last_checkpoint

RunWriter = Callable[..., Path]

TRAIN = ("-m", "foak.core", "train")
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def python(*arguments: object, preexec: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=180,
        check=False,
        preexec_fn=preexec,
    )


def test_a_run_prints_losses_and_where_things_are(write_run: RunWriter, tmp_path: Path) -> None:
    done = python(*TRAIN, write_run(), "--set", "training.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stdout
    assert "held-out loss" in done.stdout
    assert "peak memory" in done.stdout
    assert (tmp_path / "out" / "final" / "adapter_model.safetensors").is_file()


def test_a_wrong_key_is_one_sentence_and_exit_code_2(write_run: RunWriter) -> None:
    path = write_run(training={"lerning_rate": 1})
    done = python(*TRAIN, path)
    assert done.returncode == 2
    assert "training.lerning_rate is no known key; did you mean training.learning_rate?" in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_whole_checkpoint(
    write_run: RunWriter, tmp_path: Path, number: signal.Signals
) -> None:
    path = write_run(training={"max_steps": 100_000, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2})
    process = subprocess.Popen(
        [sys.executable, *TRAIN, path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    try:
        deadline = time.monotonic() + 90
        while last_checkpoint(tmp_path / "out") is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    last = last_checkpoint(tmp_path / "out")
    assert last is not None
    assert f"Stopped by {number.name}; {last} is whole" in output
    steps = re.findall(r"step +([0-9]+)/", output)
    assert last.name == f"checkpoint-{steps[-1]}"  # of the step that it ended with, whatever save_steps is
    end = json.loads((last / "trainer_state.json").read_text())["global_step"] + 2
    resume = ("--set", "training.resume_from_checkpoint=true", "--set", f"training.max_steps={end}")
    resumed = python(*TRAIN, path, *resume)
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {end}/{end}" in resumed.stdout


def test_a_full_disk_is_one_sentence_and_keeps_earlier_checkpoints(write_run: RunWriter, tmp_path: Path) -> None:
    path = write_run(peft=None, training={"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    assert python(*TRAIN, path).returncode == 0
    out = tmp_path / "out"
    size = (out / "checkpoint-1" / "model.safetensors").stat().st_size

    def limit() -> None:
        # A write past the limit fails as one on a full disk does: with an error of the system in the middle of a file.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    def saved() -> dict[Path, bytes]:
        # TRL writes the model card beside the checkpoints anew with each, its tags in the order of a set.
        return {file: file.read_bytes() for file in out.rglob("*") if file.is_file() and file != out / "README.md"}

    before = saved()
    resume = ("--set", "training.resume_from_checkpoint=true", "--set", "training.max_steps=2")
    done = python(*TRAIN, path, *resume, preexec=limit)
    assert done.returncode == 1
    assert f"The checkpoint could not be written to {out / 'checkpoint-2'}" in done.stderr
    assert f"the last whole checkpoint is {out / 'checkpoint-1'}" in done.stderr
    assert "Traceback" not in done.stderr

    done = python(*TRAIN, path, *resume, "--set", "training.save_strategy=no", preexec=limit)
    assert done.returncode == 1
    assert f"The trained model could not be written to {out / 'final'}" in done.stderr
    assert saved() == before


def test_two_ranks_speak_once_and_count_all_tokens(write_run: RunWriter, tmp_path: Path) -> None:
    path = write_run(peft={"lora_dropout": 0.0}, training={"max_steps": 3})
    done = python(*LAUNCH, "--num_processes=2", "--main_process_port=0", *TRAIN, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 3/3  loss") == 1
    report = json.loads((tmp_path / "out" / "foak_report.json").read_text())
    assert report["device"]["processes"] == 2
    # One process with twice the batch size sees the same batches.
    alone = python(*TRAIN, path, "--set", "training.per_device_train_batch_size=4")
    assert alone.returncode == 0, alone.stderr
    single = json.loads((tmp_path / "out" / "foak_report.json").read_text())
    assert report["tokens"] == single["tokens"]
    assert report["loss"] == pytest.approx(single["loss"], abs=1e-5)
