"""Measures training scenarios: each through `foak train`'s own job, in a process of its own.

    python benchmarks/run.py --set smoke --out /tmp/smoke                  # seconds, on a CPU
    python benchmarks/run.py --set h200 --out benchmarks/results/h200      # on a GPU
    python benchmarks/run.py --set full --filter '*lora*/foak*' --repeats 1

What is finished below --out is not measured again. Exit code 1: a scenario failed; what cannot run here, or does not
fit into memory, is recorded with the reason and is no failure.
"""

import argparse
import fnmatch
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from foak_bench.records import FAILED, Record, load_results
from foak_bench.runner import Runner
from foak_bench.scenarios import FP32, Scenario, read_table
from foak_bench.tables import terminal_tables
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foak.core.errors import ConfigError

HERE = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        sets = read_table().sets
        if options.set not in sets:
            raise ConfigError(f"--set: there is no {options.set!r}; there are {', '.join(sets)}")
        chosen = sets[options.set]
        scenarios = select(chosen.scenarios, options.filter)
    except ConfigError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    if options.list:
        for scenario in scenarios:
            console.print(scenario.name, highlight=False, soft_wrap=True)
        return 0
    options.scratch.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task = progress.add_task("measuring")

    def report(scenario: Scenario, record: Record | None) -> None:
        if record is None:
            progress.update(task, description=escape(scenario.name))
            return
        console.print(_line(scenario, record), highlight=False, markup=False, soft_wrap=True)
        progress.advance(task)

    runner = Runner(
        options.out,
        options.scratch,
        repeats=options.repeats or chosen.repeats,
        share=chosen.share if options.share is None else options.share,
        timeout=options.timeout,
        devices=torch.cuda.device_count(),
        commit=options.commit or _commit(),
        report=report,
    )
    with progress:
        due = runner.plan(scenarios, again=options.again)
        progress.reset(task, total=len(due))
        console.print(f"{len(due)} measurements to make; records go to {options.out}", highlight=False, soft_wrap=True)
        runner.run(due)
    console.print(terminal_tables(load_results(options.out)))
    return 1 if any(record.status == FAILED for record in runner.records.values()) else 0


def select(scenarios: tuple[Scenario, ...], pattern: str | None) -> tuple[Scenario, ...]:
    """The scenarios whose name matches a shell pattern or holds it as a part, with what judges them.

    Raises:
        ConfigError: none does.
    """
    if pattern is None:
        return scenarios
    kept = {s.name for s in scenarios if pattern in s.name or fnmatch.fnmatchcase(s.name, pattern)}
    if not kept:
        raise ConfigError(f"--filter: no scenario is named like {pattern!r}; --list shows their names")
    # A row without the losses that it is held against would have no verdict; those of plain are its check's or its own.
    labels = {(s.group, s.row.label) for s in scenarios if s.name in kept}
    judges = {(group, label) for group, _ in labels for label in (FP32, "plain")}
    kept |= {s.name for s in scenarios if s.check and (s.group, s.row.label) in labels | judges}
    checked = {s.group for s in scenarios if s.check and s.row.label == "plain"}
    kept |= {s.name for s in scenarios if s.group not in checked and (s.group, s.row.label) in judges}
    return tuple(s for s in scenarios if s.name in kept)


def _line(scenario: Scenario, record: Record) -> str:
    if not record.runs:
        return f"{scenario.name}: {record.status}: {record.reason}"
    last = record.runs[-1]
    return (
        f"{scenario.name}: {last['tokens_per_second']:,.0f} tokens/s, {last['peak_allocated_bytes'] / 2**30:.2f} GiB, "
        f"loss {last['loss'][0]:.4f} → {last['loss'][-1]:.4f} "
        f"({last['build_seconds']:.0f} s to build, {last['train_seconds']:.0f} s of training)"
    )


def _commit() -> str | None:
    """The commit of the tree, marked where files differ from it; None outside a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="run.py", description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", default="full", help="which set of scenarios.yaml (full)")
    parser.add_argument("--filter", metavar="PATTERN", help="only scenarios whose name holds or matches this")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="results (runs/bench)")
    parser.add_argument("--repeats", type=int, metavar="N", help="how often each row is measured (the set's own)")
    parser.add_argument("--again", action="store_true", help="measure what is finished as well, and forget the old")
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument(
        "--share",
        action=argparse.BooleanOptionalAction,
        help="let scenarios follow each other in one process where that is safe (the set's own)",
    )
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds for one scenario (1800)")
    parser.add_argument("--commit", help="what the tree is at, where there is no git to ask")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()) / "foak-bench",
        metavar="DIR",
        help="logs, and checkpoints that must be loaded; may be lost",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
