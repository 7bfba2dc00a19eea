"""A plain `Trainer`: the same training as padded, its steps and epochs, evaluation, resuming, and what is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import packs
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from foak.core import ConfigError, UnsupportedError
from foak.padding_free.lengths import sample_lengths
from foak.padding_free.packed import PACKED
from foak.padding_free.trainer import TrainingBatches

LENGTHS = (3, 14, 1, 9, 25, 2, 6, 11, 4, 19, 2, 7, 8, 5, 30, 3, 12, 6, 2, 10, 17, 4, 9)
EXAMPLES = packs.sequences(LENGTHS)
CURVE = 1e-4
"""Relative, after optimizer steps, which divide by a gradient's size and so amplify its rounding."""


class Recorder(TrainerCallback):  # type: ignore[misc]
    """The batches that went into steps; stops after some steps as if killed."""

    def __init__(self, stop_at: int = 10**6) -> None:
        self.stop_at = stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop_at


class RecordingTrainer(Trainer):  # type: ignore[misc]
    """Keeps the sequences of every micro-batch, and its loss."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        layout = inputs.get(PACKED)
        if layout is not None:
            tokens = inputs["input_ids"][0].split(layout.lengths)
        else:
            tokens = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        self.__dict__.setdefault("seen", []).append([part.tolist() for part in tokens])
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def make(
    folder: Path, data: Any = None, model: Any = None, trainer_class: Any = None, **options: Any
) -> RecordingTrainer:
    extra = {
        name: options.pop(name) for name in ("eval_dataset", "compute_metrics", "compute_loss_func") if name in options
    }
    data = Dataset.from_list(EXAMPLES) if data is None else data
    made: RecordingTrainer = (trainer_class or RecordingTrainer)(
        packs.build() if model is None else model,
        arguments(folder, **options),
        train_dataset=data,
        data_collator=packs.padded,
        **extra,
    )
    return made


def train(trainer: RecordingTrainer, framework: Any = None, **options: Any) -> Any:
    report = framework.apply(trainer) if framework is not None else None
    trainer.train(**options)
    return report


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_run(mine: RecordingTrainer, theirs: RecordingTrainer) -> None:
    assert mine.seen == theirs.seen
    assert mine.losses == pytest.approx(theirs.losses, rel=CURVE)
    for name in ("loss", "grad_norm", "epoch", "learning_rate"):
        logged = [[entry[name] for entry in t.state.log_history if name in entry] for t in (mine, theirs)]
        assert logged[0] == pytest.approx(logged[1], rel=CURVE), name
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(mine)[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"max_steps": 7},
        {"label_smoothing_factor": 0.1},
        {"train_sampling_strategy": "group_by_length"},
        {"dataloader_num_workers": 1, "num_train_epochs": 1},
        {"gradient_checkpointing": True, "num_train_epochs": 1},
        {"dataloader_drop_last": True, "num_train_epochs": 1},
    ],
    ids=str,
)
def test_it_is_the_padded_training(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = make(tmp_path, **options)
    train(plain)
    fast = make(tmp_path, **options)  # which seeds the process anew
    train(fast, packs.framework())
    assert_same_run(fast, plain)


def test_one_batch_or_many_accumulated_are_one_step(tmp_path: Path) -> None:
    results = []
    for size, accumulated in ((16, 1), (4, 4), (1, 16)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        trainer = make(tmp_path, Dataset.from_list(EXAMPLES[:16]), num_train_epochs=1, **options)
        train(trainer, packs.framework())
        (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
        results.append((entry["loss"], entry["grad_norm"]))
    assert results[1] == pytest.approx(results[0], rel=packs.FP32)
    assert results[2] == pytest.approx(results[0], rel=packs.FP32)


def test_a_loss_function_of_the_user(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    plain = make(tmp_path, compute_loss_func=loss)
    train(plain)
    fast = make(tmp_path, compute_loss_func=loss)  # which seeds the process anew
    train(fast, packs.framework())
    assert_same_run(fast, plain)


class Listed(torch.utils.data.Dataset[Any]):
    """Samples of a plain torch data set, with a column that no model takes."""

    def __len__(self) -> int:
        return len(EXAMPLES)

    def __getitem__(self, index: int) -> Any:
        return {**EXAMPLES[index], "source": "somewhere"}


def streamed() -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(EXAMPLES))


@pytest.mark.parametrize("data", [Listed, streamed], ids=["torch", "streamed"])
def test_other_data_sets(tmp_path: Path, data: Callable[[], Any]) -> None:
    options = {"max_steps": 5} if data is streamed else {}
    plain = make(tmp_path, data(), **options)
    train(plain)
    fast = make(tmp_path, data(), **options)  # which seeds the process anew
    train(fast, packs.framework())
    assert_same_run(fast, plain)


def test_evaluation_prediction_and_generation_go_on_padded(tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        logits, labels = prediction.predictions, prediction.label_ids
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:]) & (labels[:, 1:] != -100)
        return {"accuracy": float(hits.sum() / (labels[:, 1:] != -100).sum())}

    held_out = Dataset.from_list(packs.sequences((5, 9, 3, 7), seed=5))
    found = []
    for framework in (None, packs.framework(), packs.framework(multipack={})):
        trainer = make(
            tmp_path,
            eval_dataset=held_out,
            compute_metrics=metrics,
            num_train_epochs=1,
            eval_strategy="steps",
            eval_steps=3,
        )
        if framework is not None:
            framework.apply(trainer)
        before = {name: trainer.evaluate()[name] for name in ("eval_loss", "eval_accuracy")}
        before["logits"] = float(abs(trainer.predict(held_out).predictions).sum())
        trainer.train()
        assert any("eval_loss" in entry for entry in trainer.state.log_history)
        prompt = torch.tensor([[5, 6, 7]])
        text = trainer.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        assert text.shape == (1, 6)
        found.append(before)
    assert found[1] == found[2] == pytest.approx(found[0])


class Between(TrainerCallback):  # type: ignore[misc]
    """Generates and evaluates between steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        prompt = torch.tensor([[5, 6, 7]])
        model.generate(prompt, max_new_tokens=2, do_sample=False)
        with torch.no_grad():
            model(**packs.padded(packs.sequences((4, 2))))
        model.train()
        control.should_evaluate = True


