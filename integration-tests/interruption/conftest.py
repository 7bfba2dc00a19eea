"""The tiny model and the run files that the main job is tested with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

_SPEC = importlib.util.spec_from_file_location(
    "main_job_fixtures", Path(__file__).parents[2] / "packages" / "core" / "tests" / "train" / "conftest.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_fixtures = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_fixtures)
tiny_model, write_run = _fixtures.tiny_model, _fixtures.write_run
