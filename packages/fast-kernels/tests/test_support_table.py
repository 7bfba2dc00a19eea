"""The README's table is what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def test_the_readmes_table_is_current() -> None:
    spec = importlib.util.spec_from_file_location("foak_support_table", Path(__file__).parent / "support_table.py")
    assert spec is not None
    assert spec.loader is not None
    support = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(support)
    text = support.README.read_text(encoding="utf-8")
    assert support.BEGIN in text
    assert support.replaced(text) == text, "run: python packages/fast-kernels/tests/support_table.py --write"
