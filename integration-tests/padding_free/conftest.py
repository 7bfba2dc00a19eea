"""Lets the tests of this folder import the families and the ragged sequences that packages test with."""

from __future__ import annotations

import sys
from pathlib import Path

for package in ("fast-kernels", "padding-free"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / package / "tests"))
