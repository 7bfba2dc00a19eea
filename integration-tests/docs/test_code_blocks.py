"""Every code block of the pages and READMEs is run, in the order of its page, in a folder of its own.

Python is executed. A configuration makes its framework and is applied to a model that fits it; a run file is trained
for a step. Of a shell's lines those of foak run, the others are held against the repository. The first block of an op's
README is its signature, and is held against the function.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from blocks import ROOT, Block, blocks_of, pages
from commands import run_line
from world import Names, World

import foak.kernels

RUN_SECTIONS = {"model", "data"}
PAGES = [page for page in pages() if any(True for _ in blocks_of(page))]


def test_every_page_is_looked_at() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "packages/core/README.md"} <= set(PAGES)
    assert sum(page.startswith("shared/kernels/src/") for page in PAGES) >= 9
    assert sum(len(list(blocks_of(page))) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blocks = list(blocks_of(page))
    shown = [(block, yaml.safe_load(block.text)) for block in blocks if block.language == "yaml"]
    configs = [block.text for block, content in shown if "plugins" in content]
    runs = [block.text for block, content in shown if set(content) >= RUN_SECTIONS]
    world = World(tmp_path, tiny_model, next(iter(configs), None), next(iter(runs), None))
    trains = any("foak train run.yaml" in block.text for block in blocks if block.language == "")
    defined: dict[str, Any] = {}
    for block in blocks:
        if page.startswith("shared/kernels/src/") and block is blocks[0]:
            check_signatures(block)
        elif block.language == "python":
            run_python(block, world, defined)
        elif block.language == "yaml":
            run_yaml(block, world, trained=trains and block.text == world.run)
        elif block.language in ("", "bash", "console"):
            for line in block.text.splitlines():
                run_line(line, world)
        elif block.language == "toml":
            assert tomllib.loads(block.text)
        else:
            # A listing or a figure, not code; anything that is code must be run.
            assert block.language == "text", f"{block}: no test runs a block of {block.language!r}"
    capsys.readouterr()


def run_python(block: Block, world: World, defined: dict[str, Any]) -> None:
    """Executes a block; functions and classes that it defines are there in later blocks of its page."""
    missing = [name for name in imported(block.text) if importlib.util.find_spec(name) is None]
    if missing:
        # It needs an environment of its own (`nox -s gptq-interop` makes one, and quantizes by the same calls).
        assert missing == ["gptqmodel"], f"{block}: {missing} is not installed"
        compile(block.text, str(block), "exec")
        return
    names = Names(world, defined)
    exec(compile("\n" * block.line + block.text, str(ROOT / block.page), "exec"), names)
    defined.update(
        {
            name: value
            for name, value in names.items()
            if isinstance(value, (type, types.FunctionType, types.ModuleType))
        }
    )
    if framework := names.get("framework"):
        framework.restore()


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
    return found


def run_yaml(block: Block, world: World, *, trained: bool) -> None:
    """Applies a configuration to a model that fits it, or trains a run file for a step unless a command does."""
    content = yaml.safe_load(block.text)
    if "plugins" in content:
        from peft import LoraConfig, get_peft_model

        from foak.core import AccelerationFramework

        framework = AccelerationFramework(content)
        base: Any = world.model_for(content)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj"]))
        report = framework.apply(model)
        assert report.patched or report.notes, f"{block}: the configuration changes nothing"
        framework.restore()
        return
    assert set(content) >= RUN_SECTIONS, f"{block}: neither a configuration nor a run file"
    if not trained:
        (world.folder / "this.yaml").write_text(block.text, encoding="utf-8")
        run_line("foak train this.yaml", world)


def check_signatures(block: Block) -> None:
    """Holds calls such as `rms_norm(x, weight=None, eps=1e-6)` against the functions: names, order and defaults."""
    code = re.sub(r"\s*#.*", "", block.text)
    calls = re.findall(r"^(?:[\w, ]+ = )?(\w+)(\(.*?\))\s*(?=^\S|\Z)", code, re.MULTILINE | re.DOTALL)
    assert calls, f"{block}: no call"
    for name, arguments in calls:
        shown = ast.parse(f"def {name}{arguments}: pass").body[0]
        assert isinstance(shown, ast.FunctionDef)
        names = {"torch": torch}
        exec(compile(ast.Module([shown], []), str(block), "exec"), names)
        documented = inspect.signature(names[name]).parameters
        actual = inspect.signature(getattr(foak.kernels, name)).parameters
        assert list(documented) == list(actual)[: len(documented)], f"{block}: {name} takes {list(actual)}"
        for parameter in documented.values():
            if parameter.default is not inspect.Parameter.empty:
                assert parameter.default == actual[parameter.name].default, f"{block}: {name}, {parameter.name}"
