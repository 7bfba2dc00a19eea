"""The quickstart's instruction set: large enough, without repeats, held-out examples apart, one house style."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foak.core.train.data import load_data
from foak.core.train.runfile import read_run_file

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
STYLE = ("Answer: ", "Why: ", "Check: ")


def examples(name: str) -> list[list[dict[str, Any]]]:
    lines = (QUICKSTART / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_the_job_reads_it() -> None:
    data = load_data(read_run_file(QUICKSTART / "run.yaml"), seed=0)
    assert data.conversational
    assert len(data.train) >= 240
    assert data.eval is not None
    assert len(data.eval) == 30


def test_no_question_twice_and_none_in_both_files() -> None:
    questions = [messages[1]["content"] for name in ("train.jsonl", "held_out.jsonl") for messages in examples(name)]
    assert len(set(questions)) == len(questions)


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl"])
def test_every_answer_keeps_the_house_style(name: str) -> None:
    for messages in examples(name):
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        lines = messages[2]["content"].split("\n")
        assert len(lines) == 3
        for line, start in zip(lines, STYLE, strict=True):
            assert line.startswith(start)
            assert len(line) > len(start) + 1
