"""What comes in a file is data: no pickled weights, no code beside a model, no shell, no eval, unless asked for."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from foak.core import AccelerationFramework, ConfigError
from foak.core.train.job import Job
from foak.core.train.runfile import read_run_file

RunWriter = Callable[..., Path]
ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("shared/*/src/**/*.py")])
NF4 = {"plugins": {"peft": {"quantization": {"bitsandbytes": {"quant_type": "nf4"}}}}}


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


@pytest.fixture
def pickled(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model, its weights in a file of torch.save."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def job(path: Path, *overrides: str) -> Job:
    return Job(read_run_file(path, overrides), Console(quiet=True))


@pytest.mark.parametrize("acceleration", [None, NF4], ids=["plain", "NF4"])
def test_pickled_weights_are_refused_by_name_unless_asked_for(
    acceleration: dict[str, Any] | None, write_run: RunWriter, pickled: Path
) -> None:
    path = write_run(model={"name_or_path": str(pickled)}, acceleration=acceleration)
    with pytest.raises(ConfigError, match=r"model\.name_or_path .*pytorch_model\.bin.*model\.pickled_weights: true"):
        job(path)
    assert job(path, "model.pickled_weights=true").trainer.model is not None


def test_a_pickle_beside_other_safetensors_is_not_read_either(write_run: RunWriter, pickled: Path) -> None:
    save_file({"a": torch.zeros(1)}, pickled / "other.safetensors")
    with pytest.raises(ConfigError, match=r"model\.name_or_path .*cannot be loaded"):
        job(write_run(model={"name_or_path": str(pickled)}))


@pytest.mark.parametrize("allowed", ["false", "true"])
def test_no_code_of_a_weight_file_runs_even_where_it_is_allowed(
    allowed: str, write_run: RunWriter, pickled: Path, tmp_path: Path
) -> None:
    """`torch.load` of transformers takes weights only; the refusal comes before."""
    place = tmp_path / "ran"
    with (pickled / "pytorch_model.bin").open("wb") as stream:
        pickle.dump(Planted(place), stream)
    with pytest.raises(ConfigError, match=r"model\.name_or_path"):
        job(write_run(model={"name_or_path": str(pickled)}), f"model.pickled_weights={allowed}")
    assert not place.exists()


@pytest.mark.parametrize("acceleration", [None, NF4], ids=["plain", "NF4"])
def test_no_code_that_comes_with_a_model_runs_unless_asked_for(
    acceleration: dict[str, Any] | None, write_run: RunWriter, tiny_model: Path, tmp_path: Path
) -> None:
    folder, place = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content["auto_map"] = {"AutoConfig": "planted.PlantedConfig", "AutoModelForCausalLM": "planted.PlantedModel"}
    content["model_type"] = "planted"
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "planted.py").write_text(f"open({str(place)!r}, 'w').close()\n", encoding="utf-8")
    path = write_run(model={"name_or_path": str(folder)}, acceleration=acceleration)
    with pytest.raises(ConfigError, match=r"model\.name_or_path"):
        job(path)
    assert not place.exists()
    with pytest.raises((ConfigError, AttributeError, RuntimeError)):  # it runs, and has no such class
        job(path, "model.trust_remote_code=true")
    assert place.exists()


HOSTILE = ("$(touch {0})", "`touch {0}`", "; touch {0}", "__import__('pathlib').Path('{0}').touch()", "{{{{ 7 * 7 }}}}")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_run_file_says_is_text(text: str, write_run: RunWriter, tmp_path: Path) -> None:
    place = tmp_path / "ran"
    written = text.format(place)
    for section in ({"model": {"name_or_path": written}}, {"data": {"train": written}}):
        with pytest.raises(ConfigError):
            job(write_run(**section))
    with pytest.raises(ConfigError):
        job(write_run(), f"training.learning_rate={written}")
    with pytest.raises(ConfigError):
        AccelerationFramework({"plugins": {written: {}}})
    assert not place.exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch {0}']", "!!python/name:os.system"])
def test_yaml_makes_no_objects(tag: str, write_run: RunWriter, tmp_path: Path) -> None:
    place, path = tmp_path / "ran", tmp_path / "foak.yaml"
    path.write_text(f"plugins: {tag.format(place)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=str(path)):
        AccelerationFramework(path)
    run = write_run()
    content = yaml.safe_load(run.read_text(encoding="utf-8"))
    run.write_text(yaml.safe_dump(content) + f"peft: {tag.format(place)}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=str(run)):
        read_run_file(run, ())
    assert not place.exists()


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


FORBIDDEN = ("eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_has_a_way_to_run_text(path: Path) -> None:
    for name, node in calls(ast.parse(path.read_text(encoding="utf-8"))):
        assert name not in FORBIDDEN, f"{name} in line {node.lineno}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert keywords.get("shell") != "True", f"a shell in line {node.lineno}"
        assert not name.startswith("subprocess."), f"{name} in line {node.lineno}"
        if name == "torch.load":
            assert keywords.get("weights_only") == "True", f"line {node.lineno}"
        assert keywords.get("trust_remote_code") != "True", f"line {node.lineno}"
