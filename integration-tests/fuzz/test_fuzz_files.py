"""Data files and run files of any content: read, or refused in one sentence that names the file; never a traceback.

The same examples in every run; `--full` takes many others instead. (Configurations are fuzzed in foak-core's tests,
kernels in foak-kernels'.)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from foak.core import ConfigError
from foak.core.train.data import RunData, load_data
from foak.core.train.runfile import RunFile, read_run_file

FEW, MANY = 150, 5000
KEYS = ("text", "prompt", "completion", "messages", "role", "content", "tools", "chat_template_kwargs", "chosen")

scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=6))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", 3])}, optional={"content": scalars})
rows = st.one_of(
    values,
    st.fixed_dictionaries({"text": scalars}),
    st.fixed_dictionaries({"messages": st.lists(message, max_size=3)}),
    st.fixed_dictionaries({"prompt": scalars, "completion": values}),
)
lines = st.one_of(
    rows.map(lambda row: json.dumps(row).encode()),
    st.binary(max_size=20),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.just(b'{"text": "one"}'),
)
contents = st.lists(lines, max_size=5).map(b"\n".join)


@pytest.fixture
def explore(pytestconfig: pytest.Config) -> Callable[..., int]:
    """Runs a check on drawn examples, and gives their number."""

    def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], *first: Any) -> int:
        full = bool(pytestconfig.getoption("full"))
        seen = 0

        def counted(drawn: Any) -> None:
            nonlocal seen
            seen += 1
            check(drawn)

        explored = given(strategy)(counted)
        for one in first:
            explored = example(one)(explored)
        settings(
            max_examples=MANY if full else FEW,
            derandomize=not full,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )(explored)()
        return seen

    return run


def assert_one_sentence(error: ConfigError, *names: str) -> None:
    message = str(error)
    assert "\n" not in message
    for name in names:
        assert name in message, message


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_data_files(
    suffix: str, explore: Callable[..., int], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run, data = tmp_path / "run.yaml", tmp_path / f"data{suffix}"
    run.write_text(yaml.safe_dump({"model": {"name_or_path": "x"}, "data": {"train": data.name}}), encoding="utf-8")
    read: list[int] = []

    def check(content: bytes) -> None:
        data.write_bytes(content)
        try:
            found = load_data(read_run_file(run), seed=0)
        except ConfigError as error:
            assert_one_sentence(error, str(run), data.name)
        else:
            assert isinstance(found, RunData)
            read.append(len(found.train))

    seen = explore(contents, check, b'{"text": "one"}\n{"text": "two"}', b"")
    assert suffix == ".parquet" or max(read) > 1
    record_property("counts", {"examples": seen})


def test_run_files(explore: Callable[..., int], tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    run = tmp_path / "run.yaml"
    sections = st.fixed_dictionaries(
        {},
        optional={
            "model": values | st.fixed_dictionaries({"name_or_path": scalars}, optional={"dtype": scalars}),
            "data": values | st.fixed_dictionaries({"train": scalars}, optional={"eval_fraction": scalars}),
            "peft": values | st.fixed_dictionaries({"r": scalars}, optional={"target_modules": values}),
            "training": values | st.fixed_dictionaries({"max_steps": scalars}, optional={"learning_rate": scalars}),
            "acceleration": values,
            "other": values,
        },
    )
    written = st.one_of(sections.map(lambda tree: yaml.safe_dump(tree).encode()), st.binary(max_size=30), contents)
    accepted: list[RunFile] = []

    def check(content: bytes) -> None:
        run.write_bytes(content)
        try:
            accepted.append(read_run_file(run))
        except ConfigError as error:
            assert_one_sentence(error, str(run))

    valid = b"model: {name_or_path: x}\ndata: {train: y.jsonl}\npeft: {r: 4}\ntraining: {max_steps: 3}\n"
    seen = explore(written, check, valid)
    assert accepted
    record_property("counts", {"examples": seen})
