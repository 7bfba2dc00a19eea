"""The fixtures that foak-core tests the main job with, for the folders here that run it: a tiny model and run files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["tiny_model", "write_run"]

_SPEC = importlib.util.spec_from_file_location(
    "main_job_fixtures", Path(__file__).parents[1] / "packages" / "core" / "tests" / "train" / "conftest.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_fixtures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_fixtures)
tiny_model, write_run = _fixtures.tiny_model, _fixtures.write_run
