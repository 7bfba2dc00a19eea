"""transformers' Trainer: the same curve with foak as without, in every way that a loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainer_runs import CONFIG, VOCAB_SIZE, assert_alike, close, llama, tokenizer, tokens, train, train_both
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from foak.core import AccelerationFramework, UnsupportedError

Make = Callable[[], Trainer]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 4,
            "logging_steps": 1,
            "report_to": [],
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 4,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-6,
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "seed": 1,
            **changes,
        }
    )


def lora(model: Any, **fields: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", **fields))


def maker(
    folder: Path,
    *,
    model: Callable[[], Any] = llama,
    train_dataset: Any = None,
    trainer: dict[str, Any] | None = None,
    **changes: Any,
) -> Make:
    dataset = tokens() if train_dataset is None else train_dataset

    def make() -> Trainer:
        return Trainer(
            model(),
            arguments(folder, **changes),
            train_dataset=dataset,
            eval_dataset=tokens(8),
            data_collator=DataCollatorForSeq2Seq(tokenizer()),
            **(trainer or {}),
        )

    return make


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing and accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "SGD without clipping": {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1},
    "tied head": {"model": lambda: llama(tie_word_embeddings=True)},
    "LoRA": {"model": lambda: lora(llama())},
    "LoRA with dropout": {"model": lambda: lora(llama(), lora_dropout=0.1)},
    "LoRA with a saved head": {"model": lambda: lora(llama(), modules_to_save=["lm_head"])},
    "LoRA, smoothed": {"model": lambda: lora(llama()), "label_smoothing_factor": 0.1},
    "evaluation of the loss": {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True},
    "evaluation of the loss, smoothed": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "prediction_loss_only": True,
        "label_smoothing_factor": 0.1,
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_curves(name: str, tmp_path: Path) -> None:
    plain, fast = train_both(maker(tmp_path, **RUNS[name]))
    assert_alike(plain, fast)
    assert fast.computed == 0
    assert fast.report is not None
    assert {r.kernel for r in fast.report.patched} == {"linear_cross_entropy", "rms_norm", "rope", "swiglu"}
    assert len(set(plain.losses)) == len(plain.losses)  # the weights move, and the batches differ


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("make_model", [llama, lambda: lora(llama())], ids=["full", "LoRA"])
def test_bf16(make_model: Callable[[], Any], smoothing: float, tmp_path: Path) -> None:
    """accelerate's autocast and its fp32 outputs stay lazy; the curve is as near to fp32's as plain bf16's."""
    make = maker(tmp_path, model=make_model, bf16=True, label_smoothing_factor=smoothing)
    exact = train(maker(tmp_path, model=make_model, label_smoothing_factor=smoothing), fast=False)
    plain, fast = train_both(make)
    assert fast.computed == 0
    errors = [max(abs(a - b) for a, b in zip(run.losses, exact.losses, strict=True)) for run in (plain, fast)]
    assert errors[1] <= max(1.5 * errors[0], 1e-3)


def test_one_by_eight_and_eight_by_one(tmp_path: Path) -> None:
    """Rows of very different numbers of labels: a mean of means would show."""
    curves = []
    for size, steps in ((1, 8), (8, 1), (4, 2)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 3}
        for fast in (False, True):
            curves.append(train(maker(tmp_path, **changes), fast=fast))
    for curve in curves[1:]:
        for name in ("logged", "gradient_norms"):
            for expected, actual in zip(getattr(curves[0], name), getattr(curve, name), strict=True):
                assert close(actual, expected, 1e-3), name


