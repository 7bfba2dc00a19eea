"""Lets the tests of this folder import what lies beside them (pytest's importlib mode does not)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracker, no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
