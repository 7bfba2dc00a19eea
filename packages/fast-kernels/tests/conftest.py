"""Lets the tests of this folder import its tables and helpers by name; skips what needs a GPU where none is."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from storages import LivingStorages

from foak.fast_kernels.checkpointing import budget as budgets


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivingStorages]:
    """A meter of all that is allocated from here on, which the budget reads too."""
    with LivingStorages() as found:
        monkeypatch.setattr(budgets, "meter_for", lambda device: found)
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU a test marked `gpu` is skipped; the session `gpu` is the one that fails where none is."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
