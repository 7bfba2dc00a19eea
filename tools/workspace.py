"""The packages of this repository: what each requires, which version it has, and which of them a change touches.

Standard library alone: the noxfile imports it, and so do the scripts beside it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "ROOT", "Package", "affected", "closure", "floors", "package_of_tag", "third_party"]

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_TAG = re.compile(r"(?P<name>foak-[a-z-]+)-v(?P<version>\d+(\.\d+)*)")


@dataclass(frozen=True)
class Package:
    """One distribution of this repository.

    Attributes:
        name: of the distribution, such as `foak-fast-kernels`.
        folder: where its pyproject.toml is.
        siblings: the distributions of this repository that it requires, by name.
    """

    name: str
    folder: Path
    siblings: tuple[str, ...]

    @property
    def module(self) -> str:
        """What is imported, such as `foak.fast_kernels`."""
        return "foak." + self.name.removeprefix("foak-").replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of the imported package."""
        return self.folder / "src" / self.module.replace(".", "/")

    @property
    def project(self) -> dict[str, Any]:
        """The table `project` of its pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return table

    @property
    def version_file(self) -> Path:
        return self.source / "_version.py"

    @property
    def version(self) -> str:
        """The version in `_version.py`."""
        found = _VERSION.search(self.version_file.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError(f'{self.version_file}: no line __version__ = "…"')
        return found[1]

    def set_version(self, version: str) -> None:
        text = self.version_file.read_text(encoding="utf-8")
        self.version_file.write_text(_VERSION.sub(f'__version__ = "{version}"', text), encoding="utf-8")

    @property
    def tag(self) -> str:
        """The tag that releases the version in the tree."""
        return f"{self.name}-v{self.version}"

    def requirement(self, sibling: str) -> str:
        """What it requires of a sibling, such as `>=0.1,<0.2`."""
        (line,) = (line for line in self.project["dependencies"] if _name(line) == sibling)
        return str(line[len(sibling) :])


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    if found is None:
        raise ValueError(f"{requirement!r} names no package")
    return found[0]


def discover(root: Path) -> dict[str, Package]:
    """The packages below a root by name, each after the siblings that it requires."""
    found: dict[str, Package] = {}
    for file in sorted([*root.glob("shared/*/pyproject.toml"), *root.glob("packages/*/pyproject.toml")]):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        siblings = tuple(name for line in project["dependencies"] if (name := _name(line)).startswith("foak-"))
        found[project["name"]] = Package(project["name"], file.parent, siblings)
    ordered: dict[str, Package] = {}

    def add(name: str) -> None:
        for sibling in found[name].siblings:
            add(sibling)
        ordered.setdefault(name, found[name])

    for name in found:
        add(name)
    return ordered


PACKAGES = discover(ROOT)


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


def third_party(package: Package, *, extras: bool) -> list[str]:
    """What a package requires from elsewhere; extras: those of its optional dependencies too."""
    lines = list(package.project["dependencies"])
    if extras:
        lines += [line for extra in package.project.get("optional-dependencies", {}).values() for line in extra]
    return [line for line in lines if _name(line) not in PACKAGES]


def floors() -> dict[str, str]:
    """The lower bound that the packages declare for each requirement from elsewhere, extras too.

    Raises:
        ValueError: a requirement without a lower bound, or with two of them: one environment tests them all.
    """
    found: dict[str, str] = {}
    for package in PACKAGES.values():
        for line in third_party(package, extras=True):
            name, separator, version = line.partition(">=")
            if not separator or not re.fullmatch(r"[\d.]+", version):
                raise ValueError(f"{package.name}: {line!r} is not name>=version")
            if found.setdefault(name, version) != version:
                raise ValueError(f"{package.name}: {line!r}, but another package declares >={found[name]}")
    return found


def affected(files: Iterable[str]) -> list[str]:
    """The packages whose tests a change of these files (relative to the root) can change, dependants included.

    A file outside of the packages and their texts (the constraints, the tools) touches all of them.
    """
    touched: set[str] = set()
    for file in files:
        if file.startswith(("docs/", "examples/", "benchmarks/", "integration-tests/")) or file.endswith(".md"):
            continue
        owner = [name for name, package in PACKAGES.items() if (ROOT / file).is_relative_to(package.folder)]
        touched.update(owner or PACKAGES)
    return [name for name in PACKAGES if touched & {package.name for package in closure([name])}]


def package_of_tag(tag: str) -> tuple[Package, str]:
    """The package and the version that a tag such as `foak-core-v0.1.0` names.

    Raises:
        ValueError: it names none.
    """
    found = _TAG.fullmatch(tag)
    if found is None or found["name"] not in PACKAGES:
        raise ValueError(f"{tag!r} is no tag of a release: PACKAGE-vVERSION, with {', '.join(PACKAGES)}")
    return PACKAGES[found["name"]], found["version"]
