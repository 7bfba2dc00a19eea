"""The built wheels: what is in them, that none writes over another, and that all of them import side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "foak_kernels": "shared/kernels",
    "foak_core": "packages/core",
    "foak_fast_kernels": "packages/fast-kernels",
    "foak_quantized_peft": "packages/quantized-peft",
    "foak_padding_free": "packages/padding-free",
}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, built from this tree."""
    target = tmp_path_factory.mktemp("wheels")
    for folder in FOLDERS.values():
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, ROOT / folder],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    built = {path.name.split("-")[0]: path for path in target.glob("*.whl")}
    assert built.keys() == FOLDERS.keys()
    return built


def files_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def test_the_table_names_every_package() -> None:
    found = {path.parent for pattern in ("shared/*", "packages/*") for path in ROOT.glob(f"{pattern}/pyproject.toml")}
    assert found == {ROOT / folder for folder in FOLDERS.values()}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_its_own_package_and_nothing_else(wheels: dict[str, Path], name: str) -> None:
    package = name.removeprefix("foak_")
    files = files_of(wheels[name])
    code = [file for file in files if not file.split("/")[0].endswith(".dist-info")]
    assert code
    assert all(file.startswith(f"foak/{package}/") for file in code), "a file outside the package's own folder"
    assert f"foak/{package}/py.typed" in code
    source = ROOT / FOLDERS[name] / "src"
    in_tree = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert in_tree <= set(code), "a module of the tree is not in the wheel"
    assert any(file.endswith("licenses/LICENSE") for file in files)
    assert not any("test" in Path(file).parts for file in code)


def test_no_file_is_in_two_wheels(wheels: dict[str, Path]) -> None:
    counts = Counter(file for wheel in wheels.values() for file in files_of(wheel))
    assert [file for file, count in counts.items() if count > 1] == []


def test_all_wheels_import_side_by_side(wheels: dict[str, Path], tmp_path: Path) -> None:
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    assert not (tmp_path / "foak" / "__init__.py").exists()
    names = [f"foak.{name.removeprefix('foak_')}" for name in FOLDERS]
    code = "import importlib\n" + "".join(f"print(importlib.import_module({name!r}).__file__)\n" for name in names)
    # -P and the path in front: what is found must come from the wheels, and not from an editable install.
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line) for line in done.stdout.splitlines()] == [
        tmp_path / name.replace(".", "/") / "__init__.py" for name in names
    ]
