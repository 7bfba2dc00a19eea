"""The two sections: what activates the plugin, what is refused, and what `foak doctor` says."""

from __future__ import annotations

from typing import Any

import pytest

from foak.core import AccelerationFramework, ConfigError
from foak.padding_free.plugin import PaddingFreePlugin

PADDING_FREE = {"attention": {"padding_free": {"method": "huggingface"}}}
MULTIPACK = {"dataloader": {"multipack": {"num_processes": 4}}}


def active(training: dict[str, Any]) -> list[str]:
    framework = AccelerationFramework({"plugins": {"training": training}}, plugins=[PaddingFreePlugin])
    return [plugin.name for plugin in framework.active_plugins]


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (PADDING_FREE, ["padding-free"]),
        ({"attention": {"padding_free": {}}}, ["padding-free"]),
        (PADDING_FREE | MULTIPACK, ["padding-free"]),
        ({"attention": {"padding_free": None}}, []),
    ],
)
def test_what_activates_the_plugin(training: dict[str, Any], expected: list[str]) -> None:
    assert active(training) == expected


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (MULTIPACK, r"training\.dataloader\.multipack needs plugins\.training\.attention\.padding_free"),
        ({"attention": {"padding_free": {"method": "flash"}}}, r"method is the text 'flash'; allowed: huggingface"),
        ({"attention": {"padding_free": {"attention": "flex"}}}, r"attention is the text 'flex'; allowed: auto"),
        (PADDING_FREE | {"dataloader": {"multipack": {"num_processes": True}}}, r"true; allowed: a whole number"),
        (PADDING_FREE | {"dataloader": {"multipack": {"num_processes": 0}}}, r"multipack\.num_processes is 0; allowed"),
        (PADDING_FREE | {"dataloader": {"multipack": {"max_tokens": -1}}}, r"multipack\.max_tokens is -1; allowed"),
        (PADDING_FREE | {"dataloader": {"multipack": {"method": "huggingface"}}}, r"multipack\.method is not a known"),
    ],
)
def test_wrong_keys_and_values_are_named(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        active(training)


def test_doctor_says_what_runs() -> None:
    rows = dict(PaddingFreePlugin.diagnose())
    assert rows["packed batches on cuda"] == "varlen_attn"
    assert "buckets" in rows["packed batches on cpu"]
