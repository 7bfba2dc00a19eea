"""Adapters, fused and not, recomputed and not: a packed step is the padded one."""

from __future__ import annotations

import copy
from typing import Any

import packs
import pytest
import torch
from peft import LoraConfig, get_peft_model

from foak.core import AccelerationFramework

EXAMPLES = packs.sequences((5, 17, 1, 9, packs.MAX_LENGTH, 2))
KERNELS = {
    "fused_lora": True,
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": "auto",
    "fast_rope_embeddings": "auto",
    "fast_activation": "auto",
}


@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "with kernels"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "recomputed, reentrant"])
def test_a_packed_step_is_the_padded_one(kernels: bool, reentrant: bool | None) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    plain: Any = get_peft_model(packs.build(), config)
    fast = copy.deepcopy(plain)
    training: dict[str, Any] = {"attention": {"padding_free": {}}}
    if kernels:
        training["fused_ops_and_kernels"] = KERNELS
    report = AccelerationFramework({"plugins": {"training": training}}).apply(fast)
    assert any(record.rule == "fused_lora" for record in report.patched) is kernels
    if reentrant is not None:
        fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
        fast.enable_input_require_grads()
    packs.assert_equal_steps(packs.step(fast, packs.packed(EXAMPLES)), packs.step(plain, packs.padded(EXAMPLES)))
