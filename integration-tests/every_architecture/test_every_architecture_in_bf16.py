"""Every type once more with bfloat16 weights, and under autocast: no error, and the dtypes of plain transformers."""

from __future__ import annotations

import counts
import pytest
from walk_bf16 import NOT_IN_PLAIN, Mode, walk_in_bf16


@pytest.mark.parametrize("mode", ["weights", "autocast"])
@pytest.mark.parametrize("model_type", counts.WALKED)
def test_the_step_equals_plain_transformers(model_type: str, mode: Mode) -> None:
    expected = None if (model_type, mode) in NOT_IN_PLAIN else []
    assert walk_in_bf16(model_type, mode) == expected
