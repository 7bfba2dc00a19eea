"""Lets the tests of this folder import what lies beside them, and the families that foak-fast-kernels tests with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "fast-kernels" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        from cases import COVERING, EVERY

        chosen = EVERY if metafunc.config.getoption("full") else COVERING
        metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
