"""`foak train` as a process that is stopped from outside, and what it has left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open

from foak.core.train.storage import checkpoint_step, last_checkpoint

STEPS = 24
SAVE_STEPS = 4
TRAINING = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVE_STEPS,
    "save_total_limit": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
}
RESUME = ("--set", "training.resume_from_checkpoint=true")
LATEST_SECONDS = 0.12
"""How long after a step's line a signal may come: a step and the writing of a checkpoint fit into it."""
PATIENCE_SECONDS = 180


class Server:
    """Runs `foak train`, one run at a time; see `server.py`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._read() == "ready"

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)

    def start(self, log: Path, path: Path, *options: str, file_limit: int | None = None) -> int:
        """Starts a run; gives its process's id. `log` is where it prints to."""
        log.write_text("")
        request = {"arguments": ["train", str(path), *options], "output": str(log), "file_limit": file_limit}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid: int = json.loads(self._read())["pid"]
        return pid

    def wait(self) -> int:
        """The exit code of the run, the negative of a signal that ended it."""
        code: int = json.loads(self._read())["code"]
        return code

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def finish(server: Server, path: Path, *options: str, file_limit: int | None = None) -> tuple[int, str]:
    """Runs to the end; gives the exit code and what was printed."""
    log = path.with_suffix(".log")
    server.start(log, path, *options, file_limit=file_limit)
    return server.wait(), log.read_text(encoding="utf-8")


def losses(output: Path) -> dict[int, float]:
    """By step, of the whole run, the steps before a resumption included."""
    report = json.loads((output / "foak_report.json").read_text(encoding="utf-8"))
    return dict(zip(report["logged_steps"], report["loss"], strict=True))


def interrupt(
    server: Server, path: Path, output: Path, number: signal.Signals, generator: random.Random
) -> tuple[int, str]:
    """Starts or resumes a run and sends it a signal at a random moment: a random step, and a little later.

    Returns:
        The exit code, and what it printed.
    """
    last = last_checkpoint(output)
    done = 0 if last is None else checkpoint_step(last)
    target = generator.randint(done + 1, max(done + 1, STEPS - 4))
    delay = generator.random() * LATEST_SECONDS
    log = path.with_suffix(".log")
    pid = server.start(log, path, *(RESUME if last is not None else ()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while max([0, *map(int, re.findall(rf"step (\d+)/{STEPS}\b", log.read_text(encoding="utf-8")))]) < target:
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(pid, number)
    return server.wait(), log.read_text(encoding="utf-8")


def assert_loads(checkpoint: Path) -> None:
    """Every file of a checkpoint can be read to its end."""
    import torch

    weights = list(checkpoint.glob("*.safetensors"))
    assert weights, checkpoint
    for file in weights:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                assert tensors.get_tensor(name).isfinite().all(), name
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.load(checkpoint / name, weights_only=False)
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == int(checkpoint.name.rpartition("-")[2])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; TRL's model card, whose tags are in the order of a set, aside."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "README.md")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def sizes(checkpoint: Path) -> dict[str, Any]:
    return {file.name: file.stat().st_size for file in checkpoint.iterdir()}
