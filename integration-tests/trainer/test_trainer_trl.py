"""TRL's trainers: the same curve and metrics with foak as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trainer_runs import (
    CONFIG,
    VOCAB_SIZE,
    assert_alike,
    close,
    llama,
    prompts_and_completions,
    tokenizer,
    train,
    train_both,
)
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from foak.core import AccelerationFramework

COMMON: dict[str, Any] = {
    "max_steps": 4,
    "logging_steps": 1,
    "report_to": [],
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-6,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 1,
}
LORA: dict[str, Any] = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}


def conversations() -> Dataset:
    rows = prompts_and_completions()
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"].strip()},
                ]
                * 2
            }
            for row in rows
        ]
    )


def texts() -> Dataset:
    return Dataset.from_list([{"text": row["prompt"] + row["completion"]} for row in prompts_and_completions()])


def sft(
    folder: Path,
    *,
    model: Callable[[], Any] = llama,
    dataset: Callable[[], Dataset] = prompts_and_completions,
    lora: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> Callable[[], Trainer]:
    def make() -> Trainer:
        torch.manual_seed(4)
        rows = dataset()
        return SFTTrainer(
            model(),
            SFTConfig(output_dir=str(folder), **{"max_length": 48, **COMMON, **changes}),
            train_dataset=rows,
            eval_dataset=rows.select(range(8)),
            processing_class=tokenizer(),
            peft_config=None if lora is None else LoraConfig(**{**LORA, **lora}),
            **(trainer or {}),
        )

    return make


def mixtral() -> Any:
    torch.manual_seed(0)
    shape = llama().config
    config = transformers.MixtralConfig(
        **{
            name: getattr(shape, name)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        },
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.MixtralForCausalLM(config)


def gemma2() -> Any:
    """Has a soft cap over its logits."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=2.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Gemma2ForCausalLM(config)


