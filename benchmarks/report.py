"""The tables of `benchmarks/README.md`, made from the results in `benchmarks/results/`.

python benchmarks/report.py            # prints them
python benchmarks/report.py --write    # puts them into the README, between its marks
"""

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
RESULTS = HERE / "results" / "kernels-h200.json"


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
    lines = [head, "", "| op | pass | foak, µs | of the bound | Liger, µs | plain PyTorch, µs | extra memory, MiB |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for figure in result["figures"]:
        found.setdefault((figure["op"], figure["part"]), {})[figure["implementation"]] = figure
    for (op, part), by in found.items():
        ours = by["foak"]
        cells = [op, "forward + backward" if part == "both" else part, f"**{ours['gpu']:.0f}**"]
        cells.append(f"{ours['bound'] / ours['gpu']:.0%}")
        cells += [f"{by[name]['gpu']:.0f}" if name in by else "–" for name in ("liger", "plain")]
        cells.append("" if ours["extra_mib"] is None else f"{ours['extra_mib']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(text: str) -> str:
    """The README's text with the present tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    table = kernel_table(json.loads(RESULTS.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change the README")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(kernel_table(json.loads(RESULTS.read_text(encoding="utf-8"))))
