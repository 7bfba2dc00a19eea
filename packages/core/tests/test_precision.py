"""The table of weights and mixed precision: each combination trains for a few steps, or is refused as it says."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from foak.core import AccelerationFramework, UnsupportedError
from foak.core.precision import COMBINATIONS, HEADER, UNDERFLOW, UNSCALED, Combination, find_misfit, rows

MakeModel = Callable[[], LlamaForCausalLM]
IDS = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(0))


class Sentences(Dataset[dict[str, Any]]):
    """Eight random sequences, to be learned by heart."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


def arguments(folder: Path, mixed_precision: str, **kwargs: Any) -> TrainingArguments:
    mode = {} if mixed_precision == "none" else {mixed_precision: True}
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=mixed_precision != "fp16",
        report_to=[],
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **mode,
        **kwargs,
    )


def model_for(combination: Combination, make: MakeModel) -> nn.Module:
    model: nn.Module = make().to(getattr(torch, combination.weights))
    if combination.method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    return model


def losses_of(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_learns(losses: list[float]) -> None:
    # A model whose weights have become NaN is logged with a loss of 0.
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert losses[-1] < losses[0] - 0.02  # one batch, so that nothing but learning moves it


def case(combination: Combination) -> Any:
    name = f"{combination.weights}-{combination.mixed_precision}-{combination.method}"
    return pytest.param(combination, id=name, marks=[pytest.mark.gpu] if combination.mixed_precision == "fp16" else [])


@pytest.mark.parametrize("combination", [case(cell) for cell in COMBINATIONS if cell.method != "quantized_lora"])
def test_each_combination_trains_or_is_refused(combination: Combination, tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = model_for(combination, tiny_llama)
    trainer = Trainer(model=model, args=arguments(tmp_path, combination.mixed_precision), train_dataset=Sentences())
    framework = AccelerationFramework({"plugins": {}})
    if combination.refusal is None:
        framework.apply(trainer)
        assert_learns(losses_of(trainer))
        return
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError) as caught:
        framework.apply(trainer)
    assert combination.refusal in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_refusal_under_fp16_does_not_wait_for_a_gpu(tiny_llama: MakeModel, tmp_path: Path) -> None:
    args = arguments(tmp_path, "none")
    args.fp16 = True
    with pytest.raises(UnsupportedError, match=rf"training argument fp16 .*model\.embed_tokens\.weight.*{UNSCALED}"):
        AccelerationFramework({"plugins": {}}).apply(tiny_llama().half(), train_args=args)


def test_fp16_on_a_cpu_is_refused_where_accelerate_would_leave_it_out(tiny_llama: MakeModel, tmp_path: Path) -> None:
    args = arguments(tmp_path, "none")
    args.fp16 = True
    with pytest.raises(UnsupportedError, match="fp16 is true, but on a CPU"):
        AccelerationFramework({"plugins": {}}).apply(tiny_llama(), train_args=args)


def test_adapters_in_float16_are_refused_as_weights_are(tiny_llama: MakeModel, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"])
    model = get_peft_model(tiny_llama().half(), config, autocast_adapter_dtype=False)
    found = find_misfit(model, arguments(tmp_path, "none"))
    assert found is not None
    assert found.argument == "optim"
    assert "lora_A" in found.problem


def test_the_refused_optimizer_does_turn_weights_into_nan_and_sgd_does_not(
    tiny_llama: MakeModel, tmp_path: Path
) -> None:
    """What the refusal says is true of plain transformers."""
    losses = losses_of(Trainer(model=tiny_llama().half(), args=arguments(tmp_path, "none"), train_dataset=Sentences()))
    assert not all(math.isfinite(loss) and loss > 0 for loss in losses)
    args = arguments(tmp_path, "none", optim="sgd")
    args.learning_rate = 0.5
    trainer = Trainer(model=tiny_llama().half(), args=args, train_dataset=Sentences())
    AccelerationFramework({"plugins": {}}).apply(trainer)
    assert_learns(losses_of(trainer))


def test_an_optimizer_of_the_users_own_is_not_judged_by_the_arguments(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama().half()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Trainer(model=model, args=arguments(tmp_path, "none"), train_dataset=Sentences(), optimizers=(own, None))
    AccelerationFramework({"plugins": {}}).apply(trainer)


def test_the_table_names_every_combination_once() -> None:
    keys = [(cell.weights, cell.mixed_precision, cell.method) for cell in COMBINATIONS]
    assert len(set(keys)) == len(keys) == 3 * len(rows())
    assert all(len(row) == len(HEADER) for row in rows())
    assert {cell.refusal for cell in COMBINATIONS} == {None, UNSCALED, UNDERFLOW}


def test_the_readmes_table_is_current() -> None:
    spec = importlib.util.spec_from_file_location("foak_precision", Path(__file__).parent / "precision_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.README.read_text(encoding="utf-8")
    assert module.BEGIN in text
    assert module.replaced(text) == text, "run: python packages/core/tests/precision_table.py --write"
