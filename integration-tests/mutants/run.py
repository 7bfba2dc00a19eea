"""Shows that the suite catches known faults: each mutation, alone, must make one of its tests fail.

    nox -s mutants                          # all of them, after the same tests have passed without any
    nox -s mutants -- --only "LoRA"         # those whose name has this in it
    nox -s mutants -- --record              # writes the table of the README

A mutation is applied to a copy of its package in a temporary folder, which comes before the installed one on the path
of a process of its own: the working tree and the environment stay as they are. The process is forked from one that has
imported what takes long (torch, transformers, TRL), and nothing of foak.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import counting  # noqa: E402
import kernel_mutations  # noqa: E402
import rule_mutations  # noqa: E402
from mutation import ROOT, SOURCES, Mutation  # noqa: E402

MUTATIONS: tuple[Mutation, ...] = kernel_mutations.MUTATIONS + rule_mutations.MUTATIONS
TIMEOUT = 900  # seconds, of one mutation
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
PRELOADED = ("torch", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "trl", "hypothesis")
_FAILED, _PASSED, _BROKEN = 1, 0, 3  # pytest's exit codes; all but the first two mean that nothing was shown


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation.

    Attributes:
        killed_by: the first test that failed; None where all passed.
        problem: why nothing was shown: the tests could not be run to an end.
        seconds: how long it took.
    """

    mutation: Mutation
    killed_by: str | None
    problem: str | None
    seconds: float


def preload() -> None:
    """Imports what takes long, before anything is forked."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "foak" for name in sys.modules), "foak must be imported by each child"


def overlay(folder: Path, package: str) -> Path:
    """Copies a package into a folder; gives what must be first on the path for the copy to be what is imported."""
    copy = folder / SOURCES[package]
    shutil.copytree(ROOT / SOURCES[package], copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy.parents[1]


def fork_pytest(tests: Sequence[str], package: str, first: Path, output: Path) -> int:
    """Runs pytest in a forked process in which `package` comes from the folder `first`; gives the process's id."""
    child = os.fork()
    if child:
        return child
    status = _BROKEN
    try:
        with output.open("w", encoding="utf-8") as stream:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
        signal.alarm(TIMEOUT)
        os.chdir(ROOT)
        sys.dont_write_bytecode = True
        inherited = os.environ.get("PYTHONPATH", "")
        os.environ.update(
            PYTHONPATH=f"{first}{os.pathsep}{inherited}",
            PYTHONDONTWRITEBYTECODE="1",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
        )
        sys.path.insert(0, str(first))
        importlib.invalidate_caches()
        found = importlib.util.find_spec(f"foak.{package}")
        assert found is not None
        assert str(found.origin).startswith(str(first)), f"foak.{package} comes from {found.origin}"
        options = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-W", "ignore")
        status = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def run(mutations: Sequence[Mutation], jobs: int) -> Iterator[Outcome]:
    """Applies each mutation and runs its tests, several at a time; gives what became of them as they end."""
    waiting, running = list(reversed(mutations)), {}
    with tempfile.TemporaryDirectory(prefix="foak-mutants-") as name:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutation = waiting.pop()
                folder = Path(tempfile.mkdtemp(dir=name))
                first = overlay(folder, mutation.package)
                mutation.path_in(folder).write_text(mutation.mutated(ROOT), encoding="utf-8")
                child = fork_pytest(mutation.selected, mutation.package, first, folder / "output.txt")
                running[child] = (mutation, folder, time.monotonic())
            child, status = os.wait()
            mutation, folder, started = running.pop(child)
            printed = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
            yield judge(mutation, os.waitstatus_to_exitcode(status), printed, time.monotonic() - started)
            shutil.rmtree(folder)


def judge(mutation: Mutation, status: int, printed: str, seconds: float) -> Outcome:
    """What pytest's exit status and output say of a mutation."""
    if status == _PASSED:
        return Outcome(mutation, None, None, seconds)
    failed = re.search(r"^FAILED (\S+?::\w+)", printed, re.MULTILINE)
    if status != _FAILED or failed is None:
        return Outcome(mutation, None, f"pytest ended with {status}: {printed[-2000:]}", seconds)
    return Outcome(mutation, failed[1], None, seconds)


def check_without(mutations: Sequence[Mutation]) -> None:
    """The tests of all mutations must pass on a copy that has none of them; ends the process where one does not."""
    tests = sorted({test for mutation in mutations for test in mutation.selected})
    with tempfile.TemporaryDirectory(prefix="foak-pristine-") as name:
        first = overlay(Path(name), "core")
        output = Path(name, "output.txt")
        _, status = os.waitpid(fork_pytest(tests, "core", first, output), 0)
        if status != _PASSED:
            printed = output.read_text(encoding="utf-8")[-6000:]
            sys.exit(f"Without any mutation pytest ends with {os.waitstatus_to_exitcode(status)}:\n{printed}")


def table(outcomes: Sequence[Outcome]) -> str:
    killed = [outcome for outcome in outcomes if outcome.killed_by]
    lines = [f"{len(killed)} of {len(outcomes)} mutations killed.", "", "| fault | caught by |", "|---|---|"]
    for outcome in outcomes:
        test = f"`{(outcome.killed_by or 'nothing').rpartition('/')[2]}`"
        lines.append(f"| {outcome.mutation.name} | {test} |")
    return "\n".join(lines)


def record(outcomes: Sequence[Outcome], readme: Path) -> None:
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    readme.write_text(f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{after}", encoding="utf-8")
    killed = sum(outcome.killed_by is not None for outcome in outcomes)
    counting.record({"mutants": {"mutations": len(outcomes), "killed": killed}}, readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of the mutations to run")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--record", action="store_true", help="write the table into the README")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutation first")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if arguments.only in mutation.name]
    for mutation in chosen:
        mutation.mutated(ROOT)  # those that are out of date are named before any time is spent
        mutation.check_tests(ROOT)
    preload()
    if not arguments.trust:
        check_without(chosen)
    outcomes = []
    for outcome in run(chosen, arguments.jobs):
        outcomes.append(outcome)
        verdict = outcome.killed_by or outcome.problem or "SURVIVED"
        print(f"{outcome.seconds:6.1f} s  {outcome.mutation.name}: {verdict}", flush=True)
    outcomes.sort(key=lambda outcome: chosen.index(outcome.mutation))
    if arguments.record and len(chosen) == len(MUTATIONS):
        record(outcomes, ROOT / "integration-tests" / "README.md")
    alive = [outcome.mutation.name for outcome in outcomes if outcome.killed_by is None]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutations killed")
    if alive:
        sys.exit("Not killed: " + "; ".join(alive))


if __name__ == "__main__":
    main()
