"""The scripts of `benchmarks/`, loaded from their files, and what they import beside themselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# What a script's own folder is to it when it is run.
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """A function that loads a script by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"foak_benchmarks_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
