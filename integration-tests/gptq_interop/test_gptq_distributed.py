"""A LoRA on a GPTQ base learns the same under DDP and FSDP2 (which shards the packed weights too) as in one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import gptq_ranks
import pytest


def test_two_processes_learn_what_one_does(quantized: Path, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    out = tmp_path / "losses.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, gptq_ranks.__file__, str(quantized), str(port), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads(out.read_text(encoding="utf-8"))
    assert len(losses) == 6
    for name, curve in losses.items():
        assert curve[-1] < curve[0] - 0.1, name
        # The mean of two equal gradients is that gradient; fusing changes the order of float32 sums.
        assert curve == pytest.approx(losses["one process"], abs=2e-5), name
