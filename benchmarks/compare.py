"""Compares two folders of results: throughput, peak memory and loss of every scenario that both measured.

    python benchmarks/compare.py benchmarks/results/h200 runs/bench

Draws a scatter plot for each (REF on x, NEW on y, the line y = x and the band of the threshold) and names what lies
outside. Exit code 0: nothing became worse beyond its threshold; 1: something did; 2: nothing could be compared.
"""

import argparse
import sys
from pathlib import Path

from foak_bench.comparison import Comparison, Thresholds, compare
from foak_bench.plots import draw
from foak_bench.records import load_results
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        thresholds = Thresholds(options.throughput, options.memory, options.loss)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    comparison = compare(load_results(options.reference), load_results(options.new), thresholds)
    console.print(table_of(comparison))
    for note in comparison.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for found in comparison.outliers:
        console.print(
            f"{found.outcome}: {found.scenario}: {found.metric} {found.reference:,.4g} → {found.new:,.4g} "
            f"({found.change:+.1%})",
            style="green" if found.outcome == "better" else "red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if not comparison.differences and not comparison.regressions:
        console.print("There is no scenario that both folders measured.", style="red")
        return 2
    for path in draw(comparison, thresholds, options.plots or options.new / "comparison"):
        console.print(f"plot: {path}", highlight=False, markup=False, soft_wrap=True)
    for regression in comparison.regressions:
        console.print(f"regression: {regression}", style="red", highlight=False, markup=False, soft_wrap=True)
    return 1 if comparison.regressions else 0


def table_of(comparison: Comparison) -> Table:
    """One row for each scenario: every figure's change, coloured where it is beyond its threshold."""
    metrics = list(dict.fromkeys(found.metric for found in comparison.differences))
    table = Table("scenario", *metrics)
    by_name: dict[str, dict[str, str]] = {}
    colours = {"equal": "", "better": "green", "worse": "red"}
    for found in comparison.differences:
        text = f"{found.change:+.1%}"
        colour = colours[found.outcome]
        by_name.setdefault(found.scenario, {})[found.metric] = f"[{colour}]{text}[/]" if colour else text
    for name, cells in by_name.items():
        table.add_row(escape(name), *(cells.get(metric, "") for metric in metrics))
    return table


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="compare.py", description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Thresholds()
    parser.add_argument("reference", type=Path, metavar="REF", help="a folder of results, such as those kept here")
    parser.add_argument("new", type=Path, metavar="NEW", help="the folder of the run to judge")
    for name in ("throughput", "memory", "loss"):
        value = getattr(defaults, name)
        what = f"how far {name} may get worse, relative to REF ({value})"
        parser.add_argument(f"--{name}", type=float, default=value, metavar="SHARE", help=what)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where to draw (NEW/comparison)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