@pytest.mark.parametrize("multipack", [None, {"max_tokens": 40}], ids=["padding-free", "multipack"])
def test_what_happens_between_steps_does_not_disturb_them(tmp_path: Path, multipack: Any) -> None:
    runs = []
    for between in (False, True):
        trainer = make(tmp_path, num_train_epochs=1, eval_dataset=Dataset.from_list(packs.sequences((5, 9), seed=5)))
        if between:
            trainer.add_callback(Between())
        train(trainer, packs.framework(multipack))
        runs.append((trainer.seen, trainer.losses))
    assert runs[0] == runs[1]


def test_tokens_are_counted_as_padded_training_counts_them(tmp_path: Path) -> None:
    """By the mask, so that a token which pads and ends texts counts where it ends one."""
    counts = []
    for framework in (None, packs.framework()):
        trainer = make(tmp_path, num_train_epochs=1, include_num_input_tokens_seen="non_padding")
        trainer.processing_class = SimpleNamespace(pad_token_id=EXAMPLES[1]["input_ids"][-1])
        train(trainer, framework)
        counts.append([entry["num_input_tokens_seen"] for entry in trainer.state.log_history])
    assert counts[0] == counts[1]
    assert counts[1][-1] == sum(LENGTHS)


class OwnLoss(RecordingTrainer):
    """Hands the model some of a batch, as the losses of users do."""

    names: tuple[str, ...] = ()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(**{name: inputs[name] for name in self.names if name in inputs}).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


@pytest.mark.parametrize("names", [("input_ids", "position_ids"), ("input_ids", PACKED)], ids=["positions", "layout"])
def test_a_loss_that_hands_on_what_tells_sequences_apart(tmp_path: Path, names: tuple[str, ...]) -> None:
    plain, fast = (make(tmp_path, num_train_epochs=1, trainer_class=OwnLoss) for _ in range(2))
    plain.names, fast.names = ("input_ids", "attention_mask"), names
    train(plain)
    train(fast, packs.framework())
    assert fast.losses[0] == pytest.approx(plain.losses[0], rel=packs.FP32)


def test_a_loss_that_hands_on_tokens_alone_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=1, trainer_class=OwnLoss)
    trainer.names = ("input_ids",)
    with pytest.raises(UnsupportedError, match=r"without its position_ids and foak_packed; hand on the whole batch"):
        train(trainer, packs.framework())


# -- multipack


