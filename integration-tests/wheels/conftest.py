"""The artefacts of every package: those in the folder that $FOAK_DIST names, or built from this tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from release import build
from workspace import PACKAGES


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of every package, built once for all worker processes."""
    if given := os.environ.get("FOAK_DIST"):
        return Path(given)
    from filelock import FileLock  # of torch's requirements; where the artefacts are given there may be no torch

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            for package in PACKAGES.values():
                build(package, folder)
    return folder