def test_batches_without_any_label(tmp_path: Path) -> None:
    """Such a batch counts for nothing, alone in its step and beside others."""
    dataset = tokens(16)
    silent = dataset.map(
        lambda row, i: {"labels": [-100] * len(row["labels"]) if i % 3 else row["labels"]}, with_indices=True
    )
    for steps in (1, 2):
        outcome = train(
            maker(
                tmp_path,
                train_dataset=silent,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=steps,
                max_steps=8,
            ),
            fast=True,
        )
        assert all(torch.isfinite(torch.tensor(outcome.losses)))
        assert 0.0 in outcome.losses
        assert any(outcome.losses)
        assert all(weight.isfinite().all() for weight in outcome.weights.values())


class Metrics:
    """Counts right tokens, from logits or from their argmax."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        predictions, labels = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
        self.seen.append(predictions)
        ids = predictions.argmax(-1) if predictions.dim() == 3 else predictions
        right = (ids[:, :-1] == labels[:, 1:]) & (labels[:, 1:] != -100)
        return {"right": float(right.sum()), "sum": float(predictions.double().abs().sum())}


@pytest.mark.parametrize("preprocess", [None, lambda logits, labels: logits.argmax(-1)], ids=["logits", "argmax"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("extra", [{}, {"eval_accumulation_steps": 1}, {"batch_eval_metrics": False, "bf16": True}])
def test_metrics_over_logits(preprocess: Any, smoothing: float, extra: dict[str, Any], tmp_path: Path) -> None:
    metrics: list[Metrics] = []

    def make() -> Trainer:
        metrics.append(Metrics())
        return maker(
            tmp_path,
            trainer={"compute_metrics": metrics[-1], "preprocess_logits_for_metrics": preprocess},
            eval_strategy="steps",
            eval_steps=2,
            label_smoothing_factor=smoothing,
            **extra,
        )()

    plain, fast = train_both(make)
    assert len(metrics[0].seen) == len(metrics[1].seen) == 2
    if "bf16" in extra:
        assert [e.keys() for e in plain.evaluations] == [e.keys() for e in fast.evaluations]
        assert close(fast.evaluations[0]["eval_loss"], plain.evaluations[0]["eval_loss"], 1e-3)
    else:
        assert_alike(plain, fast)
    for expected, actual in zip(metrics[0].seen, metrics[1].seen, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
    predictions = [run.trainer.predict(tokens(8)) for run in (plain, fast)]
    assert predictions[0].predictions.shape == predictions[1].predictions.shape
    assert close(predictions[1].metrics["test_loss"], predictions[0].metrics["test_loss"], 1e-3)


def test_a_users_loss_function(tmp_path: Path) -> None:
    """With `compute_loss_func` Trainer takes the labels away and scores the logits itself."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        scores = outputs.logits[:, :-1].float().reshape(-1, VOCAB_SIZE)
        total = torch.nn.functional.cross_entropy(scores, labels[:, 1:].reshape(-1), reduction="sum")
        return total / num_items_in_batch

    plain, fast = train_both(maker(tmp_path, trainer={"compute_loss_func": loss}, gradient_accumulation_steps=2))
    assert_alike(plain, fast)


class WithAuxiliary(Trainer):
    """A user's trainer, which adds a term over the logits to the model's loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 1e-2 * outputs.logits.float().logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_a_users_trainer_with_a_term_over_the_logits(tmp_path: Path) -> None:
    def make() -> Trainer:
        return WithAuxiliary(
            llama(),
            arguments(tmp_path),
            train_dataset=tokens(),
            data_collator=DataCollatorForSeq2Seq(tokenizer()),
        )

    assert_alike(*train_both(make))


class Reader(TrainerCallback):
    """Generates between steps, as a callback that shows samples does."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.eval()
        self.texts.append(model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=5, do_sample=False)[0].tolist())
        model.train()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_callback_that_generates(smoothing: float, tmp_path: Path) -> None:
    readers: list[Reader] = []

    def make() -> Trainer:
        readers.append(Reader())
        return maker(tmp_path, trainer={"callbacks": [readers[-1]]}, label_smoothing_factor=smoothing)()

    assert_alike(*train_both(make))
    assert len(readers[0].texts) == 4
    assert readers[0].texts == readers[1].texts


