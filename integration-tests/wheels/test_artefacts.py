"""The built wheels and sdists: exactly the files of the package, none of them in two wheels, and what pip reads."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from collections import Counter
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from workspace import PACKAGES, ROOT, Package

EVERY = pytest.mark.parametrize("name", PACKAGES)


def wheel_of(dist: Path, package: Package) -> zipfile.ZipFile:
    return zipfile.ZipFile(dist / f"{package.name.replace('-', '_')}-{package.version}-py3-none-any.whl")


def files_of(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if not name.endswith("/")]


def in_tree(package: Package, *folders: str) -> set[str]:
    """The files of a package's folders that git knows or would take, relative to the package."""
    line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(line, cwd=package.folder, check=True, capture_output=True, text=True).stdout.splitlines()
    return {file for file in listed if (package.folder / file).exists()}


def metadata_of(dist: Path, package: Package) -> Message:
    with wheel_of(dist, package) as wheel:
        (file,) = (name for name in files_of(wheel) if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(file).decode())


def canonical(lines: list[str]) -> set[tuple[str, str, str]]:
    requirements = [Requirement(line) for line in lines]
    return {(canonicalize_name(line.name), str(line.specifier), str(line.marker)) for line in requirements}


def test_the_folder_holds_a_wheel_and_an_sdist_of_every_package(dist: Path) -> None:
    stems = {f"{package.name.replace('-', '_')}-{package.version}" for package in PACKAGES.values()}
    wanted = {f"{stem}{ending}" for stem in stems for ending in ("-py3-none-any.whl", ".tar.gz")}
    assert {path.name for path in dist.iterdir() if path.is_file()} == wanted


@EVERY
def test_a_wheel_holds_the_files_of_its_package_and_nothing_else(dist: Path, name: str) -> None:
    package = PACKAGES[name]
    with wheel_of(dist, package) as wheel:
        files = set(files_of(wheel))
    info = f"{name.replace('-', '_')}-{package.version}.dist-info"
    code = {file.removeprefix("src/") for file in in_tree(package, "src")}
    about = {f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD", f"{info}/licenses/LICENSE"}
    if {"scripts", "entry-points"} & set(package.project):
        about.add(f"{info}/entry_points.txt")
    assert files == code | about
    inside = f"{package.module.replace('.', '/')}/"
    assert all(file.startswith(inside) for file in code), "a file beside the package's own folder"
    assert f"{inside}py.typed" in code


@EVERY
def test_an_sdist_holds_the_package_its_tests_and_its_texts(dist: Path, name: str) -> None:
    package = PACKAGES[name]
    stem = f"{name.replace('-', '_')}-{package.version}"
    with tarfile.open(dist / f"{stem}.tar.gz") as archive:
        files = {member.name.removeprefix(f"{stem}/") for member in archive if member.isfile()}
    texts = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    # hatchling adds the root's .gitignore, so that what is built from the sdist leaves out the same files.
    assert files == in_tree(package, "src", "tests") | texts | {"PKG-INFO", ".gitignore"}


def test_no_file_is_in_two_wheels(dist: Path) -> None:
    counts: Counter[str] = Counter()
    for package in PACKAGES.values():
        with wheel_of(dist, package) as wheel:
            counts.update(files_of(wheel))
    assert [file for file, count in counts.items() if count > 1] == []


@EVERY
def test_the_metadata_says_what_the_project_says(dist: Path, name: str) -> None:
    package, found = PACKAGES[name], metadata_of(dist, PACKAGES[name])
    project = package.project
    assert (found["Name"], found["Version"]) == (name, package.version)
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Requires-Python"] == project["requires-python"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (package.folder / "README.md").read_text(encoding="utf-8")
    extras = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"]]
    wanted += [f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
    assert canonical(found.get_all("Requires-Dist") or []) == canonical(wanted)
    assert (found.get_all("Provides-Extra") or []) == list(extras)


@EVERY
def test_every_licence_is_the_one_of_the_repository(name: str) -> None:
    assert (PACKAGES[name].folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
