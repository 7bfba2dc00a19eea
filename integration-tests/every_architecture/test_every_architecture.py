"""Every causal language model type of transformers: explained, stepped like plain transformers, and restored."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.util import find_spec

import counts
import pytest
import torch
import transformers
from tiny_configs import SPECIAL, UNTESTABLE, Untestable, tiny_type
from torch import nn
from walk import Step, attributes_of, build, changed_attributes, differences, quiet, walk

from foak.core.report import PatchRecord

outcome_of = functools.cache(walk)
every_type = pytest.mark.parametrize("model_type", counts.WALKED)
recorded_release = pytest.mark.skipif(
    not counts.written().startswith(f"transformers {transformers.__version__},"),
    reason=f"the tables and the README are about another release of transformers than {transformers.__version__}",
)


@every_type
def test_the_step_equals_plain_transformers(model_type: str) -> None:
    assert outcome_of(model_type).differences == ()


@every_type
def test_what_is_kept_has_a_reason(model_type: str) -> None:
    assert all(record.reason for record in outcome_of(model_type).applied.kept)


@every_type
def test_explain_says_on_the_meta_device_what_apply_does(model_type: str) -> None:
    outcome = outcome_of(model_type)

    def rows(report: Iterable[PatchRecord]) -> list[tuple[str, str, str, str]]:
        return [(record.module, record.rule, record.kernel, record.outcome) for record in report]

    assert rows(outcome.explained) == rows(outcome.applied)


@every_type
def test_nothing_is_computed_on_the_meta_device(model_type: str) -> None:
    assert not outcome_of(model_type).meta_operations


@every_type
def test_apply_leaves_the_random_generator_alone(model_type: str) -> None:
    assert outcome_of(model_type).random_state_kept


@every_type
def test_restore_leaves_no_trace(model_type: str) -> None:
    assert outcome_of(model_type).traces == ()


@every_type
def test_the_loss_needs_no_logits(model_type: str) -> None:
    loss = outcome_of(model_type).loss
    without_logits = (loss.fused, loss.computed) == (1, 0)
    assert without_logits is (model_type not in counts.NO_FUSED_LOSS), loss


@pytest.mark.parametrize("row", UNTESTABLE, ids=lambda row: row.model_type)
def test_what_is_called_untestable_cannot_be_built(row: Untestable) -> None:
    if find_spec(row.package) is not None:
        assert row.model_type in counts.WALKED
        return
    with quiet(), pytest.raises(ImportError, match=row.package):
        build(tiny_type(row.model_type), device="meta")


@recorded_release
def test_every_row_names_a_mapped_type_once() -> None:
    for rows in (SPECIAL, UNTESTABLE):
        names = [row.model_type for row in rows]
        assert len(set(names)) == len(names)
        assert set(names) <= set(counts.MAPPED)


@recorded_release
def test_the_counts_in_the_readme_are_current() -> None:
    outcomes = {name: outcome_of(name) for name in counts.WALKED}
    message = "run: python integration-tests/every_architecture/counts.py --write"
    assert counts.table(outcomes) == counts.written(), message


def _step(**gradients: torch.Tensor | None) -> Step:
    return Step(torch.tensor(4.6), torch.linspace(-1, 1, 8).view(1, 2, 4), dict(gradients))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (_step(large=torch.ones(3), small=torch.full((3,), 1.001e-3)), "small"),
        (_step(large=torch.ones(3) + 1e-4, small=torch.full((3,), 1e-3)), "large"),
        (_step(large=torch.ones(3), small=None), "small: exists in one"),
        (_step(large=torch.full((3,), torch.nan), small=torch.full((3,), 1e-3)), "large"),
        (_step(large=torch.ones(3, dtype=torch.bfloat16), small=torch.full((3,), 1e-3)), "bfloat16"),
    ],
)
def test_the_comparison_sees_a_wrong_gradient(changed: Step, what: str) -> None:
    plain = _step(large=torch.ones(3), small=torch.full((3,), 1e-3))
    assert differences(plain, plain) == []
    (difference,) = differences(plain, changed)
    assert what in difference


def test_the_comparison_sees_a_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = attributes_of(model)
    assert changed_attributes(before, attributes_of(model)) == set()
    model[0].forward = model[0].forward
    model[0]._forward_hooks[0] = print
    assert changed_attributes(before, attributes_of(model)) == {"0.forward", "0._forward_hooks"}
