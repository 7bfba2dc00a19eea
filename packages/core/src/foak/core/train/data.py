"""The data of a run: read, held against TRL's formats line by line, and split.

Formats (TRL's): `text`; `prompt` with `completion` (texts, or lists of messages); `messages`. One format per file. A
file is read into memory, so that an error can name its line; what does not fit into memory belongs on the hub, from
where it is memory-mapped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foak.core.train.fields import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

    from foak.core.errors import ConfigError
    from foak.core.train.runfile import RunFile

__all__ = ["RunData", "load_data"]

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
# Columns beside the format's own that TRL reads.
_COMPANIONS = ("tools", "chat_template_kwargs")


@dataclass(frozen=True)
class RunData:
    """What a run trains and evaluates on.

    Attributes:
        train: the training examples.
        eval: the held-out examples, if there are any.
        conversational: whether the examples are messages, which need a chat template.
    """

    train: Dataset
    eval: Dataset | None
    conversational: bool


def load_data(run: RunFile, *, seed: int) -> RunData:
    """Loads `data.train` and `data.eval`, or splits `data.eval_fraction` off.

    Args:
        run: the run file.
        seed: seed of the split.

    Raises:
        ConfigError: a file is missing, is not what its name says, or holds an example that no format allows; the
            message names the file, the line and the key.
    """
    text_column = str(run.training.get("dataset_text_field", "text"))
    train, shape = _load(run, "data.train", run.data.train, text_column)
    held_out = None
    if run.data.eval is not None:
        held_out, eval_shape = _load(run, "data.eval", run.data.eval, text_column)
        if eval_shape.columns != shape.columns:
            raise run.origin.error(
                "data.eval", f"holds {_names(eval_shape.columns)}, but data.train holds {_names(shape.columns)}"
            )
    elif run.data.eval_fraction is not None:
        count = round(len(train) * run.data.eval_fraction)
        if not 0 < count < len(train):
            raise run.origin.error(
                "data.eval_fraction",
                f"of {len(train)} examples leaves nothing to {'evaluate' if count == 0 else 'train'} on",
            )
        parts = train.train_test_split(test_size=count, seed=seed)
        train, held_out = parts["train"], parts["test"]
    return RunData(train, held_out, shape.conversational)


@dataclass(frozen=True)
class _Shape:
    """The format of a file: its columns, and whether they hold messages or texts."""

    columns: tuple[str, ...]
    conversational: bool


class _BadExample(Exception):
    """Why an example fits no format."""


def _load(run: RunFile, key: str, name: str, text_column: str) -> tuple[Dataset, _Shape]:
    path = run.find(name)
    if path.is_file() or path.suffix in _FILE_SUFFIXES or name.startswith((".", "/", "~")):
        return _load_file(run, key, path, text_column)
    return _load_hub(run, key, name, text_column)


def _load_file(run: RunFile, key: str, path: Path, text_column: str) -> tuple[Dataset, _Shape]:
    from datasets import Dataset

    if not path.is_file():
        raise run.origin.error(key, f"names {path}, but there is no such file")
    read = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".json": _read_json_lines}.get(path.suffix)
    if read is None:
        raise run.origin.error(key, f"names {path}; a data file ends in {', '.join(_FILE_SUFFIXES)}")
    rows: list[Mapping[str, Any]] = []
    shape: _Shape | None = None
    try:
        for place, row in read(path):
            try:
                found = _shape_of(row, text_column)
                if shape is not None and found != shape:
                    raise _BadExample(f"holds {_describe(found)}, but the lines before hold {_describe(shape)}")
            except _BadExample as error:
                raise _place_error(run, key, path, place, str(error)) from None
            shape = found
            rows.append({name: row[name] for name in (*found.columns, *_COMPANIONS) if name in row})
    except _Unreadable as error:
        raise _place_error(run, key, path, error.place, error.reason) from None
    if shape is None:
        raise run.origin.error(key, f"names {path}, which holds no example")
    try:
        return Dataset.from_list(rows), shape
    except (ValueError, TypeError) as error:  # pyarrow's errors: nested values of different types in one column
        raise run.origin.error(key, f"names {path}, whose examples are not of one type: {_first_line(error)}") from None


def _load_hub(run: RunFile, key: str, name: str, text_column: str) -> tuple[Dataset, _Shape]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    repository, _, split = name.partition(":")
    try:
        dataset = load_dataset(repository, split=split or "train")
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise run.origin.error(
            key, f"is {name!r}: there is no such file, and the hub gave no data set: {_first_line(error)}"
        ) from None
    if len(dataset) == 0:
        raise run.origin.error(key, f"is {name!r}, which holds no example")
    try:
        shape = _shape_of(dataset[0], text_column)
    except _BadExample as error:
        raise run.origin.error(key, f"is {name!r}, whose first example {error}") from None
    kept = [column for column in dataset.column_names if column in (*shape.columns, *_COMPANIONS)]
    return dataset.select_columns(kept), shape


class _Unreadable(Exception):
    """A file cannot be read at some place."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(reason)
        self.place = place
        self.reason = reason


