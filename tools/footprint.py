"""What a package costs its user: bytes on the disk, and the time of its import beyond torch and transformers.

    python tools/footprint.py measure foak-core     in an environment that holds its wheel: into dist/footprint/
    python tools/footprint.py report [--write]      prints what was measured; --write: into docs/install.md

Where transformers is not installed (foak-kernels needs torch alone) the time is beyond torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from workspace import PACKAGES, ROOT

FOLDER = ROOT / "dist" / "footprint"
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- footprint: begin -->\n", "<!-- footprint: end -->"
REPEATS = 5
LIMIT_S = 0.3

PROBE = """
import importlib, importlib.util, json, sys, time, torch
if importlib.util.find_spec("transformers"):
    import transformers

def refuse(*arguments, **options):
    raise AssertionError("importing starts CUDA")

torch.cuda._lazy_init = refuse
assert importlib.util.find_spec("triton"), "without triton here this shows nothing"
before, cpu = set(sys.modules), [time.process_time()]
for module in sys.argv[1:]:
    importlib.import_module(module)
    # CPU seconds do not depend on what else the machine does.
    cpu.append(time.process_time())
new = set(sys.modules) - before
print(json.dumps({"cpu": cpu[1] - cpu[0], "used": cpu[-1] - cpu[0], "modules": len(new), "triton": "triton" in new}))
"""


def measure(name: str) -> None:
    """Measures an installed package, and holds it against what is promised of every import.

    Raises:
        AssertionError: the import starts CUDA, imports triton, or takes longer than the limit.
    """
    package = PACKAGES[name]
    files = importlib.metadata.distribution(name).files or []
    # Bytecode is written by the installer, and as large as it likes.
    size = sum(Path(str(file.locate())).stat().st_size for file in files if file.suffix != ".pyc")
    (wheel,) = (ROOT / "dist").glob(f"{name.replace('-', '_')}-{package.version}-*.whl")
    runs = []
    for _ in range(REPEATS):
        line = [sys.executable, "-c", PROBE, package.module, *used_module(name)]
        runs.append(json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout))
    assert not any(run["triton"] for run in runs), f"importing {package.module} imports triton"
    seconds = statistics.median(run["cpu"] for run in runs)
    assert seconds < LIMIT_S, f"importing {package.module} takes {seconds:.2f} s beyond torch and transformers"
    found = {
        "version": package.version,
        "wheel_bytes": wheel.stat().st_size,
        "installed_bytes": size,
        "files": sum(file.suffix != ".pyc" for file in files),
        "import_cpu_seconds": seconds,
        "used_cpu_seconds": statistics.median(run["used"] for run in runs),
        "modules": runs[0]["modules"],
        "beyond": "torch and transformers" if _has("transformers") else "torch",
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(name, json.dumps(found))


def used_module(name: str) -> list[str]:
    """What is imported when the package is used: its plugin, core's framework; of the kernels nothing more."""
    plugins = PACKAGES[name].project.get("entry-points", {}).get("foak.plugins", {})
    return [target.partition(":")[0] for target in plugins.values()] or ["foak.core.framework"] * (name == "foak-core")


def report(write: bool) -> None:
    """Prints the table of all that `measure` wrote; write: and puts it into the page."""
    lines = [
        "| package | wheel, KiB | installed, KiB | import, ms | with plugin or framework, ms | modules then | beyond |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    measured = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in PACKAGES}
    for name, found in measured.items():
        cells = (
            f"{name} {found['version']}",
            f"{found['wheel_bytes'] / 1024:.0f}",
            f"{found['installed_bytes'] / 1024:.0f}",
            f"{1000 * found['import_cpu_seconds']:.0f}",
            f"{1000 * found['used_cpu_seconds']:.0f}",
            str(found["modules"]),
            found["beyond"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    one = measured["foak-core"]
    lines += ["", f"Python {one['python']}, torch {one['torch']}; CPU time of imports, the median of several starts."]
    table = "\n".join(lines) + "\n"
    print(table)
    if not write:
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


def _has(name: str) -> bool:
    return any(distribution.metadata["Name"] == name for distribution in importlib.metadata.distributions())


if __name__ == "__main__":
    if sys.argv[1:] in (["report"], ["report", "--write"]):
        report(write="--write" in sys.argv)
    elif sys.argv[1:2] == ["measure"] and set(sys.argv[2:]) <= set(PACKAGES):
        for distribution_name in sys.argv[2:]:
            measure(distribution_name)
    else:
        sys.exit(__doc__)