def test_resuming_continues_the_curve(tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = train(maker(tmp_path / "whole", **changes), fast=True)
    plain = train(maker(tmp_path / "plain", **changes), fast=False)
    checkpoint = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    for fast in (True, False):  # foak's checkpoint also continues without foak
        resumed = train(maker(tmp_path / "resumed", **changes), fast=fast, **checkpoint)
        assert len(resumed.losses) == 4
        for expected, actual in zip(whole.losses[2:], resumed.losses, strict=True):
            assert close(actual, expected, 1e-4)
    backwards = train(
        maker(tmp_path / "backwards", **changes),
        fast=True,
        resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"),
    )
    for expected, actual in zip(plain.losses[2:], backwards.losses, strict=True):
        assert close(actual, expected, 1e-4)
    names = [sorted(f.name for f in (tmp_path / n / "checkpoint-2").iterdir()) for n in ("whole", "plain")]
    assert names[0] == names[1]


def test_the_trainer_is_restored(tmp_path: Path) -> None:
    """Everything of the trainer and of its model is as it was, and a further training is plain."""
    make = maker(tmp_path, label_smoothing_factor=0.1)
    trainer = make()
    before = dict(vars(trainer))
    callbacks = list(trainer.callback_handler.callbacks)
    modules = {n: set(vars(m)) for n, m in trainer.model.named_modules()}
    framework = AccelerationFramework(CONFIG)
    framework.apply(trainer)
    assert trainer.label_smoother is not before["label_smoother"]
    framework.restore()
    assert vars(trainer).keys() == before.keys()
    assert all(vars(trainer)[key] is value for key, value in before.items())
    assert trainer.callback_handler.callbacks == callbacks
    assert {n: set(vars(m)) for n, m in trainer.model.named_modules()} == modules
    trainer.train()
    plain = train(make, fast=False)
    expected = [entry["loss"] for entry in plain.trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == expected


@pytest.mark.parametrize("bf16", [False, True])
def test_restore_after_training_leaves_a_plain_model(bf16: bool, tmp_path: Path) -> None:
    """Under bf16 accelerate's wrapper of the forward outlives foak, and calls the plain one."""
    plain, fast = train_both(maker(tmp_path, bf16=bf16))
    assert fast.framework is not None
    fast.framework.restore()
    model = fast.trainer.model
    assert all("forward" not in vars(m) for m in model.modules() if m is not model)
    if not bf16:
        assert "forward" not in vars(model)
    model.load_state_dict(plain.trainer.model.state_dict())
    batch = {"input_ids": torch.arange(3, 19)[None], "labels": torch.arange(3, 19)[None]}
    losses = [m(**batch).loss for m in (plain.trainer.model, model)]
    assert torch.equal(*losses)


def test_train_evaluate_train(tmp_path: Path) -> None:
    evaluations = []
    for fast in (False, True):
        outcome = train(maker(tmp_path), fast=fast)
        first = outcome.trainer.evaluate()["eval_loss"]
        outcome.trainer.train()
        evaluations.append((first, outcome.trainer.evaluate()["eval_loss"]))
    for expected, actual in zip(*evaluations, strict=True):
        assert close(actual, expected, 1e-4)
    assert evaluations[0][0] != evaluations[0][1]


@pytest.mark.parametrize("name", ["use_liger_kernel", "use_kernels"])
def test_another_patcher_is_refused_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, True)  # a field of some releases only
    model = llama()
    with pytest.raises(UnsupportedError, match=name):
        AccelerationFramework(CONFIG).apply(model, train_args=args)
    assert all("forward" not in vars(module) for module in model.modules())


def test_real_logits_with_the_fast_cross_entropy(tmp_path: Path) -> None:
    config = {"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": True}}}}
    make = maker(tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2)
    plain = train(make, fast=False)
    fast = train(make, fast=True, config=config)
    assert_alike(plain, fast)
