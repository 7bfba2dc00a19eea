"""Every causal language model type padding-free: equal to its padded step, or refused with the reason."""

from __future__ import annotations

import functools

import packed
import pytest
import transformers
from counts import MAPPED, WALKED

outcome_of = functools.cache(packed.walk_packed)
recorded_release = pytest.mark.skipif(
    not packed.written().startswith(f"transformers {transformers.__version__},"),
    reason=f"the table is about another release of transformers than {transformers.__version__}",
)


@recorded_release
@pytest.mark.parametrize("model_type", WALKED)
def test_it_is_served_or_refused_as_the_table_says(model_type: str) -> None:
    refusal, reason = outcome_of(model_type).refusal, packed.REASON_OF.get(model_type)
    if reason is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert reason in refusal


@pytest.mark.parametrize("model_type", WALKED)
def test_what_is_served_equals_the_padded_step(model_type: str) -> None:
    assert outcome_of(model_type).differences == ()


@recorded_release
def test_the_table_names_types_once_and_the_readme_holds_it() -> None:
    names = [name for names in packed.REFUSED.values() for name in names.split()]
    assert len(set(names)) == len(names)
    assert set(names) <= set(MAPPED)
    assert packed.written() == packed.summary(), "run: python integration-tests/every_architecture/packed.py --write"
