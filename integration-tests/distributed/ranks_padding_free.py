"""What each of two processes trains padding-free, and the same in one process.

python ranks_padding_free.py FOLDER PORT      # two processes go through every run and write FOLDER/NAME.RANK.pt
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import Trainer, TrainingArguments

from foak.core import AccelerationFramework
from foak.padding_free.packed import PACKED

WORLD_SIZE = 2
VOCAB_SIZE = 103
LENGTHS = (3, 14, 1, 9, 25, 2, 6, 11, 4, 19, 2, 7, 8, 5, 30, 3, 12, 6, 2, 10, 17, 4, 9)
MAX_TOKENS = 40

RUNS: dict[str, dict[str, Any]] = {
    "padding-free": {"multipack": None},
    "multipack": {},
    "multipack, accumulated": {"gradient_accumulation_steps": 2},
    "multipack, fused": {"kernels": True, "gradient_checkpointing": True},
    "multipack, resumed": {"resume": True},
}
"""Run to what is special about it; padding-free and multipack alike train two epochs."""


def samples() -> list[dict[str, list[int]]]:
    """Those of even number ignore half of their labels, so that ranks count different numbers of labels."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        ignored = length // 2 if number % 2 == 0 else 0
        found.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return found


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).train()


def padded(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(example["input_ids"]) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        fill = longest - len(example["input_ids"])
        rows["input_ids"].append(example["input_ids"] + [0] * fill)
        rows["labels"].append(example["labels"] + [-100] * fill)
        rows["attention_mask"].append([1] * len(example["input_ids"]) + [0] * fill)
    return {name: torch.tensor(values) for name, values in rows.items()}


class Recorder(Trainer):  # type: ignore[misc]
    """Keeps what each step trained, and the gradients of the first one."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = inputs["input_ids"][0].split(inputs[PACKED].lengths)
        self.__dict__.setdefault("seen", []).append([part.tolist() for part in tokens])
        loss = super().training_step(model, inputs, *args, **kwargs)
        last = len(self.seen) == self.args.gradient_accumulation_steps
        if last and "first" not in self.__dict__:
            self.first = {
                name.removeprefix("module."): parameter.grad.clone() for name, parameter in model.named_parameters()
            }
        return loss


def trainer_of(folder: Path, **options: Any) -> Recorder:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", **options},
    )
    data = samples()
    return Recorder(build(), arguments, train_dataset=data, data_collator=padded)  # type: ignore[arg-type]


def framework(multipack: dict[str, Any] | None, kernels: bool) -> AccelerationFramework:
    training: dict[str, Any] = {"attention": {"padding_free": {}}}
    if multipack is not None:
        training["dataloader"] = {"multipack": multipack}
    if kernels:
        training["fused_ops_and_kernels"] = {"fast_loss": "fused_linear", "fast_rope_embeddings": True}
    return AccelerationFramework({"plugins": {"training": training}})


def measure(name: str, folder: Path) -> dict[str, Any]:
    options = dict(RUNS[name])
    resume, kernels = options.pop("resume", False), options.pop("kernels", False)
    multipack = options.pop("multipack", {"max_tokens": MAX_TOKENS, "num_processes": 1})
    trainer = trainer_of(folder / name, **options)
    report = framework(multipack, kernels).apply(trainer)
    trainer.train()
    result = {
        "seen": trainer.seen,
        "first": trainer.first,
        "steps": (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "notes": report.notes,
        "accumulated": trainer.args.gradient_accumulation_steps,
    }
    if resume:
        stop = trainer.state.max_steps // 2 + 1
        first = trainer_of(folder / name, save_strategy="steps", save_steps=stop, max_steps=stop)
        framework(multipack, kernels).apply(first)
        first.train()
        second = trainer_of(folder / name)
        framework(multipack, kernels).apply(second)
        second.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{stop}"))
        result["resumed"] = first.seen + second.seen
        result["stopped"] = stop
    return result


def process(rank: int, folder: str, port: int) -> None:
    """One process: every run, each result in a file of its own, an error as its text."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        ACCELERATE_USE_CPU="true",
    )
    for name in RUNS:
        try:
            result = measure(name, Path(folder))
        except Exception:  # noqa: BLE001 - the next run must be measured too; the test shows the text
            result = {"error": traceback.format_exc()}
        torch.save(result, Path(folder) / f"{name}.{rank}.pt")
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    # forked, for the imports of a spawned process take longer than its runs; nothing has started threads yet
    mp.start_processes(process, args=(sys.argv[1], int(sys.argv[2])), nprocs=WORLD_SIZE, start_method="fork")
