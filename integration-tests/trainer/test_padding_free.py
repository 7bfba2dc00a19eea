"""TRL's `SFTTrainer` without padding, and padding-free training together with foak's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trainer_runs import (
    CONFIG,
    CURVE_TOLERANCE,
    Outcome,
    assert_alike,
    close,
    llama,
    prompts_and_completions,
    tokenizer,
    tokens,
    train,
    words,
)
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from foak.core import AccelerationFramework, UnsupportedError
from foak.padding_free.packed import PACKED

KERNELS = CONFIG["plugins"]["training"]
PADDING_FREE = {"attention": {"padding_free": {"method": "huggingface"}}}
MULTIPACK = {"dataloader": {"multipack": {"num_processes": 1, "max_tokens": 64}}}


def config(*parts: dict[str, Any]) -> dict[str, Any]:
    training: dict[str, Any] = {}
    for part in parts:
        training |= part
    return {"plugins": {"training": training}}


def messages(count: int = 24) -> Dataset:
    """Conversations of two turns, whose assistant's tokens the template marks."""
    import random

    generator = random.Random(1)
    turns = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": words(generator, 2, 9)} for role in turns]} for _ in range(count)]
    )


def sft(folder: Path, data: Dataset | None = None, *, lora: bool = False, **options: Any) -> SFTTrainer:
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    return SFTTrainer(
        llama(),
        SFTConfig(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=prompts_and_completions() if data is None else data,
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def fill(outcome: Outcome) -> str:
    assert outcome.report is not None
    (note,) = outcome.report.notes
    return note


@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "with kernels"])
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (None, {}),
        (None, {"completion_only_loss": False}),
        (None, {"lora": True, "gradient_checkpointing": True}),
        (None, {"gradient_accumulation_steps": 2}),
        (messages, {"assistant_only_loss": True}),
        (tokens, {}),
        (lambda: prompts_and_completions().to_iterable_dataset(), {"max_steps": 6}),
    ],
    ids=["completions", "everything", "LoRA", "accumulated", "assistant", "pre-tokenized", "streamed"],
)
def test_sft_learns_what_it_learns_padded(tmp_path: Path, data: Any, options: dict[str, Any], kernels: bool) -> None:
    def make() -> SFTTrainer:
        return sft(tmp_path, data and data(), **options)

    plain = train(make, fast=False)
    fast = train(make, fast=True, config=config(PADDING_FREE, *([KERNELS] if kernels else [])))
    assert_alike(plain, fast)
    assert "100.0% now" in fill(fast)


def test_trls_own_padding_free_batches_are_packed(tmp_path: Path) -> None:
    plain = train(lambda: sft(tmp_path, max_length=None), fast=False)
    fast = train(lambda: sft(tmp_path, max_length=None, padding_free=True), fast=True, config=config(PADDING_FREE))
    assert_alike(plain, fast)
    assert "100.0% now" in fill(fast)


def test_trls_packing_keeps_its_batches_and_its_sequences_apart(tmp_path: Path) -> None:
    """The plain run masks: its attention finds the same sequences in the positions."""
    options = {"packing": True, "max_length": 48, "per_device_train_batch_size": 2}
    plain = train(lambda: sft(tmp_path, **options), fast=False)
    fast = train(lambda: sft(tmp_path, **options), fast=True, config=config(PADDING_FREE, KERNELS))
    assert_alike(plain, fast)
    assert "of 32 sequences in" in fill(fast)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_multipack_sees_every_token_once(tmp_path: Path, lora: bool) -> None:
    plain = train(lambda: sft(tmp_path, lora=lora), fast=False)
    fast = train(lambda: sft(tmp_path, lora=lora), fast=True, config=config(PADDING_FREE, MULTIPACK, KERNELS))
    assert fast.metrics[-1]["num_tokens"] == plain.metrics[-1]["num_tokens"]
    assert fast.trainer.state.global_step == fast.trainer.state.max_steps == len(fast.losses)
    assert fast.computed == 0


def plain_trainer(folder: Path, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    collator = DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=8)
    return Trainer(llama(), arguments, train_dataset=tokens(), eval_dataset=tokens(8), data_collator=collator)


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}], ids=str)
def test_no_logits_and_no_padding(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**options, "eval_strategy": "epoch"}
    plain = train(lambda: plain_trainer(tmp_path, **options), fast=False)
    fast = train(lambda: plain_trainer(tmp_path, **options), fast=True, config=config(PADDING_FREE, KERNELS))
    assert_alike(plain, fast)
    assert fast.computed == 0
    rules = {record.rule for record in fast.report.patched} if fast.report else set()
    assert {"packed_batches", "linear_cross_entropy", "rope", "rms_norm", "swiglu"} <= rules


def test_the_rope_kernel_rotates_by_restarting_positions(tmp_path: Path) -> None:
    """Long sequences behind one another: a position that did not restart would rotate far."""
    model, plain = llama(max_position_embeddings=4096), llama(max_position_embeddings=4096)
    AccelerationFramework(config(PADDING_FREE, KERNELS)).apply(model)
    from foak.padding_free.collator import PaddingFreeCollator

    generator = torch.Generator().manual_seed(0)
    examples = [{"input_ids": torch.randint(3, 100, (n,), generator=generator)} for n in (400, 3, 250)]
    batch = PaddingFreeCollator(device_type="cpu")(examples)
    with torch.no_grad():
        packed = model(**{name: batch[name] for name in ("input_ids", "position_ids", PACKED)}).logits
        alone = [plain(example["input_ids"][None]).logits for example in examples]
    torch.testing.assert_close(packed + 0, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)


def test_evaluation_of_an_sft_trainer_is_the_padded_one(tmp_path: Path) -> None:
    losses = []
    for fast in (False, True):
        trainer = sft(tmp_path)
        if fast:
            AccelerationFramework(config(PADDING_FREE, MULTIPACK, KERNELS)).apply(trainer)
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert close(losses[1], losses[0], CURVE_TOLERANCE)


def test_trainers_that_read_rows_are_refused(tmp_path: Path) -> None:
    pairs = Dataset.from_list([{"prompt": "w5", "chosen": " w6", "rejected": " w7"}] * 4)
    arguments = DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    models = {"model": llama(), "ref_model": llama(seed=1)}
    trainer = DPOTrainer(**models, args=arguments, train_dataset=pairs, processing_class=tokenizer())
    with pytest.raises(UnsupportedError, match="DPOTrainer reads its batches row by row"):
        AccelerationFramework(config(PADDING_FREE)).apply(trainer)
