"""A run that was stopped at any moment goes on as if it had not been; a full disk harms no checkpoint.

The short form sends three signals; `--full` sends thirty, and fills the disk within every file of a checkpoint.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import (
    RESUME,
    SAVE_STEPS,
    STEPS,
    TRAINING,
    Server,
    assert_loads,
    contents,
    finish,
    interrupt,
    losses,
    sizes,
)

from foak.core.train.storage import checkpoint_step, last_checkpoint

RunWriter = Callable[..., Path]
SHORT, FAULTS_OF_A_RUN = 3, 3
KERNELS = {
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
    "fast_activation": True,
    "fused_lora": True,
}


def sections(output: Path, **training: Any) -> dict[str, Any]:
    return {
        "training": {**TRAINING, "output_dir": str(output), **training},
        "acceleration": {"plugins": {"training": {"fused_ops_and_kernels": KERNELS}}},
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def losses_of_a_whole_run(server: Server, write_run: RunWriter, output: Path, **training: Any) -> dict[int, float]:
    """Of a run that nobody stops."""
    code, printed = finish(server, write_run(**sections(output, **training)))
    assert code == 0, printed
    found = losses(output)
    assert list(found) == list(range(1, STEPS + 1))
    assert len(set(found.values())) > STEPS / 2
    return found


@pytest.mark.slow
def test_a_run_that_is_stopped_at_random_moments_ends_as_one_that_is_not(
    write_run: RunWriter,
    tmp_path: Path,
    server: Server,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    """SIGTERM and SIGKILL in turn; several to a run, which goes on in between."""
    uninterrupted = losses_of_a_whole_run(server, write_run, tmp_path / "whole")
    faults = 30 if pytestconfig.getoption("full") else SHORT
    sent = {signal.SIGTERM: 0, signal.SIGKILL: 0}
    for run in range(-(-faults // FAULTS_OF_A_RUN)):
        generator = random.Random(run)
        output = tmp_path / f"out-{run}"
        path = write_run(**sections(output))
        for fault in range(min(FAULTS_OF_A_RUN, faults - sum(sent.values()))):
            number = (signal.SIGTERM, signal.SIGKILL)[(run + fault) % 2]
            code, printed = interrupt(server, path, output, number, generator)
            assert "Traceback" not in printed, printed
            assert code == (128 + number if number is signal.SIGTERM else -number), printed
            sent[number] += 1
            last = last_checkpoint(output)
            if number is signal.SIGTERM:  # after its step, with a checkpoint of it
                assert last is not None
                assert f"{last} is whole" in printed
            if last is not None:
                assert_loads(last)
        code, printed = finish(server, path, *(RESUME if last_checkpoint(output) is not None else ()))
        assert code == 0, printed
        assert losses(output) == uninterrupted  # the same operations on the same machine: to the last bit
    assert sum(sent.values()) == faults
    record_property("counts", {"signals sent": faults})


@pytest.mark.slow
def test_a_disk_that_fills_while_saving_leaves_the_checkpoint_before_whole(
    write_run: RunWriter,
    tmp_path: Path,
    server: Server,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    """A write fails in the middle of one file after another: each that a checkpoint has, in its order of sizes."""
    constant = {"lr_scheduler_type": "constant"}  # a run of four steps has the rates of a longer one
    uninterrupted = losses_of_a_whole_run(server, write_run, tmp_path / "whole", **constant)
    output = tmp_path / "out"
    path = write_run(**sections(output, **constant))
    stop = ("--set", f"training.max_steps={SAVE_STEPS}")
    code, printed = finish(server, path, *stop)
    assert code == 0, printed
    first = last_checkpoint(output)
    assert first is not None
    assert checkpoint_step(first) == SAVE_STEPS
    before = contents(first)
    # Below a kilobyte it is the data set that could not be prepared.
    of_each = sorted({size for size in sizes(first).values() if size > 1024})
    limits = [size - 1 for size in (of_each if pytestconfig.getoption("full") else of_each[-2:])]
    failed = 0
    for limit in limits:
        code, printed = finish(server, path, *RESUME, file_limit=limit)
        assert code == 1, (limit, printed)
        assert "Traceback" not in printed, printed
        assert f"the last whole checkpoint is {first}" in printed, printed
        assert last_checkpoint(output) == first
        assert contents(first) == before
        assert_loads(first)
        failed += 1
    assert failed >= 2
    code, printed = finish(server, path, *RESUME)
    assert code == 0, printed
    assert losses(output) == uninterrupted
    record_property("counts", {"full disks": failed})
