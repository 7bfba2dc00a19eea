"""Writing that never leaves half a file: a folder is renamed into place, a full disk becomes one sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "checkpoint_step",
    "is_complete_checkpoint",
    "last_checkpoint",
    "named_failure",
    "replace_folder",
    "write_json",
]

# The last file that Trainer writes into a checkpoint.
_LAST_FILE = "trainer_state.json"


def last_checkpoint(folder: Path) -> Path | None:
    """The complete `checkpoint-N` with the highest N in a folder; None if there is none.

    A run that was killed while it wrote leaves a checkpoint without (or with half of) its last file: it is passed over.
    """
    numbered = [
        (int(number), path)
        for path in folder.glob("checkpoint-*")
        if (number := path.name.rpartition("-")[2]).isdecimal()
    ]
    return next((path for _, path in sorted(numbered, reverse=True) if is_complete_checkpoint(path)), None)


def is_complete_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    try:
        json.loads((folder / _LAST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def checkpoint_step(folder: Path) -> int:
    """The step at which a complete checkpoint was written."""
    return int(json.loads((folder / _LAST_FILE).read_text(encoding="utf-8"))["global_step"])


@contextlib.contextmanager
def named_failure(what: str, path: Path, kept: str = "") -> Iterator[None]:
    """Turns a failed write inside the block into one OSError that names the path.

    Args:
        what: what was being written, such as `the checkpoint`.
        path: where to.
        kept: what the reader wants to know about what was saved before; a clause.

    Raises:
        OSError: with the original's errno where it has one.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save reports a failed write as RuntimeError; any other RuntimeError is not about the disk.
        if isinstance(error, RuntimeError) and not isinstance(error, SafetensorError) and not _is_failed_write(error):
            raise
        free = _free_bytes(path)
        full = (
            getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            or "No space left" in str(error)
            or free < 2**20
        )
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = "the disk is full" if full else first_line
        number = errno.ENOSPC if full else getattr(error, "errno", None) or errno.EIO
        raise SaveError(
            number, f"{what} could not be written to {path}: {reason}{'; ' + kept if kept else ''}"
        ) from error


class SaveError(OSError):
    """A failed write; its text is one sentence, without the errno that OSError would put before it."""

    def __str__(self) -> str:
        return str(self.args[1])


def replace_folder(target: Path, write: Callable[[Path], None], *, owner: bool) -> None:
    """Writes a folder beside its place and renames it there, so that `target` is whole or what it was.

    Args:
        target: the folder to make or replace.
        write: writes into the folder that it is given; called on every rank (a sharded model is gathered by all).
        owner: whether this process moves the folders (rank 0).
    """
    partial = target.with_name(f".{target.name}.partial")
    previous = target.with_name(f".{target.name}.previous")
    if owner:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        write(partial)
    except BaseException:
        if owner:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if owner:
        shutil.rmtree(previous, ignore_errors=True)
        if target.exists():
            target.rename(previous)
        partial.rename(target)
        shutil.rmtree(previous, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Writes strict JSON (no NaN) and renames it into place."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2, allow_nan=False)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_failed_write(error: RuntimeError) -> bool:
    text = str(error)
    return any(part in text for part in ("PytorchStreamWriter", "No space left", "unexpected pos", "iostream error"))


def _free_bytes(path: Path) -> int:
    existing = next(parent for parent in (path, *path.resolve().parents) if parent.exists())
    return shutil.disk_usage(existing).free
