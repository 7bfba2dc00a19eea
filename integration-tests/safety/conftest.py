"""The tiny model and the run files that the main job is tested with."""

from __future__ import annotations

from main_job import tiny_model, write_run

__all__ = ["tiny_model", "write_run"]
