"""Reading data: every format, and one sentence that names file, line and key for each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from foak.core import ConfigError
from foak.core.train.data import RunData, load_data
from foak.core.train.runfile import read_run_file

TEXT = {"text": "one"}
PAIR = {"prompt": "one", "completion": "two"}
CHAT = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
CHAT_PAIR = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}


def load(folder: Path, **data: Any) -> RunData:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"name_or_path": "x"}, "data": data}))
    return load_data(read_run_file(path), seed=3)


def lines(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path.name


@pytest.mark.parametrize(
    ("row", "columns", "conversational"),
    [
        (TEXT, ["text"], False),
        (PAIR, ["prompt", "completion"], False),
        (CHAT, ["messages"], True),
        (CHAT_PAIR, ["prompt", "completion"], True),
        ({**CHAT, "id": 4}, ["messages"], True),
        ({**CHAT, "tools": "[]"}, ["messages", "tools"], True),
    ],
)
def test_formats(tmp_path: Path, row: dict[str, Any], columns: list[str], conversational: bool) -> None:
    data = load(tmp_path, train=lines(tmp_path / "a.jsonl", row, "", row))
    assert data.train.column_names == columns
    assert len(data.train) == 2
    assert data.eval is None
    assert data.conversational is conversational


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    data = load(tmp_path, train="a.parquet")
    assert data.train[1] == CHAT


def test_eval_fraction_splits_without_loss_and_by_seed(tmp_path: Path) -> None:
    name = lines(tmp_path / "a.jsonl", *({"text": str(n)} for n in range(20)))
    first, second = (load(tmp_path, train=name, eval_fraction=0.2) for _ in range(2))
    assert first.eval is not None
    assert second.eval is not None
    assert len(first.eval) == 4
    assert sorted(map(int, first.train["text"][:] + first.eval["text"][:])) == list(range(20))
    assert first.eval["text"][:] == second.eval["text"][:]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), r"a\.jsonl, which holds no example"),
        (("", "  "), r"a\.jsonl, which holds no example"),
        ((TEXT, "{oops"), r"data\.train names .*a\.jsonl, whose line 2 is not JSON"),
        (("[1]",), r"line 1 must be one JSON object"),
        (('"x"',), r"line 1 must be one JSON object"),
        (({"txet": "x"},), r"line 1 holds none of text, .*its keys are txet; did you mean text\?"),
        (({},), r"line 1 holds none of .*its keys are none"),
        ((TEXT, CHAT), r"line 2 holds messages, but the lines before hold text"),
        ((PAIR, CHAT_PAIR), r"line 2 holds prompt, completion as messages, but the lines before hold .* as texts"),
        (({**TEXT, **CHAT},), r"line 1 holds text and messages: keep one"),
        (({"prompt": "x"},), r"line 1 holds no completion"),
        (({"prompt": "x", "completion": CHAT["messages"]},), r"line 1 mixes text and messages"),
        (({"text": "  "},), r"line 1 holds an empty text"),
        (({"text": 3},), r"line 1 holds int in text"),
        (({"text": CHAT["messages"]},), r"line 1 holds messages in text"),
        (({"messages": "x"},), r"line 1 holds a text in messages"),
        (({"messages": []},), r"line 1 holds an empty messages"),
        (({"messages": ["x"]},), r"line 1 needs role and content in messages\[0\]"),
        (({"messages": [{"role": "user"}]},), r"line 1 needs a text in messages\[0\]\.content"),
        (({"messages": [{"role": "user", "content": 3}]},), r"line 1 needs a text in messages\[0\]\.content"),
    ],
)
def test_faults_name_file_line_and_key(tmp_path: Path, rows: tuple[Any, ...], message: str) -> None:
    name = lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(ConfigError, match=message) as raised:
        load(tmp_path, train=name)
    assert "run.yaml: data.train names" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_are_not_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "x"}\n\xff\xfe\n')
    (tmp_path / "c.csv").write_text("text\nx\n")
    with pytest.raises(ConfigError, match=r"a\.parquet, whose row 1 cannot be read as Parquet"):
        load(tmp_path, train="a.parquet")
    with pytest.raises(ConfigError, match=r"b\.jsonl, whose line \d is not UTF-8"):
        load(tmp_path, train="b.jsonl")
    with pytest.raises(ConfigError, match=r"c\.csv; a data file ends in"):
        load(tmp_path, train="c.csv")
    with pytest.raises(ConfigError, match=r"data\.train names .*d\.jsonl, but there is no such file"):
        load(tmp_path, train="d.jsonl")


def test_eval_must_have_the_format_of_train(tmp_path: Path) -> None:
    train, held_out = lines(tmp_path / "a.jsonl", TEXT), lines(tmp_path / "b.jsonl", CHAT)
    with pytest.raises(ConfigError, match=r"data\.eval holds messages, but data\.train holds text"):
        load(tmp_path, train=train, eval=held_out)
    with pytest.raises(ConfigError, match=r"data\.eval names .*b\.jsonl, whose line 2 is not JSON"):
        load(tmp_path, train=train, eval=lines(tmp_path / "b.jsonl", TEXT, "{"))


def test_an_eval_fraction_that_leaves_nothing(tmp_path: Path) -> None:
    name = lines(tmp_path / "a.jsonl", TEXT, TEXT)
    with pytest.raises(ConfigError, match=r"data\.eval_fraction of 2 examples leaves nothing to evaluate on"):
        load(tmp_path, train=name, eval_fraction=0.1)
    with pytest.raises(ConfigError, match=r"leaves nothing to train on"):
        load(tmp_path, train=name, eval_fraction=0.9)


def test_unknown_hub_data_set_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"data\.train is 'nobody/nothing': there is no such file, and the hub"
    ) as raised:
        load(tmp_path, train="nobody/nothing")
    assert "\n" not in str(raised.value)
