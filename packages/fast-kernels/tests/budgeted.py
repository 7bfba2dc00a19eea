"""Tiny models under an activation budget, and steps of them that are measured."""

from __future__ import annotations

from typing import Any

import torch
from storages import LivingStorages
from transformers import LlamaConfig, LlamaForCausalLM

from foak.core import AccelerationFramework
from foak.fast_kernels.checkpointing import budget as budgets

LAYERS = 6
MIB = 2**20


def llama(dropout: float = 0.0) -> Any:
    """A tiny Llama in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    """The model, with every layer checkpointed."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def framework(budget: Any, **kernels: Any) -> AccelerationFramework:
    """A framework with a budget (None: without), and with the kernels that are named."""
    sections: dict[str, Any] = {"activation_checkpointing": {"budget": budget}} if budget is not None else {}
    if kernels:
        sections["fused_ops_and_kernels"] = kernels
    return AccelerationFramework({"plugins": {"training": sections}})


def budgets_of(model: Any) -> list[budgets.ActivationBudget]:
    """The budgets of a model: one or none."""
    return [vars(m)[budgets.ATTRIBUTE] for m in model.modules() if budgets.ATTRIBUTE in vars(m)]


def budget_of(model: Any) -> budgets.ActivationBudget:
    """The one budget of a model."""
    (found,) = budgets_of(model)
    return found


class Run:
    """Steps of a model under a meter: losses, gradients, the peak of each step, layers kept."""

    def __init__(self, model: Any, meter: LivingStorages, accumulate: int = 1) -> None:
        self.model, self.meter, self.accumulate = model, meter, accumulate
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
        self.losses: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []
        self.peaks: list[int] = []
        self.kept: list[int] = []

    def steps(self, shapes: list[tuple[int, int]]) -> Run:
        """One step of random tokens of each shape."""
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        for index, shape in enumerate(shapes):
            ids = torch.randint(0, 128, shape, generator=generator)
            self.meter.peak = self.meter.allocated  # as a user who looks at each step by itself would
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.losses.append(loss.item())
            del loss
            decision = next((found.decision for found in budgets_of(self.model)), None)
            self.kept.append(decision.kept if decision else 0)
            if (index + 1) % self.accumulate == 0:
                self.optimizer.step()
                self.peaks.append(self.meter.peak)
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                self.gradients.append([g.numpy().copy() for g in grads])  # outside what the meter counts
                self.optimizer.zero_grad()
        return self


def assert_same_run(plain: Run, fast: Run) -> None:
    """Losses and gradients are equal, bit for bit."""
    assert plain.losses == fast.losses
    for expected, actual in zip(plain.gradients, fast.gradients, strict=True):
        assert len(expected) == len(actual) > 0
        assert all((a == b).all() for a, b in zip(expected, actual, strict=True))