def _read_json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the place (`line 3`) and the object of each line that is not blank."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise _Unreadable(f"line {number}", f"is not JSON: {error.msg} (column {error.colno})") from None
                if not isinstance(row, dict):
                    raise _Unreadable(f"line {number}", 'must be one JSON object, such as {"text": "…"}')
                yield f"line {number}", row
    except UnicodeDecodeError:
        raise _Unreadable(f"line {number + 1}", "is not UTF-8 text") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the place (`row 3`) and the values of each row."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise _Unreadable(f"row {number + 1}", f"cannot be read as Parquet: {_first_line(error)}") from None


def _shape_of(row: Mapping[str, Any], text_column: str) -> _Shape:
    """The format of one example; `_BadExample` says why it has none."""
    formats = ((text_column,), ("prompt", "completion"), ("messages",))
    present = [columns for columns in formats if any(row.get(column) is not None for column in columns)]
    if not present:
        wanted = f"{text_column}, prompt with completion, or messages"
        known = [column for columns in formats for column in columns]
        hint = next((text for name in row if (text := did_you_mean(str(name), known))), "")
        raise _BadExample(f"holds none of {wanted}; its keys are {_names(tuple(row)) or 'none'}{hint}")
    if len(present) > 1:
        raise _BadExample(f"holds {' and '.join(_names(columns) for columns in present)}: keep one of them")
    columns = present[0]
    for column in columns:
        if row.get(column) is None:
            raise _BadExample(f"holds no {column}")
    kinds = {_kind_of(row[column], column) for column in columns}
    if len(kinds) > 1:
        raise _BadExample("mixes text and messages in prompt and completion")
    conversational = kinds.pop()
    if columns == ("messages",) and not conversational:
        raise _BadExample("holds a text in messages; a list of {role, content} belongs there")
    if columns == (text_column,) and conversational:
        raise _BadExample(f"holds messages in {text_column}; a text belongs there")
    return _Shape(columns, conversational)


def _kind_of(value: Any, column: str) -> bool:
    """True for messages, False for a text."""
    if isinstance(value, str):
        if not value.strip():
            raise _BadExample(f"holds an empty {column}")
        return False
    if not isinstance(value, list):
        raise _BadExample(f"holds {type(value).__name__} in {column}; a text or a list of messages belongs there")
    if not value:
        raise _BadExample(f"holds an empty {column}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _BadExample(f"needs role and content in {column}[{index}]")
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            raise _BadExample(f"needs a text in {column}[{index}].content")
    return True


def _place_error(run: RunFile, key: str, path: Path, place: str, text: str) -> ConfigError:
    return run.origin.error(key, f"names {path}, whose {place} {text}")


def _describe(shape: _Shape) -> str:
    kind = "messages" if shape.conversational else "texts"
    return _names(shape.columns) if len(shape.columns) == 1 else f"{_names(shape.columns)} as {kind}"


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(map(str, columns))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
