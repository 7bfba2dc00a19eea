"""The tiny model and the run files that the main job is tested with."""

from __future__ import annotations

import sys
from pathlib import Path

from main_job import tiny_model, write_run

__all__ = ["tiny_model", "write_run"]

sys.path.insert(0, str(Path(__file__).parent))
