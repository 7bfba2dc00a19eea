"""Ragged data: lengths as documented, rows that fill batches by tokens, bases quantized on the spot, the table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from foak_bench import lengths
from foak_bench.data import write_data
from foak_bench.lengths import DISTRIBUTIONS
from foak_bench.models import checkpoint_folder, make_config
from foak_bench.peers import acceleration, attention_of, batches
from foak_bench.quantized import quantized_model
from foak_bench.ragged import ragged_table
from foak_bench.records import MEASURED, Record
from foak_bench.scenarios import TABLE, Scenario, Work, read_table
from foak_bench.verdict import judge

from foak.core import AccelerationFramework

SCENARIOS = {scenario.name: scenario for scenario in read_table().sets["ragged"].scenarios}
FLAN = "mistral-7b.lora-all.amp.16x2048.gc.dropout0.1.flan"
DENSE = "mistral-7b.lora-all.amp.4x2048.gc.dropout0.1"
MULTIPACK = "foak.all+padding_free+multipack"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_are_as_described(name: str) -> None:
    described = lengths._describe(name)
    assert f"    {described}\n" in (lengths.__doc__ or "")
    distribution = DISTRIBUTIONS[name]
    drawn = distribution.draw(2000)
    assert drawn == distribution.draw(2500)[:2000]
    assert drawn != distribution.draw(2000, seed=1)
    assert (min(drawn), max(drawn)) >= (distribution.shortest, 0)
    assert max(drawn) <= distribution.longest
    assert sorted(drawn)[1000] == pytest.approx(distribution.median, rel=0.05)


@pytest.mark.parametrize("data", ["dense", "flan"])
def test_texts_have_the_lengths(tmp_path: Path, data: Any) -> None:
    work = Work(model="tiny", data=data, batch=2, seq=100, tokens=800, steps=2, warmup=1)
    write_data(tmp_path / "data.jsonl", work, 512)
    words = [len(json.loads(line)["text"].split()) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    if data == "dense":
        assert words == [100] * 6
        return
    assert words == [min(100, length) - 1 for length in DISTRIBUTIONS["flan"].draw(len(words))]
    assert sum(words) > 2 * 800 * 3, "there is more to choose from than is trained"


def test_rows_that_fill_batches_by_tokens() -> None:
    ours = SCENARIOS[f"{FLAN}/{MULTIPACK}"]
    stanzas = (acceleration(ours) or {})["plugins"]["training"]
    assert stanzas["dataloader"]["multipack"] == {"num_processes": 1, "max_tokens": 8192}
    assert batches(ours) == {"per_device_train_batch_size": 16, "max_length": 2048}
    packed = SCENARIOS[f"{FLAN}/trl-packed"]
    assert (acceleration(packed), attention_of(packed.row)) == (None, "flex_attention")
    assert batches(packed)["packing"] is True
    assert batches(packed)["per_device_train_batch_size"] * batches(packed)["max_length"] == 8192
    gptq = SCENARIOS[f"{FLAN.replace('lora', 'gptq')}/trl-packed"]
    assert list((acceleration(gptq) or {})["plugins"]["peft"]["quantization"]) == ["auto_gptq"], "the loader alone"
    assert f"{FLAN}/check/trl-packed" not in SCENARIOS
    assert f"{FLAN}/check/{MULTIPACK}" not in SCENARIOS
    assert f"{FLAN}/check/foak.all+padding_free" in SCENARIOS


@pytest.mark.parametrize(
    ("method", "section"),
    [
        ("qlora-nf4", {"bitsandbytes": {"quant_type": "nf4"}}),
        ("gptq", {"auto_gptq": {"kernel": "triton_v2", "from_quantized": True}}),
    ],
)
def test_a_base_that_is_quantized_on_the_spot_is_the_one_that_is_loaded(
    tmp_path: Path, method: Any, section: dict[str, Any]
) -> None:
    geometry = {
        **yaml.safe_load(TABLE.read_text(encoding="utf-8"))["models"]["tiny"],
        "hidden_size": 128,
        "intermediate_size": 256,
    }
    work = Work(model="tiny", method=method, precision="amp")
    device = torch.device("cpu")
    folder = checkpoint_folder(geometry, work, tmp_path, device)
    framework = AccelerationFramework({"plugins": {"peft": {"quantization": section}}})
    loaded = framework.load_model(str(folder), dtype=torch.bfloat16)
    made = quantized_model(make_config(geometry, work), work, device)
    assert {name: type(module) for name, module in made.named_modules()} == {
        name: type(module) for name, module in loaded.named_modules()
    }
    theirs = dict(loaded.named_parameters())
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert (parameter.dtype, parameter.requires_grad) == (theirs[name].dtype, theirs[name].requires_grad), name
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(made(tokens).logits, loaded(tokens).logits)
    for name in ("quantization_method", "is_loaded_in_4bit"):
        assert getattr(made, name, None) == getattr(loaded, name, None)


def record(scenario: Scenario, speed: float, loss: tuple[float, ...] = (2.0, 1.0)) -> Record:
    step = dict.fromkeys(("median", "p10", "p90", "min", "max"), 0.5)
    figures = {
        "tokens_per_second": speed,
        "step_seconds": step,
        "peak_allocated_bytes": 2**30,
        "peak_reserved_bytes": None,
        "loss": list(loss),
        "grad_norm": [1.0] * len(loss),
    }
    device = {"name": "a GPU", "processes": 1}
    return Record(scenario, MEASURED, device=device, versions={"torch": "2"}, commit="abc", runs=[figures])


@pytest.fixture
def records() -> dict[str, Record]:
    speeds = {
        f"{DENSE}/foak": 1000.0,
        f"{FLAN}/plain": 200.0,
        f"{FLAN}/trl-packed": 500.0,
        f"{FLAN}/foak.all+padding_free": 900.0,
        f"{FLAN}/{MULTIPACK}": 980.0,
        f"{FLAN}/check/fp32": 1.0,
        f"{FLAN}/check/plain": 1.0,
        f"{FLAN}/check/foak.all+padding_free": 1.0,
    }
    found = {name: record(SCENARIOS[name], speed) for name, speed in speeds.items()}
    found[f"{FLAN}/check/fp32"] = record(SCENARIOS[f"{FLAN}/check/fp32"], 1.0, (2.001, 1.001))
    return found


def test_the_table_holds_each_row_against_padded_dense_and_packed(records: dict[str, Record]) -> None:
    table = ragged_table({"gpu": records})
    cells = {(row := line.strip("| ").split(" | "))[-8].strip("| "): row for line in table.splitlines()[3:]}
    assert cells["foak, padding-free, multipack"][-7:-2] == ["1020.4", "**980**", "+390.0%", "0.98 ×", "1.96 ×"]
    assert cells["TRL, padded"][-7:-2] == ["5000.0", "200", "", "0.20 ×", "0.40 ×"]
    assert re.search(r"foak, dense \| 1000.0 \| 1,000 \|  \|  \|  \| 1.0", table)
    del records[f"{DENSE}/foak"]
    assert "0.98 ×" not in ragged_table({"gpu": records})
    assert "no results" in ragged_table({})


def test_a_dense_run_of_other_work_is_not_the_measure(records: dict[str, Record]) -> None:
    dense = records[f"{DENSE}/foak"].scenario
    for change in ({"dropout": 0.0}, {"batch": 8}, {"method": "gptq"}):
        other = dataclasses.replace(dense, work=dataclasses.replace(dense.work, **change))  # type: ignore[arg-type]
        records[f"{DENSE}/foak"] = record(other, 1000.0)
        assert "foak, dense" not in ragged_table({"gpu": records}), change


def test_multipack_is_judged_by_the_same_batches_without_it(records: dict[str, Record]) -> None:
    verdict = judge(records[f"{FLAN}/{MULTIPACK}"], records)
    assert (verdict.counts, verdict.distance) == (True, pytest.approx(0.001))
    name = f"{FLAN}/check/foak.all+padding_free"
    records[name] = record(SCENARIOS[name], 1.0, (2.5, 1.5))
    assert judge(records[f"{FLAN}/{MULTIPACK}"], records).counts is False
    assert "other samples" in str(judge(records[f"{FLAN}/trl-packed"], records))
