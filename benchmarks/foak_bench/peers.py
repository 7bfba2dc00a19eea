"""Who accelerates a scenario: why one cannot run here, and what it does to the run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foak_bench.scenarios import Row, Scenario, Work

__all__ = [
    "ON_OUR_LOADER",
    "acceleration",
    "attention_of",
    "batches",
    "compile_layers",
    "impossible",
    "left_as_found",
    "load_unsloth",
    "process_kind",
    "targets",
]

ON_OUR_LOADER = ("foak", "trl-packed")
"""Rows that load GPTQ models by foak's loader; the others by transformers' and gptqmodel's."""
_QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MLP = ["gate_proj", "up_proj", "down_proj"]


def impossible(scenario: Scenario, devices: int) -> str | None:
    """Why a scenario cannot run in this environment; None if nothing is known to be in its way.

    Args:
        scenario: the scenario.
        devices: how many GPUs are here; 0 means that it would run on the CPU.
    """
    work, by = scenario.work, scenario.row.by
    needed = {"liger": "liger_kernel", "unsloth": "unsloth"}.get(by)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return f"{needed.replace('_', '-')} is not installed"
    if needed is not None and devices == 0:
        return f"{needed.replace('_', '-')} needs a GPU"
    if work.gpus > max(devices, 1):
        return f"needs {work.gpus} GPUs; here {'is 1' if devices == 1 else f'are {devices}'}"
    if work.method == "qlora-nf4" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    loaded = work.precision != "fp32"  # otherwise the decoded weights are trained
    if work.method == "gptq" and by not in ON_OUR_LOADER and loaded and importlib.util.find_spec("gptqmodel") is None:
        return "gptqmodel is not installed: without it transformers loads no GPTQ model"
    if by == "unsloth" and work.gpus > 1:
        return "unsloth trains on one GPU"
    return None


def process_kind(scenario: Scenario) -> str:
    """Scenarios of one kind may follow each other in one process: unsloth alone leaves something behind in it."""
    by = "unsloth" if scenario.row.by == "unsloth" else "others"
    return f"{by}, {scenario.work.gpus} processes"


@contextlib.contextmanager
def left_as_found(scenario: Scenario) -> Iterator[None]:
    """Puts back what a peer changes outside its model, so that the next row of the process is its own.

    Liger exchanges names in the module of the architecture and may exchange PyTorch's cross entropy; torch.compile
    keeps what it compiled.
    """
    kind = scenario.geometry["type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    names = dict(vars(module))
    classes = [found for found in names.values() if isinstance(found, type) and "forward" in vars(found)]
    forwards = {found: vars(found)["forward"] for found in classes}
    cross_entropy = torch.nn.functional.cross_entropy
    try:
        yield
    finally:
        for added in vars(module).keys() - names.keys():
            delattr(module, added)
        vars(module).update(names)
        for found, forward in forwards.items():
            if vars(found)["forward"] is not forward:
                found.forward = forward
        torch.nn.functional.cross_entropy = cross_entropy
        if scenario.row.by == "compile":
            torch.compiler.reset()


def targets(work: Work) -> list[str]:
    """The modules that get an adapter."""
    return _QKVO if work.targets == "qkvo" else _QKVO + _MLP


def acceleration(scenario: Scenario) -> dict[str, Any] | None:
    """The section `acceleration` of the run file; None where foak has no part in a row."""
    row, work = scenario.row, scenario.work
    base = {"qlora-nf4": "bitsandbytes", "gptq": "auto_gptq"}.get(work.method)
    if row.by != "foak" and not (row.by in ON_OUR_LOADER and base == "auto_gptq"):
        return None
    training = {key: stanza for name in row.plugins for key, stanza in _plugin(name, row.plugins[name], work).items()}
    if base is None:
        return {"plugins": {"training": {"fused_ops_and_kernels": row.kernels, **training}}}
    loader = {"quant_type": "nf4"} if base == "bitsandbytes" else {"kernel": "triton_v2", "from_quantized": True}
    quantization: dict[str, Any] = {base: loader}
    if row.kernels:
        quantization["fused_ops_and_kernels"] = {"base_layer": base, **row.kernels}
    return {"plugins": {"peft": {"quantization": quantization}, **({"training": training} if training else {})}}


def _plugin(name: str, stanza: dict[str, Any], work: Work) -> dict[str, Any]:
    """The stanza of a plugin under `plugins.training`, for a work."""
    stanza = copy.deepcopy(stanza)
    if name == "multipack":
        stanza["dataloader"]["multipack"]["max_tokens"] = work.tokens
    return stanza


def attention_of(row: Row) -> str | None:
    """The implementation of attention that a row's model is made with; None: transformers' choice."""
    return "flex_attention" if row.by == "trl-packed" else None


def batches(scenario: Scenario) -> dict[str, Any]:
    """The fields of SFTConfig that say how batches are made.

    TRL's packing fills rows of half the tokens, two of them a step, best fit first, and lays them end to end.
    """
    work = scenario.work
    if scenario.row.by == "trl-packed":
        packing = {"packing": True, "packing_strategy": "bfd"}
        return {"per_device_train_batch_size": 2, "max_length": work.tokens // 2, **packing}
    return {"per_device_train_batch_size": work.batch, "max_length": work.seq}


def compile_layers(model: Any) -> None:
    """Compiles each decoder layer by itself, as transformers advises: one graph serves all of them."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = base.get_decoder().layers
    for layer in layers:
        layer.compile()


def load_unsloth(folder: Path, work: Work) -> tuple[Any, Any]:
    """Model and tokenizer as unsloth loads them, with its adapters."""
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=work.seq,
        dtype=torch.float32 if work.precision in ("fp32", "mixed") else torch.bfloat16,
        load_in_4bit=work.method == "qlora-nf4",
        full_finetuning=work.method == "full",
    )
    if work.method != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=work.rank,
            lora_alpha=work.rank,
            lora_dropout=work.dropout,
            bias="none",
            target_modules=targets(work),
            use_gradient_checkpointing=work.checkpointing,
        )
    return model, tokenizer
