"""The activation budget in training as people do it: LoRA, trainers, encoders, odd models, faults on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import budget_ranks
import pytest
import torch
from budgeted import LAYERS, Run, assert_same_run, budget_of, budgets_of, checkpointed, framework, llama
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from storages import LivingStorages
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

SHAPES = [(4, 32)] * 4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("roomy", [True, False])
def test_fused_lora_under_autocast(roomy: bool, p: float, reentrant: bool, meter: LivingStorages) -> None:
    """bf16 base, fp32 adapters; dropout draws its masks from a seed that the forward draws."""

    def steps(budget: Any) -> Run:
        model = checkpointed(llama().bfloat16(), reentrant)
        model.enable_input_require_grads()
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_dropout=p, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config).train()
        report = framework(
            budget, fused_lora=True, fast_loss="fused_linear", fast_rms_layernorm=True, fast_activation=True
        ).apply(model)
        assert {r.outcome for r in report if r.rule == "fused_lora"} == {"patched"}
        with torch.autocast("cpu", torch.bfloat16):
            return Run(model, meter).steps(SHAPES)

    before = meter.allocated
    plain = steps(None)
    limit = 2**30 if roomy else int(meter.allocated + 1.5 * (max(plain.peaks) - before))
    fast = steps(limit / 2**30)
    assert_same_run(plain, fast)
    decision = budget_of(fast.model).decision
    assert decision is not None
    assert decision.slim == (not roomy)
    assert decision.kept == LAYERS if roomy else 0 < decision.kept < LAYERS
    assert max(fast.peaks) <= limit


def _texts() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, 128, (length,), generator=generator).tolist() for length in (24, 24, 9, 17, 24, 24, 12, 24)
    ]
    return Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * len(row) for row in rows]})


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 2, **{f"w{i}": i for i in range(3, 128)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>")


def _pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_trainers(kind: str, tmp_path: Path, meter: LivingStorages) -> None:
    """With accumulated gradients and an evaluation between the steps."""

    def run(budget: Any) -> tuple[list[dict[str, float]], Any, int]:
        model = llama()
        options: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 5,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "seed": 3,
            "optim": "adamw_torch",
        }
        data = {"train_dataset": _texts(), "eval_dataset": _texts()}
        if kind == "Trainer":
            trainer = Trainer(model, TrainingArguments(**options), data_collator=_pad, **data)
        else:
            args = SFTConfig(**options, max_length=32, bf16=False)
            trainer = SFTTrainer(model, args, processing_class=_tokenizer(), **data)
        fast = framework(budget, fast_loss="fused_linear", fast_rms_layernorm=True)
        fast.apply(trainer)
        trainer.train()
        decision = budget_of(model).decision if budget else None
        fast.restore()
        history = [
            {k: v for k, v in entry.items() if k in ("loss", "eval_loss", "grad_norm")}
            for entry in trainer.state.log_history
        ]
        return history, model, decision.kept if decision else 0

    plain, model, _ = run(None)
    accelerated, fast, kept = run("1 GiB")
    assert kept == LAYERS
    assert plain == accelerated
    assert sum("eval_loss" in entry for entry in plain) == 3
    for expected, actual in zip(model.parameters(), fast.parameters(), strict=True):
        assert torch.equal(expected, actual)


def _t5() -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).train()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lengths", [(24, 24), (24, 12)], ids=["equal", "shorter decoder"])
def test_encoder_and_decoder(lengths: tuple[int, int], reentrant: bool, meter: LivingStorages) -> None:
    plain, fast = checkpointed(_t5(), reentrant), checkpointed(_t5(), reentrant)
    framework("1 GiB").apply(fast)
    kept = [0]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids, labels = (torch.randint(1, 128, (2, length), generator=generator) for length in lengths)
        losses = []
        for model in (plain, fast):
            torch.manual_seed(step)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        kept.append(sum(found.decision.kept for found in budgets_of(fast) if found.decision))
    assert kept[-1] > 0
    for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_layers_that_are_called_twice(meter: LivingStorages) -> None:
    def shared() -> Any:
        model = llama()
        model.model.layers = torch.nn.ModuleList(list(model.model.layers[: LAYERS // 2]) * 2)
        return checkpointed(model)

    plain = Run(shared(), meter).steps(SHAPES)
    model = shared()
    framework("1 GiB").apply(model)
    fast = Run(model, meter).steps(SHAPES)
    assert fast.kept == [0, *[LAYERS] * 3]
    assert_same_run(plain, fast)


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_an_exception_in_a_forward_leaves_nothing_behind(step: int, layer: int, meter: LivingStorages) -> None:
    """As an out-of-memory error that a user's loop catches: in the learning forward, the next, or a later one."""
    plain = Run(checkpointed(llama()), meter).steps(SHAPES[:step]).steps(SHAPES)
    model = checkpointed(llama())
    framework("1 GiB").apply(model)
    fast = Run(model, meter)

    def fail(*_: Any) -> None:
        raise MemoryError("as if")

    fast.steps(SHAPES[:step])
    before = meter.allocated
    handle = model.model.layers[layer].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError, match="as if"):
        model(input_ids=torch.ones(2, 8, dtype=torch.long))
    handle.remove()
    assert meter.allocated == before
    model(input_ids=torch.ones(2, 8, dtype=torch.long))  # and a forward without a backward
    assert meter.allocated == before
    fast.steps(SHAPES)
    assert fast.kept[-1] == LAYERS
    assert_same_run(plain, fast)


@pytest.mark.parametrize("between", [False, True], ids=["after a step", "between forward and backward"])
@pytest.mark.parametrize("steps", [1, 2])
def test_restore_in_mid_training(steps: int, between: bool, meter: LivingStorages) -> None:
    def train(budget: Any) -> Run:
        model = checkpointed(llama(dropout=0.1))
        fast = framework(budget) if budget else None
        if fast is not None:
            fast.apply(model)
        run = Run(model, meter).steps(SHAPES[:steps])
        if between:
            ids = torch.arange(32).view(2, 16)
            loss = model(input_ids=ids, labels=ids).loss
            if fast is not None:
                fast.restore()
            loss.backward()
            run.gradients.append([p.grad.numpy().copy() for p in model.parameters() if p.grad is not None])
            run.optimizer.step()
            run.optimizer.zero_grad()
        elif fast is not None:
            fast.restore()
        assert not budgets_of(model)
        return run.steps(SHAPES[:2])

    assert_same_run(train(None), train("1 GiB"))


def test_a_compiled_model_stays_checkpointed_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = LivingStorages()  # not entered: under a mode torch.compile compiles nothing
    monkeypatch.setattr("foak.fast_kernels.checkpointing.budget.meter_for", lambda device: nothing)
    model = checkpointed(llama())
    report = framework("1 GiB").apply(model)
    ids = torch.arange(32).view(2, 16)
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        model.zero_grad()
        compiled(input_ids=ids, labels=ids).loss.backward()
    assert budget_of(model).decision is None
    assert any("every layer stays checkpointed: torch.compile" in note for note in report.notes)
    other = checkpointed(llama())
    other(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_ranks_of_ddp_decide_each_for_itself_and_fsdp_stays_checkpointed(tmp_path: Path) -> None:
    found = budget_ranks.launch(tmp_path)
    for rank in found:
        assert rank["ddp equal"]
        assert rank["fsdp equal"]
        assert rank["fsdp kept"] is None
        assert any("under FSDP all processes must recompute the same layers" in note for note in rank["fsdp notes"])
    assert found[0]["ddp kept"] == LAYERS
    assert 0 < found[1]["ddp kept"] < LAYERS  # its budget is smaller
