"""The tables of `benchmarks/README.md`, made from the results in `benchmarks/results/`.

python benchmarks/report.py            # prints them
python benchmarks/report.py --write    # puts them into the README, between their marks
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # loaded by its path, as a test does
    sys.path.insert(0, str(HERE))

from foak_bench.ragged import ragged_table  # noqa: E402
from foak_bench.records import Record, load_results  # noqa: E402
from foak_bench.tables import full_table, kernel_contribution_table, lora_table, markdown  # noqa: E402

README = HERE / "README.md"
RESULTS = HERE / "results"
KERNEL_RESULTS = RESULTS / "kernels-h200.json"

HOST_BUDGET = {"forward": 40, "backward": 60, "both": 100}
"""Microseconds that one eager call may cost on the host."""


RAGGED = "-ragged"
"""Ends the names of folders of results on ragged data, and on the dense batches that were measured beside them."""


def training_results(*, ragged: bool = False) -> dict[str, dict[str, Record]]:
    """The records of every GPU: the folders below `results/`, by name; those of ragged data or the others."""
    folders = (folder for folder in sorted(RESULTS.iterdir()) if folder.is_dir())
    return {folder.name: load_results(folder) for folder in folders if folder.name.endswith(RAGGED) is ragged}


def kernel_table(result: dict[str, Any]) -> str:
    """One row for each pass of each op, our figures beside those of the others of the same run."""
    sizes = result["sizes"]
    head = (
        f"{result['device']}, torch {result['torch']}, Triton {result['triton']}, "
        f"foak-kernels {result['foak_kernels']}, {result['dtype']}; "
        f"{sizes['tokens']} tokens, H {sizes['hidden']}, I {sizes['intermediate']}, "
        f"{sizes['q_heads']} query and {sizes['k_heads']} key heads of {sizes['head']}, V {sizes['vocabulary']}. "
        f"Bounds of this run: copy {result['bytes_per_second'] / 1e12:.2f} TB/s (read + written), "
        f"matmul {result['flops_per_second'] / 1e12:.0f} TFLOP/s."
    )
    header = ["op", "pass", "foak, µs", "of the bound", "Liger, µs", "plain PyTorch, µs", "extra memory, MiB"]
    rows = []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in result["figures"]:
        found.setdefault((figure["op"], figure["part"]), {})[figure["implementation"]] = figure
    for (op, part), by in found.items():
        ours = by["foak"]
        cells = [op, "forward + backward" if part == "both" else part, f"**{ours['gpu']:.0f}**"]
        cells.append(f"{ours['bound'] / ours['gpu']:.0%}")
        (other, figure), *_ = [(name, by[name]) for name in by if name not in ("foak", "plain")] or [("", None)]
        named = "" if other in ("liger", "") else f" ({other})"
        cells.append("–" if figure is None else f"{figure['gpu']:.0f}{named}")
        cells.append(f"{by['plain']['gpu']:.0f}")
        cells.append("" if ours["extra_mib"] is None else f"{ours['extra_mib']:.0f}")
        rows.append(cells)
    return f"{head}\n\n{markdown(header, rows)}"


def host_table(result: dict[str, Any]) -> str:
    """What an eager call costs on the host, ours beside the others', and whether ours keeps its budget."""
    costs: dict[str, dict[tuple[str, str], float]] = {}
    for figure in result["figures"]:
        if figure["host"] is not None:
            costs.setdefault(figure["op"], {})[figure["implementation"], figure["part"]] = figure["host"]
    header = ["op", "foak: forward, µs", "forward + backward, µs", "Liger", "plain PyTorch", "in the budget"]
    rows = []
    for op, by in costs.items():
        parts = [part for part in ("forward", "both") if ("foak", part) in by]
        kept = all(by["foak", part] <= HOST_BUDGET[part] for part in parts)
        ours = [f"**{by['foak', part]:.0f}**" if part in parts else "–" for part in ("forward", "both")]
        others = [
            " / ".join(f"{by[name, part]:.0f}" for part in parts if (name, part) in by) or "–"
            for name in ("liger", "plain")
        ]
        rows.append([op, *ours, *others, "yes" if kept else "no"])
    budget = f"{HOST_BUDGET['forward']} µs for a forward, {HOST_BUDGET['both']} µs with its backward"
    return f"{result['device']}, torch {result['torch']}; the budget is {budget}.\n\n{markdown(header, rows)}"


def _kernel_result() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(KERNEL_RESULTS.read_text(encoding="utf-8"))
    return content


TABLES: dict[str, Callable[[], str]] = {
    "full fine-tuning": lambda: full_table(training_results()),
    "lora": lambda: lora_table(training_results()),
    "ragged": lambda: ragged_table(training_results(ragged=True)),
    "one kernel at a time": lambda: kernel_contribution_table(training_results()),
    "kernels": lambda: kernel_table(_kernel_result()),
    "host": lambda: host_table(_kernel_result()),
}
"""What stands between the marks of each name in the README."""


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replaced(text: str) -> str:
    """The README's text with the present tables between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    for name, table in TABLES.items():
        begin, end = marks(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{README} has no {begin} … {end}")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change the README")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{table()}" for name, table in TABLES.items()))
