"""Trains a case, with foak or without: eight optimizer steps of transformers' Trainer, all that they computed kept."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from architectures import VOCAB_SIZE
from cases import KNOWN, Case
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments

from foak.core import AccelerationFramework
from foak.core.report import PatchReport
from foak.kernels import dequantize_gptq
from foak.kernels.gptq.packing import round_to_nearest

STEPS = 8
BATCH_SIZE = 2
BITS, GROUP_SIZE = 4, 32
SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA on NF4": ("bitsandbytes", {"quant_type": "nf4"}),
    "LoRA on GPTQ": ("auto_gptq", {"kernel": "triton_v2", "from_quantized": True}),
}
DTYPES = {"fp32": torch.float32, "amp": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Training:
    """What a training computed.

    Attributes:
        losses: as Trainer logged them, one for each optimizer step.
        norms: of the gradient, before clipping, likewise.
        gradients: by optimizer step, of every parameter that trains, as the optimizer got them.
        weights: what trained, at the end.
        report: of the accelerated one; None of the plain one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    report: PatchReport | None = None


class _Gradients(TrainerCallback):
    """Keeps each gradient just before the optimizer takes it."""

    def __init__(self, kept: list[dict[str, torch.Tensor]]) -> None:
        self.kept = kept

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.kept.append({name: grad.float().cpu() for name, grad in _trained(model, "grad").items()})


def _trained(model: nn.Module, attribute: str) -> dict[str, torch.Tensor]:
    found = {name: getattr(p, attribute) for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


@functools.cache
def samples() -> list[dict[str, list[int]]]:
    """Sequences of 1 to 24 tokens, of which a part begins with a prompt that is not learned."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(STEPS * 4 * BATCH_SIZE):
        length = 1 if number == 5 else int(torch.randint(3, 25, (), generator=generator))
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        prompt = length // 2 if number % 3 == 0 else 0
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def padded(examples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch, filled up on the right."""
    longest = max(len(example["input_ids"]) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        fill = longest - len(example["input_ids"])
        rows["input_ids"].append(example["input_ids"] + [0] * fill)
        rows["labels"].append(example["labels"] + [-100] * fill)
        rows["attention_mask"].append([1] * len(example["input_ids"]) + [0] * fill)
    return {name: torch.tensor(values) for name, values in rows.items()}


# -- the models -------------------------------------------------------------------------------------------------------


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="foak-parity-")


@functools.cache
def saved(architecture: str, gptq: bool = False) -> Path:
    """The architecture's tiny model on disk, in values that bf16 holds, so that it is the same in every precision.

    With `gptq`: quantized, and beside it in `dense` the model of the decoded weights.
    """
    path = Path(_folder().name, f"{architecture}{' gptq' * gptq}")
    model: Any = KNOWN[architecture].build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    if not gptq:
        model.save_pretrained(path)
        return path
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and _adapts(name)}
    packed = {}
    for name, layer in layers.items():
        one = packed[name] = round_to_nearest(layer.weight.detach(), BITS, GROUP_SIZE)
        layer.weight.data = dequantize_gptq(
            one.qweight, one.qzeros, one.scales, one.g_idx, BITS, zero_offset=1, dtype=torch.float32
        )
    model.save_pretrained(path / "dense")
    tensors = {name: value for name, value in model.state_dict().items() if name.removesuffix(".weight") not in packed}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    for name, one in packed.items():
        tensors |= one.named(name)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    content = json.loads((path / "dense" / "config.json").read_text(encoding="utf-8"))
    content["quantization_config"] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": BITS,
        "group_size": GROUP_SIZE,
        "sym": True,
        "desc_act": False,
    }
    (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def _adapts(name: str) -> bool:
    """Whether a linear layer gets an adapter, and is quantized where the base is: all but the head and routers."""
    return name != "lm_head" and name.rpartition(".")[2] not in ("gate", "router")


def load(case: Case, framework: AccelerationFramework | None) -> Any:
    """The case's model, by foak's loader or without foak."""
    dtype = DTYPES[case.precision]
    gptq = case.method == "LoRA on GPTQ"
    path = saved(case.architecture, gptq)
    device = {"device_map": 0} if torch.cuda.is_available() and case.method in SECTIONS else {}
    if framework is not None:
        model = framework.load_model(path, dtype=dtype, **device)
    elif case.method == "LoRA on NF4":
        how = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=how, **device)
    else:
        model = AutoModelForCausalLM.from_pretrained(path / "dense" if gptq else path, dtype=dtype)
    if case.method == "full":
        return model
    targets = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and _adapts(n)]
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, which would hide the gradient of the other factor
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def configuration(case: Case) -> dict[str, Any]:
    """What foak is told for a case."""
    plugins: dict[str, Any] = {"training": {}, "peft": {}}
    if case.padding == "padding-free":
        plugins["training"]["attention"] = {"padding_free": {"method": "huggingface"}}
    if case.method in SECTIONS:
        name, section = SECTIONS[case.method]
        kernels = {"base_layer": name, **case.switches}
        plugins["peft"]["quantization"] = {name: section, "fused_ops_and_kernels": kernels}
    else:
        plugins["training"]["fused_ops_and_kernels"] = case.switches
    return {"plugins": {name: section for name, section in plugins.items() if section}}


# -- the training -----------------------------------------------------------------------------------------------------


def train(case: Case, *, fast: bool) -> Training:
    """Trains a case, accelerated or plain.

    The optimizer is SGD: its step is linear in the gradient, so that what rounding differs by stays that small.
    """
    training = Training()
    framework = AccelerationFramework(configuration(case)) if fast else None
    model = load(case, framework)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH_SIZE,
            gradient_accumulation_steps=case.accumulation,
            gradient_checkpointing=case.checkpointing != "off",
            gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"},
            bf16=case.precision == "amp",
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=samples(),  # type: ignore[arg-type]
            data_collator=padded,  # type: ignore[arg-type]
            callbacks=[_Gradients(training.gradients)],
        )
        if framework is not None:
            training.report = framework.apply(trainer)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            training.losses.append(entry["loss"])
            training.norms.append(float(entry["grad_norm"]))
    training.weights = {name: weight.float().cpu() for name, weight in _trained(trainer.model, "data").items()}
    return training


@functools.lru_cache(maxsize=64)
def plain(architecture: str, method: str, precision: str, accumulation: int) -> Training:
    """The plain training that a case is held against: padded, every activation kept."""
    return train(Case(architecture, method, precision, "off", accumulation, "padded", "all"), fast=False)
