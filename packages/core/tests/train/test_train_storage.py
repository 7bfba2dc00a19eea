"""Writing that leaves what was there when it fails."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from foak.core.train.storage import last_checkpoint, named_failure, replace_folder, write_json


def checkpoint(folder: Path, step: int, state: str | None) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"x")
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return path


def test_last_checkpoint_passes_over_what_was_cut_off(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    assert last_checkpoint(tmp_path / "nowhere") is None
    whole = checkpoint(tmp_path, 9, '{"global_step": 9}')
    checkpoint(tmp_path, 10, None)
    checkpoint(tmp_path, 11, '{"global_st')
    (tmp_path / "checkpoint-best").mkdir()
    assert last_checkpoint(tmp_path) == whole


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "final"
    replace_folder(target, lambda path: (path.mkdir(), (path / "a").write_text("1"))[0], owner=True)

    def fail(path: Path) -> None:
        path.mkdir()
        (path / "a").write_text("2")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_folder(target, fail, owner=True)
    assert (target / "a").read_text() == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]


def test_another_rank_moves_nothing(tmp_path: Path) -> None:
    replace_folder(tmp_path / "final", lambda path: None, owner=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        RuntimeError("basic_ios::clear: iostream error"),
    ],
)
def test_a_failed_write_names_the_path(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(OSError, match=r"^The model could not be written to .*final: .*; all is well$"),
        named_failure("The model", tmp_path / "final", "all is well"),
    ):
        raise error


def test_other_errors_pass_as_they_are(tmp_path: Path) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as raised, named_failure("The model", tmp_path):
        raise error
    assert raised.value is error
