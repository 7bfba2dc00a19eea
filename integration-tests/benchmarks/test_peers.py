"""What a peer changes in the process is put back before the next row."""

from __future__ import annotations

import pytest
import torch
from foak_bench.peers import left_as_found
from foak_bench.scenarios import Row, Scenario, Work
from transformers.models.llama import modeling_llama


def test_what_liger_exchanges_is_put_back() -> None:
    scenario = Scenario("small", Work(model="small"), Row("liger", "liger"), {"type": "llama"})
    before = dict(vars(modeling_llama))
    forward, cross_entropy = modeling_llama.LlamaForCausalLM.forward, torch.nn.functional.cross_entropy
    with left_as_found(scenario):
        modeling_llama.apply_rotary_pos_emb = modeling_llama.LlamaMLP = modeling_llama.added = object  # type: ignore
        modeling_llama.LlamaForCausalLM.forward = modeling_llama.LlamaModel.forward
        torch.nn.functional.cross_entropy = torch.nn.functional.mse_loss  # type: ignore[assignment]
    assert dict(vars(modeling_llama)) == before
    assert modeling_llama.LlamaForCausalLM.forward is forward
    assert torch.nn.functional.cross_entropy is cross_entropy


def test_it_is_put_back_after_an_error() -> None:
    scenario = Scenario("small", Work(model="small"), Row("liger", "liger"), {"type": "llama"})
    before = modeling_llama.LlamaMLP

    def fail() -> None:
        with left_as_found(scenario):
            modeling_llama.LlamaMLP = object  # type: ignore
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert modeling_llama.LlamaMLP is before
