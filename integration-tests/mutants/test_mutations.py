"""The mutations are up to date: `nox -s mutants` runs them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import kernel_mutations
import pytest
import rule_mutations
from mutation import ROOT, Mutation, StaleMutation

MUTATIONS = kernel_mutations.MUTATIONS + rule_mutations.MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_its_text_is_there_once_and_its_tests_exist(mutation: Mutation) -> None:
    mutation.mutated(ROOT)
    mutation.check_tests(ROOT)


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


def test_a_stale_mutation_is_an_error_by_name(tmp_path: Path) -> None:
    mutation = dataclasses.replace(MUTATIONS[0], file="kernels/some.py", text="a = 1", replacement="a = 2")
    path = mutation.path_in(tmp_path)
    with pytest.raises(StaleMutation, match=f"{mutation.name}: there is no "):
        mutation.mutated(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("a = 1\n")
    assert mutation.mutated(tmp_path) == "a = 2\n"
    for content, message in (("b = 1\n", "is 0 times"), ("a = 1\na = 1\n", "is 2 times")):
        path.write_text(content)
        with pytest.raises(StaleMutation, match=message):
            mutation.mutated(tmp_path)
    with pytest.raises(StaleMutation, match="there is no test_it in "):
        dataclasses.replace(mutation, tests=("kernels/test_rms_norm.py::test_it",)).check_tests(ROOT)
    path.write_text("a = 1\n")
    with pytest.raises(StaleMutation, match="no Python any more"):
        dataclasses.replace(mutation, replacement="a = (").mutated(tmp_path)
