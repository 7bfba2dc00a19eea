"""Two processes: DDP and FSDP2 with foak give what they and one process give without, and compute no logits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from filelock import FileLock

FP32_TOLERANCE = 128 * torch.finfo(torch.float32).eps
"""Relative, of two fp32 computations that differ in the order of their sums."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every run: starting two processes costs far more than a run in them.

    Workers of pytest-xdist share what the first of them has measured.
    """
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.mkdir()
            measure_into(path)
    return path


def measure_into(path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, ranks.__file__, str(path), str(free_port())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:  # the runs before are whole
        (path / "crash.txt").write_text(done.stderr[-4000:])


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    norm = float(reference.norm())
    return float((value - reference).norm()) / (norm if norm > 0 else 1.0)


@pytest.mark.parametrize("name", ranks.RUNS)
def test_two_processes(name: str, folder: Path, record_property: Callable[[str, object], None]) -> None:
    run = ranks.RUNS[name]
    tolerance = FP32_TOLERANCE
    for rank in range(ranks.WORLD_SIZE):
        if not (folder / f"{name}.{rank}.pt").exists():
            pytest.fail((folder / "crash.txt").read_text())
        result: dict[str, Any] = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
        assert "error" not in result, result["error"]
        assert run.computed or result["computed"] == 0, "logits were computed in a training step"
        assert result["sharded"] == run.sharded
        assert "apply before" in result["refusal"] or "call apply" in result["refusal"]
        plain, fast, alone = result["plain"], result["fast"], result["alone"]
        assert len(set(plain["losses"])) == ranks.STEPS
        if run.mixed:  # bf16: as near to fp32 in one process as the plain run, in the loss and over all gradients
            errors = [errors_of(result[kind], alone) for kind in ("plain", "fast")]
            assert errors[1][0] <= max(1.5 * errors[0][0], 1e-3)
            assert errors[1][1] <= 1.5 * errors[0][1]
            continue
        for reference in (plain, alone) if run.alone else (plain,):
            for expected, actual in zip(reference["losses"], fast["losses"], strict=True):
                assert abs(actual - expected) <= tolerance * expected
            for step, (theirs, ours) in enumerate(zip(reference["gradients"], fast["gradients"], strict=True)):
                for key, gradient in theirs.items():
                    if gradient is None:
                        assert ours[key] is None or not ours[key].any(), key
                    else:
                        # two SGD steps of rate 0.1 lie between
                        assert distance(ours[key], gradient) <= 4 * tolerance, (rank, step, key)
            assert fast["weights"].keys() >= reference["weights"].keys()
            for key, weight in reference["weights"].items():
                ours = fast["weights"][key]
                assert same_bits(ours, weight) or distance(ours, weight) <= tolerance, (rank, key)
        if run.saves:
            assert_saved(result["saved"], result["fast logits"], rank, 4 * tolerance)
        if run.late or "fast logits" in result:
            assert distance(result["fast logits"], result["plain logits"]) <= 4 * tolerance
        else:
            assert "resharded" in result["unread"]  # an error that says so, never other numbers
    record_property("counts", {"ways to train over two processes": 1})


def same_bits(value: torch.Tensor, reference: torch.Tensor) -> bool:
    """Packed weights that are stored as float32 may look like NaN."""
    return value.shape == reference.shape and torch.equal(
        value.contiguous().view(torch.int32), reference.contiguous().view(torch.int32)
    )


def assert_saved(saved: dict[str, Any], logits: torch.Tensor, rank: int, tolerance: float) -> None:
    keys, plain_keys = saved["keys"]
    assert keys == plain_keys
    if rank == 0:
        assert keys
        assert distance(saved["logits of the full state"], logits) <= tolerance
    before, after = saved["shards"]
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.any(), key
        assert torch.equal(after[key], value), key


def errors_of(run: dict[str, Any], exact: dict[str, Any]) -> tuple[float, float]:
    """Largest distance of a loss, and root mean square distance of the first step's gradients."""
    loss = max(abs(a - b) for a, b in zip(run["losses"], exact["losses"], strict=True))
    squares = [distance(run["gradients"][0][key], g) ** 2 for key, g in exact["gradients"][0].items() if g is not None]
    return loss, (sum(squares) / len(squares)) ** 0.5
