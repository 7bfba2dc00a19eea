"""The same short training, plain and accelerated, and the comparison of the two."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer

from foak.core import AccelerationFramework
from foak.core.report import PatchReport
from foak.fast_kernels.loss.lazy_logits import LazyLogits

VOCAB_SIZE = 101
CONFIG = {
    "plugins": {
        "training": {
            "fused_ops_and_kernels": {
                "fast_loss": "fused_linear",
                "fast_rms_layernorm": True,
                "fast_rope_embeddings": True,
                "fast_activation": True,
            }
        }
    }
}

LOSS_TOLERANCE = 128 * torch.finfo(torch.float32).eps
"""Relative: two fp32 computations of a two-layer model that differ in the order of their sums."""

CURVE_TOLERANCE = 10 * LOSS_TOLERANCE
"""After optimizer steps, which divide by a gradient's size and so amplify its rounding."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} </s> "
    "{% endgeneration %}{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the words w3 to w100."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB_SIZE)}}
    split = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def llama(seed: int = 0, **fields: Any) -> Any:
    """A two-layer Llama with random weights, those of the norms included."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()  # as from_pretrained gives it


def words(generator: random.Random, low: int, high: int) -> str:
    return " ".join(f"w{generator.randint(3, 100)}" for _ in range(generator.randint(low, high)))


def prompts_and_completions(count: int = 32) -> Dataset:
    """Rows of ``prompt`` and ``completion``, of ragged lengths."""
    generator = random.Random(0)
    return Dataset.from_list(
        [{"prompt": words(generator, 3, 6), "completion": " " + words(generator, 2, 12)} for _ in range(count)]
    )


def tokens(count: int = 32) -> Dataset:
    """Rows of ``input_ids`` and ``labels`` with an ignored prompt."""
    encode = tokenizer()

    def row(example: dict[str, str]) -> dict[str, list[int]]:
        ids = encode(example["prompt"] + example["completion"])["input_ids"]
        prompt = len(encode(example["prompt"])["input_ids"])
        return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}

    dataset = prompts_and_completions(count)
    return dataset.map(row, remove_columns=dataset.column_names)


@dataclass
class Outcome:
    """What a training did.

    Attributes:
        losses: of each micro-batch, as `training_step` gives it.
        logged: of each logged step.
        gradient_norms: of each logged step.
        evaluations: the metrics of each evaluation, without timings.
        weights: the trainable parameters at the end.
        computed: lazy logits that had to be computed.
        report: None for the plain run.
    """

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    computed: int = 0
    report: PatchReport | None = None
    framework: AccelerationFramework | None = None


def train(
    make: Callable[[], Trainer], *, fast: bool, config: dict[str, Any] | None = None, **train_arguments: Any
) -> Outcome:
    """Make a trainer (which seeds itself from its arguments), accelerate it or not, and train."""
    trainer = make()
    outcome = Outcome(trainer)
    if fast:
        outcome.framework = AccelerationFramework(config or CONFIG)
        outcome.report = outcome.framework.apply(trainer)
    step = trainer.training_step

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = step(*args, **kwargs)
        outcome.losses.append(float(loss))
        return loss

    compute = LazyLogits.compute

    def counted(self: LazyLogits) -> torch.Tensor:
        outcome.computed += 1
        return compute(self)

    with mock.patch.object(trainer, "training_step", recorded), mock.patch.object(LazyLogits, "compute", counted):
        trainer.train(**train_arguments)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            outcome.logged.append(entry["loss"])
            outcome.gradient_norms.append(entry.get("grad_norm", 0.0))
            extra = ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
            outcome.metrics.append({k: v for k, v in entry.items() if k in extra or k.startswith(("rewards", "logps"))})
        if "eval_loss" in entry:
            timings = ("runtime", "per_second", "preparation_time")
            outcome.evaluations.append({k: v for k, v in entry.items() if not k.endswith(timings)})
    outcome.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return outcome


def train_both(make: Callable[[], Trainer], **options: Any) -> tuple[Outcome, Outcome]:
    """The plain and the accelerated training; their trainers must get equal models."""
    return train(make, fast=False, **options), train(make, fast=True, **options)


def close(actual: float, expected: float, tolerance: float) -> bool:
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def assert_alike(
    plain: Outcome, fast: Outcome, *, first: float = LOSS_TOLERANCE, later: float = CURVE_TOLERANCE
) -> None:
    """Losses, gradient norms, metrics and evaluations are equal step by step, and so are the weights at the end."""
    assert plain.losses
    assert plain.logged
    assert len(fast.losses) == len(plain.losses)
    assert close(fast.losses[0], plain.losses[0], first)
    for name in ("losses", "logged", "gradient_norms"):
        expected, actual = getattr(plain, name), getattr(fast, name)
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert close(mine, theirs, later), (name, actual, expected)
    for kind in ("metrics", "evaluations"):
        for theirs, mine in zip(getattr(plain, kind), getattr(fast, kind), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(close(mine[key], theirs[key], later) for key in theirs), (kind, mine, theirs)
    assert fast.weights.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        difference = (fast.weights[name] - weight).double().norm() / weight.double().norm().clamp(min=1e-3)
        assert difference <= 10 * later, name


def of(model: Any) -> Any:
    """An equal model of its own."""
    return copy.deepcopy(model)
