"""The table of scenarios: what a list, a row and a check stand for, how scenarios are named, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from foak_bench.peers import acceleration, impossible
from foak_bench.runner import in_order
from foak_bench.scenarios import KERNELS, Scenario, read_table

from foak.core.config import read_config
from foak.core.errors import ConfigError


def read(tmp_path: Path, **group: Any) -> tuple[Scenario, ...]:
    content = {
        "models": {"small": {"type": "llama", "hidden_size": 8}},
        "sets": {"one": {"groups": [{"model": "small", "rows": ["plain"], **group}]}},
    }
    path = tmp_path / "scenarios.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return read_table(path).sets["one"].scenarios


def test_lists_are_the_axes_of_a_matrix(tmp_path: Path) -> None:
    found = read(tmp_path, precision=["bf16", "amp"], checkpointing=[True, False], rows=["plain", "foak"])
    assert [scenario.name for scenario in found] == [
        f"small.full.{precision}.4x2048{gc}/{row}"
        for precision in ("bf16", "amp")
        for gc in (".gc", "")
        for row in ("plain", "foak")
    ]


def test_rows_name_the_kernels(tmp_path: Path) -> None:
    lora = read(tmp_path, method="lora", rows=["foak", "foak:each", "foak:fast_loss+fused_lora"])
    assert lora[0].row.kernels == KERNELS
    assert [s.row.kernels for s in lora[1:-1]] == [{name: value} for name, value in KERNELS.items()]
    assert lora[-1].row.kernels == {name: KERNELS[name] for name in ("fast_loss", "fused_lora")}
    ragged = read(tmp_path, method="lora", rows=["foak:all+padding_free+multipack", "foak:none"])
    assert (ragged[0].row.kernels, list(ragged[0].row.plugins)) == (KERNELS, ["padding_free", "multipack"])
    assert (ragged[1].row.kernels, ragged[1].row.plugins) == ({}, {})
    full = read(tmp_path, rows=["foak"])
    assert set(full[0].row.kernels) == set(KERNELS) - {"fused_lora"}, "full fine-tuning has no adapters to fuse"


def test_a_check_is_a_smaller_work_with_a_float32_run(tmp_path: Path) -> None:
    found = read(tmp_path, rows=["plain", "foak"], dropout=0.1, check={"layers": 1, "dropout": 0.0})
    group = "small.full.bf16.4x2048.gc.dropout0.1"
    names = ["check/fp32", "plain", "check/plain", "foak", "check/foak"]
    assert [scenario.name for scenario in found] == [f"{group}/{name}" for name in names]
    precise, _, plain, _, ours = found
    assert (precise.work.precision, precise.row.by) == ("fp32", "plain")
    for scenario in (precise, plain, ours):
        assert (scenario.work.layers, scenario.work.dropout) == (1, 0.0)


def test_an_empty_check_takes_the_rows_own_losses(tmp_path: Path) -> None:
    assert [scenario.row.label for scenario in read(tmp_path, check={})] == ["fp32", "plain"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"method": "loar"}, r"sets\.one\.groups\[0\]\.method must be full or lora or qlora-nf4 or gptq"),
        ({"methd": "lora"}, r"groups\[0\]\.methd is no known key; did you mean .*method"),
        ({"model": "smal"}, r"groups\[0\]\.model is 'smal', which is not in models; did you mean small"),
        ({"rows": ["foak:fast_los"]}, r"names 'fast_los'; .* did you mean fast_loss"),
        ({"rows": ["foak:fused_lora"]}, r"names 'fused_lora'; of this method there are"),
        ({"rows": ["ligger"]}, r"holds 'ligger'; a row is foak"),
        ({"rows": ["plain", "plain"]}, "has two scenarios named"),
        ({"steps": 51}, "between 1 and 50"),
        ({"check": {"layerz": 1}}, r"groups\[0\]\.check\.layerz is no known key"),
    ],
)
def test_what_the_table_cannot_mean_is_refused_by_name(tmp_path: Path, group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **group)


def test_repeats_go_round_the_rows_of_a_group(tmp_path: Path) -> None:
    found = read(tmp_path, precision=["bf16", "amp"], rows=["plain", "foak"], check={"layers": 1})
    order = [item.scenario.name.removeprefix("small.full.").replace(".4x2048.gc", "") for item in in_order(found, 2)]
    assert order == [
        f"{precision}/{name}"
        for precision in ("bf16", "amp")
        for name in ("check/fp32", "plain", "check/plain", "foak", "check/foak", "plain", "foak")
    ]


def test_a_row_that_says_once_is_left_out_of_later_repeats(tmp_path: Path) -> None:
    found = read(tmp_path, rows=["plain", "compile, once"])
    assert [(due.scenario.row.label, due.repeat) for due in in_order(found, repeats=2)] == [
        ("plain", 0),
        ("compile", 0),
        ("plain", 1),
    ]
    with pytest.raises(ConfigError, match="there may be 'once'"):
        read(tmp_path, rows=["plain, twice"])


def test_a_row_that_says_unchecked_has_no_check(tmp_path: Path) -> None:
    found = read(tmp_path, rows=["plain", "compile, once, unchecked"], check={"layers": 1})
    assert [scenario.name.partition("/")[2] for scenario in found] == ["check/fp32", "plain", "check/plain", "compile"]


def test_a_budget_may_have_a_value(tmp_path: Path) -> None:
    found = read(tmp_path, rows=["foak:all+activation_budget", "foak:activation_budget=55.6GiB"])
    stanzas = [acceleration(scenario) for scenario in found]
    assert [stanza["plugins"]["training"]["activation_checkpointing"] for stanza in stanzas if stanza] == [
        {"budget": "auto"},
        {"budget": "55.6GiB"},
    ]
    assert [bool(scenario.row.kernels) for scenario in found] == [True, False]


def test_every_scenario_survives_json_and_its_plugins_are_known() -> None:
    for scenario in (scenario for chosen in read_table().sets.values() for scenario in chosen.scenarios):
        assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario
        section = acceleration(scenario)
        on_our_loader = scenario.row.by == "trl-packed" and scenario.work.method == "gptq"
        assert (section is None) == (scenario.row.by != "foak" and not on_our_loader)
        if section is not None:
            read_config({"acceleration": section})


def test_what_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scenario = read(tmp_path)[0]
    assert impossible(scenario, devices=0) is None
    two = dataclasses.replace(scenario, work=dataclasses.replace(scenario.work, gpus=2))
    assert impossible(two, devices=1) == "needs 2 GPUs; here is 1"
    liger = dataclasses.replace(scenario, row=dataclasses.replace(scenario.row, by="liger"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert impossible(liger, devices=1) == "liger-kernel is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert impossible(liger, devices=0) == "liger-kernel needs a GPU"
