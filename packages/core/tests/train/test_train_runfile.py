"""Reading RUN.yaml: sections, types, `--set`, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from foak.core import ConfigError
from foak.core.train.runfile import read_run_file

MINIMAL = {"model": {"name_or_path": "tiny"}, "data": {"train": "train.jsonl"}}


def write(folder: Path, content: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def test_defaults(tmp_path: Path) -> None:
    run = read_run_file(write(tmp_path, MINIMAL))
    assert run.model.dtype == "auto"
    assert run.model.trust_remote_code is False
    assert run.peft is None
    assert run.acceleration is None
    assert run.resume is False
    assert run.training == {"output_dir": "runs/run"}


def test_floats_that_yaml_1_1_reads_as_text(tmp_path: Path) -> None:
    text = """
model: {name_or_path: tiny, revision: 12e4567}
data: {train: train.jsonl}
training:
  learning_rate: 2e-4
  weight_decay: 1
  run_name: 1e4
  lr_scheduler_kwargs: {min_lr: 1e-5, name: 12e4567}
"""
    run = read_run_file(write(tmp_path, text), ["training.adam_epsilon=1e-6"])
    assert run.training["learning_rate"] == 2e-4
    assert run.training["weight_decay"] == 1.0
    assert run.training["adam_epsilon"] == 1e-6
    assert run.training["run_name"] == "1e4"
    assert run.training["lr_scheduler_kwargs"] == {"min_lr": 1e-5, "name": "12e4567"}
    assert run.model.revision == "12e4567"


def test_set_is_read_as_yaml_and_makes_sections(tmp_path: Path) -> None:
    run = read_run_file(
        write(tmp_path, MINIMAL),
        [
            "training.max_steps=5",
            "peft.target_modules=[q_proj, v_proj]",
            "acceleration.plugins.training.fused_ops_and_kernels.fast_loss=fused_linear",
            "training.resume_from_checkpoint=true",
            "training.run_name=a=b",
        ],
    )
    assert run.training["max_steps"] == 5
    assert run.training["run_name"] == "a=b"
    assert run.peft == {"target_modules": ["q_proj", "v_proj"]}
    assert run.acceleration == {"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": "fused_linear"}}}}
    assert run.resume is True


def test_set_null_takes_a_section_away(tmp_path: Path) -> None:
    assert read_run_file(write(tmp_path, {**MINIMAL, "peft": {"r": 4}}), ["peft=null"]).peft is None


def test_paths_are_found_beside_the_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "a").touch()
    (elsewhere / "a").touch()
    (elsewhere / "b").touch()
    monkeypatch.chdir(elsewhere)
    run = read_run_file(write(folder, MINIMAL))
    assert run.find("a") == folder / "a"
    assert run.find("b") == Path("b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"run\.yaml.* empty"),
        ("[1]", r"run\.yaml: a run file is a mapping with the sections"),
        ("a: [", r"run\.yaml: not YAML in line"),
        ({**MINIMAL, "modle": {}}, r"run\.yaml: modle is no section of a run file .*did you mean model\?"),
        ({**MINIMAL, "training": [1]}, r"run\.yaml: training must be a mapping, but is a list"),
        ({"model": {}, "data": {"train": "x"}}, r"run\.yaml: model\.name_or_path is missing"),
        ({"model": {"name_or_path": "x"}}, r"run\.yaml: data\.train is missing"),
        ({**MINIMAL, "data": {"trian": "x"}}, r"data\.trian is no known key; did you mean data\.train\?"),
        ({**MINIMAL, "model": {"name_or_path": 3}}, r"model\.name_or_path must be a text, but is the number 3"),
        (
            {**MINIMAL, "model": {"name_or_path": "x", "dtype": "fp8"}},
            r"model\.dtype must be auto or float32 or bfloat16 or float16, but is the text 'fp8'",
        ),
        (
            {**MINIMAL, "training": {"max_steps": "many"}},
            r"training\.max_steps must be a whole number, but is the text 'many'",
        ),
        ({**MINIMAL, "training": {"max_steps": 1.5}}, r"training\.max_steps must be a whole number"),
        ({**MINIMAL, "training": {"max_steps": True}}, r"training\.max_steps must be a whole number, but is true"),
        ({**MINIMAL, "training": {"learning_rate": "fast"}}, r"training\.learning_rate must be a number"),
        (
            {**MINIMAL, "training": {"model_init_kwargs": {}}},
            r"training\.model_init_kwargs is not read here: .*section model",
        ),
        ({**MINIMAL, "training": {"output_dir": ""}}, r"training\.output_dir must be the name of a folder"),
        ({**MINIMAL, "peft": {"rank": 4}}, r"peft\.rank is no known key"),
        ({**MINIMAL, "peft": {"inference_mode": True}}, r"peft\.inference_mode is no known key"),
        (
            {**MINIMAL, "peft": {"target_modules": [1]}},
            r"peft\.target_modules must be a text or a list of a text or null",
        ),
        ({**MINIMAL, "data": {"train": "x", "eval_fraction": 2}}, r"data\.eval_fraction must lie between 0 and 1"),
        ({**MINIMAL, "data": {"train": "x", "eval": "y", "eval_fraction": 0.1}}, r"exclude each other"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_run_file(write(tmp_path, content))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        read_run_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.max_steps", r"--set: expected section\.key=value"),
        ("=5", r"--set: expected section\.key=value"),
        ("training.max_steps=[", r"--set: the value of training\.max_steps is not valid YAML"),
        ("training.max_steps=x", r"--set: training\.max_steps must be a whole number"),
        ("training.max_step=1", r"--set: training\.max_step is no known key; did you mean training\.max_steps\?"),
        ("model.name_or_path.x=1", r"--set: model\.name_or_path\.x leads through model\.name_or_path"),
    ],
)
def test_mistakes_in_set(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_run_file(write(tmp_path, MINIMAL), [assignment])
