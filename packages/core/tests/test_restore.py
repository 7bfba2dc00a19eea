"""What `ModelPatcher.restore` does where something that it calls raises."""

from __future__ import annotations

import pytest
from torch import nn

from foak.core.patching import ModelPatcher


def test_an_error_keeps_nothing_on_and_the_first_one_is_raised() -> None:
    owner, patcher, undone = nn.Linear(2, 2), ModelPatcher(), []

    def fail(text: str) -> None:
        raise RuntimeError(text)

    patcher.set_attribute(owner, "mark", 1)
    patcher.on_restore(lambda: undone.append("registered first"))
    patcher.on_restore(lambda: fail("second error"))
    patcher.on_restore(lambda: fail("first error"))
    with pytest.raises(RuntimeError, match="first error"):
        patcher.restore()
    assert undone == ["registered first"]
    assert "mark" not in vars(owner)
    patcher.restore()  # nothing is left to fail
