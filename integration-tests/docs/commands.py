"""Runs, or holds against what it would run, each line of a shell block."""

from __future__ import annotations

import ast
import shlex
import sys

from blocks import ROOT
from packaging.requirements import Requirement
from world import World, run_overrides

from foak.core.cli.app import main

__all__ = ["run_line"]

sys.path.insert(0, str(ROOT / "tools"))

from workspace import PACKAGES, package_of_tag

# What the pages install beside foak itself.
OTHERS = {"nox", "gptqmodel", "optimum"}


def run_line(line: str, world: World) -> None:
    """One line of a shell block: commands of foak run in the page's folder, others are held against the repository."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    match words:
        case ["pip", "install", *what]:
            _pip(what)
        case ["nox", *options]:
            _nox(options)
        case ["foak", *arguments]:
            _foak(arguments, world)
        case ["accelerate", "launch", *options]:
            _accelerate(options, world)
        case ["python", script, *options]:
            _script(script, options)
        case ["pytest", folder, *_]:
            assert (ROOT / folder).is_dir(), f"{line}: there is no {folder}"
        case ["git", "push", "origin", "HEAD", tag]:
            package_of_tag(tag)
        case _:
            raise AssertionError(f"{line!r} is a command that no test knows: integration-tests/docs/commands.py")


def _pip(what: list[str]) -> None:
    for item in what:
        if item.startswith("./"):
            folder, _, extra = item.partition("[")
            (package,) = (package for package in PACKAGES.values() if package.folder == (ROOT / folder).resolve())
            extras = {extra.removesuffix("]")} - {""}
        else:
            requirement = Requirement(item)
            if requirement.name in OTHERS:
                continue
            package, extras = PACKAGES[requirement.name], requirement.extras
        assert extras <= set(package.project.get("optional-dependencies", {})), f"{item}: there is no such extra"


def _nox(options: list[str]) -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions: set[str] = set()
    for node in tree.body:
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator).startswith("nox.session"):
                assert isinstance(node, ast.FunctionDef)
                named = [k.value for k in getattr(decorator, "keywords", ()) if k.arg == "name"]
                sessions.add(ast.literal_eval(named[0]) if named else node.name)
    match options:
        case ["-l"]:
            pass
        case ["-s", *rest]:
            wanted = rest[: rest.index("--")] if "--" in rest else rest
            for session in wanted:
                name, _, pkg = session.partition("(")
                assert name in sessions, f"there is no session {name}"
                assert not pkg or pkg.removesuffix(")") in {*PACKAGES, "all"}, f"{session}: there is no such package"
            if wanted == ["release"]:
                assert set(rest[rest.index("--") + 1 :]) <= {*PACKAGES, "--dry-run", "minor", "patch"}
        case _:
            raise AssertionError(f"nox {options}")


def _foak(arguments: list[str], world: World) -> None:
    if arguments[0] == "train":
        if "training.resume_from_checkpoint=true" in arguments:
            _foak(["train", arguments[1], "--set", "training.save_steps=1"], world)
            arguments = [*arguments, "--set", "training.max_steps=2"]
        arguments = [*arguments[:2], *_but_saving(arguments), *arguments[2:]]
        # Last wins; the length of the run is the test's.
        arguments += ["--set", f"training.max_steps={2 if 'training.max_steps=2' in arguments else 1}"]
    # In this process: a start of Python with torch and TRL takes longer than all that it would do.
    assert main(arguments) == 0, f"foak {shlex.join(arguments)}"


def _accelerate(options: list[str], world: World) -> None:
    """What accelerate would start in each process (the tests of several processes start it)."""
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_args(options)
    assert given.module
    assert given.training_script == "foak.core"
    _foak(given.training_script_args, world)


def _but_saving(arguments: list[str]) -> list[str]:
    """The options that make a run short; one that is resumed, or will be, saves its checkpoints."""
    saving = any(word.startswith(("training.save_steps", "training.resume")) for word in arguments)
    short = run_overrides()
    return [word.replace("save_strategy=no", "save_strategy=steps") if saving else word for word in short]


def _script(script: str, options: list[str]) -> None:
    """A script that takes minutes, or a GPU, and has tests of its own: it is there and knows the options."""
    assert (ROOT / script).is_file(), f"there is no {script}"
    source = (ROOT / script).read_text(encoding="utf-8")
    for option in options:
        if option.startswith("--"):
            assert f'"{option.partition("=")[0]}"' in source, f"{script} knows no {option}"
    if script.startswith("tools/") and options:
        assert f'"{options[0]}"' in source, f"{script} knows no {options[0]}"