def granite() -> Any:
    """Divides its logits."""
    torch.manual_seed(0)
    shape = llama().config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = transformers.GraniteConfig(
        **{name: shape[name] for name in names},
        num_key_value_heads=2,
        logits_scaling=4.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GraniteForCausalLM(config)


RUNS: dict[str, dict[str, Any]] = {
    "completions": {},
    "all tokens": {"completion_only_loss": False},
    "texts": {"dataset": texts},
    "assistant turns": {"dataset": conversations, "assistant_only_loss": True},
    "LoRA": {"lora": {}},
    "LoRA with dropout": {"lora": {"lora_dropout": 0.1}},
    "DoRA": {"lora": {"use_dora": True}},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing, LoRA": {"label_smoothing_factor": 0.1, "lora": {}},
    "dft": {"loss_type": "dft"},
    "dft, LoRA": {"loss_type": "dft", "lora": {}},
    "packing": {"dataset": texts, "packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "checkpointing, LoRA": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "lora": {},
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluation, smoothed": {"eval_strategy": "steps", "eval_steps": 2, "label_smoothing_factor": 0.1},
    "tied head": {"model": lambda: llama(tie_word_embeddings=True)},
    "soft cap": {"model": gemma2},
    "scaled logits": {"model": granite},
    "experts with an auxiliary loss": {"model": mixtral},
}


@pytest.mark.parametrize("name", RUNS)
def test_sft_curves(name: str, tmp_path: Path) -> None:
    config = CONFIG
    if name.startswith("experts"):
        switches = {**CONFIG["plugins"]["training"]["fused_ops_and_kernels"], "fast_activation": "auto"}
        config = {"plugins": {"training": {"fused_ops_and_kernels": switches}}}
    make = sft(tmp_path, **RUNS[name])
    plain, fast = train(make, fast=False), train(make, fast=True, config=config)
    assert_alike(plain, fast)
    assert fast.computed == 0
    assert {"entropy", "mean_token_accuracy"} <= fast.metrics[0].keys()
    assert fast.report is not None
    served = {r.rule for r in fast.report.patched}
    assert {"trl_fused_head", "trl_labelled_tokens"} <= served


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "LoRA"])
def test_sft_bf16(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    exact = train(sft(tmp_path, lora=lora), fast=False)
    plain, fast = train_both(sft(tmp_path, lora=lora, bf16=True))
    assert fast.computed == 0
    errors = [max(abs(a - b) for a, b in zip(run.losses, exact.losses, strict=True)) for run in (plain, fast)]
    assert errors[1] <= max(1.5 * errors[0], 1e-3)


def test_one_by_eight_and_eight_by_one(tmp_path: Path) -> None:
    curves = []
    for size, steps in ((1, 8), (8, 1)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 3}
        curves += [train(sft(tmp_path, **changes), fast=fast) for fast in (False, True)]
    for curve in curves[1:]:
        for name in ("logged", "gradient_norms"):
            for expected, actual in zip(getattr(curves[0], name), getattr(curve, name), strict=True):
                assert close(actual, expected, 1e-3), name


def test_sft_with_a_users_loss(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        scores = outputs.logits[:, :-1].float().reshape(-1, VOCAB_SIZE)
        total = torch.nn.functional.cross_entropy(scores, labels[:, 1:].reshape(-1), reduction="sum")
        return total / num_items_in_batch

    assert_alike(*train_both(sft(tmp_path, trainer={"compute_loss_func": loss})))


def test_sft_rows_without_any_label(tmp_path: Path) -> None:
    """SFTTrainer drops such rows from data that it prepares, but not from prepared data."""

    def silent() -> Dataset:
        rows = [tokenizer()(row["prompt"] + row["completion"])["input_ids"] for row in prompts_and_completions()]
        return Dataset.from_list(
            [{"input_ids": ids, "labels": ids if index % 3 else [-100] * len(ids)} for index, ids in enumerate(rows)]
        )

    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 8}
    plain, fast = train_both(sft(tmp_path, dataset=silent, dataset_kwargs={"skip_prepare_dataset": True}, **changes))
    assert 0.0 in fast.losses
    assert any(fast.losses)
    assert all(weight.isfinite().all() for weight in fast.weights.values())
    if all(weight.isfinite().all() for weight in plain.weights.values()):
        assert_alike(plain, fast)


def test_sft_restores_its_trainer(tmp_path: Path) -> None:
    trainer = sft(tmp_path, label_smoothing_factor=0.1, lora={})()
    before = dict(vars(trainer))
    callbacks = list(trainer.callback_handler.callbacks)
    modules = {name: dict(vars(module)) for name, module in trainer.model.named_modules()}
    framework = AccelerationFramework(CONFIG)
    framework.apply(trainer)
    framework.restore()
    assert vars(trainer).keys() == before.keys()
    assert all(vars(trainer)[key] is value for key, value in before.items())
    assert trainer.callback_handler.callbacks == callbacks
    for name, module in trainer.model.named_modules():
        assert vars(module).keys() == modules[name].keys()
        assert vars(module).get("forward") is modules[name].get("forward"), name


def test_sft_resumes_the_curve_and_saves_the_same_files(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lora": {}}
    whole = train(sft(tmp_path / "whole", **changes), fast=True)
    train(sft(tmp_path / "plain", **{**changes, "max_steps": 2}), fast=False)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    for fast in (True, False):
        resumed = train(sft(tmp_path / "resumed", **changes), fast=fast, resume_from_checkpoint=str(checkpoint))
        assert len(resumed.losses) == 8
        for expected, actual in zip(whole.losses[4:], resumed.losses, strict=True):
            assert close(actual, expected, 1e-4)
    names = [sorted(f.name for f in folder.iterdir()) for folder in (checkpoint, tmp_path / "plain" / "checkpoint-2")]
    assert names[0] == names[1]


# -- preferences -----------------------------------------------------------------------------------------------------


def preferences() -> Dataset:
    rows = prompts_and_completions()
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
            for row, other in zip(rows, reversed(list(rows)), strict=True)
        ]
    )


def judgements() -> Dataset:
    rows = prompts_and_completions()
    return Dataset.from_list([{**row, "label": index % 2 == 0} for index, row in enumerate(rows)])


PREFERENCES: dict[str, tuple[Any, Any, Callable[[], Dataset], dict[str, Any]]] = {
    "DPO": (DPOTrainer, DPOConfig, preferences, {}),
    "DPO, IPO loss": (DPOTrainer, DPOConfig, preferences, {"loss_type": ["ipo"]}),
    "DPO with an SFT term": (
        DPOTrainer,
        DPOConfig,
        preferences,
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.3]},
    ),
    "DPO, LoRA": (DPOTrainer, DPOConfig, preferences, {"lora": {}}),
    "KTO": (KTOTrainer, KTOConfig, judgements, {}),
    "KTO, LoRA": (KTOTrainer, KTOConfig, judgements, {"lora": {}}),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_trainers_are_served_or_kept_but_equal(name: str, tmp_path: Path) -> None:
    trainer_class, config_class, dataset, given = PREFERENCES[name]
    changes = dict(given)
    lora = changes.pop("lora", None)

    def make() -> Trainer:
        torch.manual_seed(4)
        return trainer_class(
            llama(),
            ref_model=llama(seed=1) if lora is None else None,
            args=config_class(output_dir=str(tmp_path), max_length=48, **{**COMMON, **changes}),
            train_dataset=dataset(),
            processing_class=tokenizer(),
            peft_config=None if lora is None else LoraConfig(**{**LORA, **lora}),
        )

    plain, fast = train_both(make)
    assert_alike(plain, fast)
    assert fast.report is not None
    heads = [r for r in fast.report if r.rule == "trl_fused_head"]
    assert heads
    assert all(r.outcome == "patched" or r.reason for r in heads)
