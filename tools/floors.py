"""Builds what a package declares as the oldest of its siblings, from the tags of their releases.

    python tools/floors.py foak-fast-kernels build/floors      wheels of its siblings, for a test of that package

A floor that is not released yet must be the version in the tree, which is then built: the first release of both. A
package that uses something new of a sibling without raising its floor fails its tests beside these wheels.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from release import NotReleasable, released_floor
from workspace import PACKAGES, ROOT, Package

__all__ = ["build_floors"]


def build_floors(package: Package, target: Path) -> list[Path]:
    """Builds a wheel of each sibling of a package in the oldest version that the package admits.

    Raises:
        NotReleasable: a floor is neither released nor the version in the tree.
    """
    made = []
    for name in package.siblings:
        sibling = PACKAGES[name]
        tag = released_floor(package, name)
        if tag is None and not package.requirement(name).startswith(f">={sibling.version.removesuffix('.0')},"):
            raise NotReleasable(
                f"{package.name} requires {name}{package.requirement(name)}, whose floor is neither released nor the "
                f"{sibling.version} of this tree"
            )
        with tempfile.TemporaryDirectory() as folder:
            source = sibling.folder if tag is None else _tree_of(tag, sibling, Path(folder))
            wheels = Path(folder) / "wheels"
            line = (sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={wheels}", str(source))
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
            (wheel,) = wheels.glob("*.whl")
            target.mkdir(parents=True, exist_ok=True)
            made.append(wheel.replace(target / wheel.name))
    return made


def _tree_of(tag: str, package: Package, target: Path) -> Path:
    """Lays out a package as it was at a tag."""
    inside = package.folder.relative_to(ROOT)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", tag, str(inside)], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return target / inside


if __name__ == "__main__":
    try:
        for path in build_floors(PACKAGES[sys.argv[1]], Path(sys.argv[2])):
            print(path)
    except NotReleasable as stop:
        sys.exit(str(stop))
