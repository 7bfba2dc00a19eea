"""The checkpoints that the tests look at: those that lie here, or those that `nox -s gptq-interop` has just written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Lets the tests import what lies beside them (pytest's importlib mode does not).
sys.path.insert(0, str(Path(__file__).parent))

FOLDER = Path(os.environ.get("FOAK_GPTQ_CHECKPOINTS", Path(__file__).parent / "fixtures"))
# Where a test is a whole run of the main job, or of two processes.
FEW = {
    "train": ("autogptq-4bit-g32-asym-act", "gptqmodel-3bit-g32"),
    "distributed": ("gptqmodel-4bit-g32-act",),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "quantized" in metafunc.fixturenames:
        folders = sorted(path for path in FOLDER.iterdir() if path.is_dir())
        assert len(folders) == 13, f"{FOLDER} has {len(folders)} checkpoints; the two quantizers write 13"
        few = next((names for suffix, names in FEW.items() if metafunc.module.__name__.endswith(suffix)), None)
        folders = [folder for folder in folders if few is None or folder.name in few]
        metafunc.parametrize("quantized", folders, ids=[folder.name for folder in folders])