def test_every_sample_once_with_workers_that_stay(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make(tmp_path, Listed(), **options)
    train(trainer, packs.framework(multipack={"max_tokens": 40, "num_processes": 1}))
    rounds = len(trainer.seen) // 2
    everything = sorted(example["input_ids"] for example in EXAMPLES)
    assert list(epochs_of(trainer.seen, rounds)) == [everything] * 2
    assert trainer.seen[:rounds] != trainer.seen[rounds:]


def epochs_of(seen: list[Any], steps: int) -> Iterator[list[Any]]:
    for begin in range(0, len(seen), steps):
        yield sorted(itertools.chain(*seen[begin : begin + steps]))


@pytest.mark.parametrize("data", [None, Listed], ids=["datasets", "torch"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_multipack_takes_every_sample_once_an_epoch(tmp_path: Path, accumulated: int, data: Any) -> None:
    trainer = make(tmp_path, data and data(), gradient_accumulation_steps=accumulated, num_train_epochs=3)
    train(trainer, packs.framework(multipack={"max_tokens": 40, "num_processes": 1}))
    rounds = len(trainer.seen) // 3
    assert trainer.state.max_steps == trainer.state.global_step == 3 * -(-rounds // accumulated)
    assert trainer.state.epoch == 3.0
    everything = sorted(example["input_ids"] for example in EXAMPLES)
    assert list(epochs_of(trainer.seen, rounds)) == [everything] * 3
    assert max(sum(map(len, batch)) for batch in trainer.seen) <= 40
    assert sum(LENGTHS) / (rounds * 40) > 0.75


def test_the_budget_is_by_default_what_the_batch_size_gives_on_average(tmp_path: Path) -> None:
    trainer = make(tmp_path, per_device_train_batch_size=5, num_train_epochs=1)
    train(trainer, packs.framework(multipack={}))
    average = -(-5 * sum(LENGTHS) // len(LENGTHS))
    assert max(sum(map(len, batch)) for batch in trainer.seen) <= average
    assert len(trainer.seen) <= -(-len(LENGTHS) // 5) + 1
    alone = make(tmp_path, per_device_train_batch_size=1, num_train_epochs=1)
    train(alone, packs.framework(multipack={}))
    assert max(sum(map(len, batch)) for batch in alone.seen) == max(LENGTHS)


def test_the_budget_shrinks_with_a_batch_size_that_memory_did_not_hold(tmp_path: Path) -> None:
    trainer = make(tmp_path, Dataset.from_list(EXAMPLES[:4] * 8), per_device_train_batch_size=8)
    packs.framework(multipack={}).apply(trainer)
    average = sum(LENGTHS[:4]) / 4
    for size, budget in ((8, 8 * average), (4, 4 * average), (1, max(LENGTHS[:4]))):
        trainer._train_batch_size = size  # as auto_find_batch_size does
        assert trainer.get_train_dataloader.sampler().max_tokens == budget


def test_a_multipack_step_is_the_padded_step_of_the_same_samples(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=1, gradient_accumulation_steps=2, max_grad_norm=0.0)
    train(trainer, packs.framework(multipack={"max_tokens": 40}))
    by_tokens = {tuple(example["input_ids"]): example for example in EXAMPLES}
    model = packs.build()
    samples = [by_tokens[tuple(tokens)] for batch in trainer.seen[:2] for tokens in batch]
    step = packs.step(model, packs.padded(samples))
    first = trainer.state.log_history[0]
    norm = torch.stack([g.norm() for g in step.gradients.values() if g is not None]).norm()
    assert first["loss"] == pytest.approx(float(step.loss), rel=packs.FP32)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=10 * packs.FP32)


@pytest.mark.parametrize("multipack", [None, {"max_tokens": 40}], ids=["padding-free", "multipack"])
@pytest.mark.parametrize(("stop_at", "accumulated"), [(3, 1), (9, 1), (4, 2)])
def test_a_run_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, multipack: Any, stop_at: int, accumulated: int
) -> None:
    accumulate = {"gradient_accumulation_steps": accumulated}
    whole = make(tmp_path / "whole", **accumulate)
    train(whole, packs.framework(multipack))
    options = {"save_strategy": "steps", "save_steps": stop_at, **accumulate}
    killed = make(tmp_path / "killed", **options)
    killed.add_callback(Recorder(stop_at))
    train(killed, packs.framework(multipack))
    trained = len(killed.seen)
    assert killed.seen == whole.seen[:trained]
    resumed = make(tmp_path / "killed", **options)
    train(
        resumed, packs.framework(multipack), resume_from_checkpoint=str(tmp_path / "killed" / f"checkpoint-{stop_at}")
    )
    assert resumed.seen == whole.seen[trained:]
    assert resumed.losses == pytest.approx(whole.losses[trained:], rel=CURVE)
    assert resumed.state.global_step == whole.state.global_step
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_the_seed_makes_the_batches(tmp_path: Path) -> None:
    runs = []
    for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 2, "data_seed": 1}):
        trainer = make(tmp_path, num_train_epochs=1, **seed)
        train(trainer, packs.framework(multipack={"max_tokens": 40}))
        runs.append(trainer.seen)
    assert runs[0] == runs[1] == runs[3] != runs[2]


# -- report, refusals, restore


def test_the_report_says_what_was_gained(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=1)
    framework = packs.framework(multipack={"max_tokens": 40})
    report = train(trainer, framework)
    (note,) = report.notes
    padded = sum(len(batch) * max(map(len, batch)) for batch in trainer.seen)
    assert f"{sum(LENGTHS)} tokens of {len(LENGTHS)} sequences in {len(trainer.seen)} batches" in note
    assert f"fill {sum(LENGTHS) / padded:.1%} before (the same batches padded), 100.0% now" in note
    assert re.search(r", [\d,]+ tokens/s on each process$", note)
    assert note in str(report)
    trainer.train()
    assert len(report.notes) == 1
    assert report.to_dict()["notes"] == report.notes


def test_restore_gives_the_trainer_back(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=1)
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    framework = packs.framework(multipack={})
    framework.apply(trainer)
    assert isinstance(trainer.get_train_dataloader, TrainingBatches)
    framework.restore()
    assert {name: value for name, value in vars(trainer).items() if before.get(name) is not value} == {}
    assert vars(trainer).keys() == before.keys()
    assert trainer.callback_handler.callbacks == callbacks
    trainer.train()
    assert all(isinstance(batch, list) for batch in trainer.seen)


@pytest.mark.parametrize(
    ("data", "options", "multipack", "error", "message"),
    [
        (None, {"dataloader_drop_last": True}, {}, UnsupportedError, "multipack drops no sample"),
        (None, {"train_sampling_strategy": "group_by_length"}, {}, UnsupportedError, "'group_by_length'"),
        (None, {}, {"max_tokens": 29}, ConfigError, r"multipack\.max_tokens is 29, but the longest sample has 30"),
        (streamed, {"max_steps": 3}, {}, UnsupportedError, "does not tell"),
        (lambda: [{"text": "a"}] * 8, {}, {}, UnsupportedError, "which sample 0 of the data set has not"),
        (lambda: [{"input_ids": [5]}, {"input_ids": []}], {}, {}, UnsupportedError, "sample 1 .* has no token"),
    ],
)
def test_what_multipack_refuses(
    tmp_path: Path, data: Any, options: Any, multipack: Any, error: type[Exception], message: str
) -> None:
    trainer = make(tmp_path, data and data(), remove_unused_columns=False, **options)
    with pytest.raises(error, match=message):
        train(trainer, packs.framework(multipack))


def test_noise_by_the_length_of_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="NEFTune scales its noise by the length of a row"):
        packs.framework().apply(make(tmp_path, neftune_noise_alpha=5.0))


def test_batches_of_a_stream_would_be_cut_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, streamed(), max_steps=3)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(UnsupportedError, match="accelerate would cut the batches of a streamed data set apart"):
        packs.framework().apply(trainer)


def test_lengths_of_a_column_are_believed() -> None:
    data = Dataset.from_list([{"input_ids": [5, 6], "length": 7}, {"input_ids": [5], "length": 3}])
    options = {"num_processes": 1, "key": "multipack"}
    assert sample_lengths(data, length_column="length", **options).tolist() == [7, 3]
    assert sample_lengths(data.select([1, 0, 1]), length_column="other", **options).tolist() == [1, 2, 1]


def test_lengths_of_samples_that_are_made_as_they_are_read() -> None:
    data = Dataset.from_list([{"input_ids": [5, 6, 7]}, {"input_ids": [5]}])
    data.set_transform(lambda batch: {"input_ids": [[*tokens, 2] for tokens in batch["input_ids"]]})
    assert sample_lengths(data, num_processes=1, length_column="length", key="multipack").tolist() == [4, 2]


def test_processes_read_a_large_data_set() -> None:
    class Large(Listed):
        def __len__(self) -> int:
            return 10_001

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": [1] * (1 + index % 3)}

    lengths = sample_lengths(Large(), num_processes=2, length_column="length", key="multipack")
    assert lengths.tolist() == [1 + index % 3 for index in range(10_001)]
