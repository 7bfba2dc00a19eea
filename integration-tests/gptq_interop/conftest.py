"""The checkpoints that the tests look at: those that lie here, or those that `nox -s gptq-interop` has just written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FOAK_GPTQ_CHECKPOINTS", Path(__file__).parent / "fixtures"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "quantized" in metafunc.fixturenames:
        folders = sorted(path for path in FOLDER.iterdir() if path.is_dir())
        assert len(folders) == 13, f"{FOLDER} has {len(folders)} checkpoints; the two quantizers write 13"
        metafunc.parametrize("quantized", folders, ids=[folder.name for folder in folders])
