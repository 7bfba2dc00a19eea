"""How often a step decodes a quantized weight under `decode_once`, and that nothing but that changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_folder import write_gptq
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from foak.core import AccelerationFramework
from foak.quantized_peft.bitsandbytes import layers as nf4_layers
from foak.quantized_peft.gptq import layer as gptq_layer

IDS = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(0))
LAYERS, ADAPTED = 2, 7
KERNELS = {"fused_lora": True, "fast_loss": "fused_linear", "fast_activation": True}


class Decodings:
    """The decoded weights of a run: how many there were, and which are alive."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []

    def counting(self, decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def decoded(*args: Any, **kwargs: Any) -> Tensor:
            dense = decode(*args, **kwargs)
            self.seen.append(weakref.ref(dense))
            return dense

        return decoded

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.seen)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> Decodings:
    found = Decodings()
    monkeypatch.setattr(nf4_layers, "dequantize_nf4", found.counting(nf4_layers.dequantize_nf4))
    monkeypatch.setattr(gptq_layer, "dequantize_gptq", found.counting(gptq_layer.dequantize_gptq))
    return found


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    gptq = tmp_path_factory.mktemp("gptq")
    write_gptq(AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model), gptq)
    return {"bitsandbytes": tiny_model, "auto_gptq": gptq}


def adapted(folder: Path, base: str, decode_once: bool | str, *, fused: bool = True) -> tuple[Any, Any]:
    """The model with its adapter under foak, and the framework."""
    quantization: dict[str, Any] = {base: {"decode_once": decode_once}}
    if fused:
        quantization["fused_ops_and_kernels"] = {"base_layer": base, **KERNELS}
    framework = AccelerationFramework({"plugins": {"peft": {"quantization": quantization}}})
    model: PreTrainedModel = framework.load_model(folder, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peft = get_peft_model(
            model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        )
    framework.apply(peft)
    return peft.train(), framework


def step(model: Any) -> dict[str, Tensor]:
    """Loss and gradients of one step."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **found}


def checkpoint_every_layer(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()


# Of each decoder layer's seven adapted layers. The last product of a layer is never computed a second time, so a
# recomputation decodes six; a reentrant checkpoint's recomputation, which is not cut short, and records the graph that
# the backward walks, all seven. Without checkpointing the first layer's three, whose input takes no gradient, are not
# decoded in the backward.
DECODINGS = {
    (False, None): LAYERS * 2 * ADAPTED - 3,
    (False, False): LAYERS * (3 * ADAPTED - 1),
    (False, True): LAYERS * 3 * ADAPTED,
    ("recomputation", None): LAYERS * 2 * ADAPTED - 3,
    ("recomputation", False): LAYERS * 2 * ADAPTED,
    ("recomputation", True): LAYERS * 2 * ADAPTED,
    (True, None): LAYERS * ADAPTED,
    (True, False): LAYERS * ADAPTED,
    (True, True): LAYERS * 2 * ADAPTED,
}


@pytest.mark.parametrize("base", ["bitsandbytes", "auto_gptq"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_step_decodes_less_and_computes_the_same(
    folders: dict[str, Path], base: str, reentrant: bool | None, decodings: Decodings
) -> None:
    wanted: dict[str, Tensor] = {}
    for decode_once in (False, "recomputation", True):
        model, _ = adapted(folders[base], base, decode_once)
        if reentrant is not None:
            checkpoint_every_layer(model, reentrant)
        for _ in range(2):
            decodings.seen.clear()
            found = step(model)
            assert len(decodings.seen) == DECODINGS[decode_once, reentrant]
            assert decodings.alive() == 0
            assert len(found) == 1 + 2 * LAYERS * ADAPTED
            wanted = wanted or found
            for name, value in found.items():
                assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("base", ["bitsandbytes", "auto_gptq"])
def test_a_forwards_weights_live_until_the_backward_only_where_that_was_asked_for(
    folders: dict[str, Path], base: str, decodings: Decodings
) -> None:
    for decode_once, kept in ((False, 0), ("recomputation", 0), (True, LAYERS * ADAPTED)):
        model, _ = adapted(folders[base], base, decode_once)
        decodings.seen.clear()
        loss = model(input_ids=IDS, labels=IDS).loss
        assert decodings.alive() == kept
        del loss
        assert decodings.alive() == 0
        with torch.no_grad():
            model(input_ids=IDS)
        assert decodings.alive() == 0


def test_layers_without_an_adapter_keep_theirs_too(folders: dict[str, Path], decodings: Decodings) -> None:
    counts = []
    for decode_once in (False, "recomputation"):
        model, _ = adapted(folders["auto_gptq"], "auto_gptq", decode_once, fused=False)
        checkpoint_every_layer(model, reentrant=False)
        decodings.seen.clear()
        step(model)
        counts.append(len(decodings.seen))
        assert decodings.alive() == 0
    assert counts == [LAYERS * 3 * ADAPTED, LAYERS * 2 * ADAPTED]


@pytest.mark.parametrize(("base", "fused"), [("bitsandbytes", True), ("auto_gptq", True), ("auto_gptq", False)])
@pytest.mark.parametrize("decode_once", ["recomputation", True])
def test_layers_that_share_a_keeper_get_their_own_weight(
    folders: dict[str, Path], base: str, fused: bool, decode_once: bool | str
) -> None:
    """As the copies of a layer do that share all but a weight."""
    found = []
    for once in (False, decode_once):
        model, _ = adapted(folders[base], base, once, fused=fused)
        checkpoint_every_layer(model, reentrant=False)
        if once:
            for layer in model.base_model.model.model.layers:
                shared, other = layer.self_attn.k_proj.base_layer, layer.self_attn.v_proj.base_layer
                other.__dict__["_foak_keeper"] = shared.__dict__["_foak_keeper"]
        found.append(step(model))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("base", ["bitsandbytes", "auto_gptq"])
def test_restoring_takes_the_keepers_away_and_a_copy_has_its_own(folders: dict[str, Path], base: str) -> None:
    model, framework = adapted(folders[base], base, True)

    def keepers(of: Any) -> list[Any]:
        return [m.__dict__["_foak_keeper"] for m in of.modules() if "_foak_keeper" in m.__dict__]

    mine = keepers(model)
    assert len(mine) == LAYERS * ADAPTED
    assert not set(map(id, mine)) & set(map(id, keepers(copy.deepcopy(model))))
    framework.restore()
    assert keepers(model) == []
