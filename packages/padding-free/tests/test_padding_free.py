"""The two sections are read, checked and refused: never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from foak.core import AccelerationFramework, ConfigError, UnsupportedError
from foak.padding_free.plugin import PaddingFreePlugin

PADDING_FREE = {"attention": {"padding_free": {"method": "huggingface"}}}
MULTIPACK = {"dataloader": {"multipack": {"num_processes": 4}}}


def build(training: dict[str, Any]) -> AccelerationFramework:
    return AccelerationFramework({"plugins": {"training": training}}, plugins=[PaddingFreePlugin])


@pytest.mark.parametrize(
    ("training", "named"),
    [
        (PADDING_FREE, r"plugins\.training\.attention\.padding_free cannot be served"),
        (MULTIPACK, r"plugins\.training\.dataloader\.multipack cannot be served"),
        (PADDING_FREE | MULTIPACK, r"padding_free and plugins\.training\.dataloader\.multipack cannot be served"),
        ({"attention": {"padding_free": {}}}, r"plugins\.training\.attention\.padding_free cannot be served"),
    ],
)
def test_both_sections_are_refused_by_name(training: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        build(training)


def test_without_the_sections_the_plugin_is_not_active() -> None:
    assert build({"attention": {"padding_free": None}}).active_plugins == ()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"attention": {"padding_free": {"method": "flash"}}}, r"method is the text 'flash'; allowed: huggingface"),
        ({"dataloader": {"multipack": {"num_processes": True}}}, r"num_processes is true; allowed: a whole number"),
        ({"dataloader": {"multipack": {"method": "huggingface"}}}, r"multipack\.method is not a known key"),
    ],
)
def test_wrong_keys_and_values_are_named(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(training)


def test_doctor_says_that_this_release_does_neither() -> None:
    assert {finding for _, finding in PaddingFreePlugin.diagnose()} == {"not in this release"}
