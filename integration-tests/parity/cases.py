"""What is trained with foak and without: one table. Its rows are the valid combinations of what stands in `AXES`."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass

from architectures import ARCHITECTURES
from covering import pairwise

WITHOUT_GATED_MLP = frozenset({"Mixtral", "GPTBigCode"})
WITHOUT_ROPE = frozenset({"GPTBigCode"})
PACKED_EXPERTS = frozenset({"Mixtral"})

AXES: dict[str, tuple[str | int, ...]] = {
    "architecture": (
        "Llama",  # the plain case
        "Mistral",  # a sliding window
        "Mixtral",  # experts
        "Granite",  # scaled embeddings, residuals and logits
        "GPTBigCode",  # LayerNorms, learned positions, one key and value head
        "Qwen2",  # biases of query, key and value
        "Qwen3",  # norms of queries and keys, another head size
        "Gemma 2",  # norms with 1 + weight, soft caps, a GeGLU, tied head
        "Phi-3",  # packed projections, a partial rotation
        "OLMo 2",  # norms behind the sublayers
    ),
    "method": ("full", "LoRA", "LoRA on NF4", "LoRA on GPTQ"),
    # fp32; bf16 autocast over fp32 weights; bf16 weights (adapters in fp32, as PEFT makes them)
    "precision": ("fp32", "amp", "bf16"),
    "checkpointing": ("off", "reentrant", "non-reentrant"),
    "accumulation": (1, 4),
    "padding": ("padded", "padding-free"),
    "kernels": ("all", "norm", "rope", "activation", "loss", "loss without logits", "lora"),
}

SWITCHES: dict[str, dict[str, bool | str]] = {
    "norm": {"fast_rms_layernorm": True},
    "rope": {"fast_rope_embeddings": True},
    "activation": {"fast_activation": True},
    "loss": {"fast_loss": True},
    "loss without logits": {"fast_loss": "fused_linear"},
    "lora": {"fused_lora": True},
}
"""What switches a kernel on, each alone."""


@dataclass(frozen=True)
class Case:
    """One training; see `AXES` for the values."""

    architecture: str
    method: str
    precision: str
    checkpointing: str
    accumulation: int
    padding: str
    kernels: str

    @property
    def name(self) -> str:
        """As the test is called."""
        return ", ".join(str(value) for value in dataclasses.astuple(self))

    @property
    def switches(self) -> dict[str, bool | str]:
        """Of the kernels that the case trains with: those that its model and method have."""
        names = [name for name in SWITCHES if name != "loss"] if self.kernels == "all" else [self.kernels]
        return {key: value for name in names if self.has(name) for key, value in SWITCHES[name].items()}

    def has(self, kernel: str) -> bool:
        """Whether there is something for a kernel in the model."""
        match kernel:
            case "lora":
                return self.method != "full"
            case "rope":
                return self.architecture not in WITHOUT_ROPE
            case "activation":
                return self.architecture not in WITHOUT_GATED_MLP
        return True

    @property
    def valid(self) -> bool:
        """Whether it trains, and with something to compare."""
        return self.kernels == "all" or self.has(self.kernels)


KNOWN = {architecture.name: architecture for architecture in ARCHITECTURES}
EVERY: tuple[Case, ...] = tuple(
    case
    for values in itertools.product(*AXES.values())
    if (case := Case(*values)).valid  # type: ignore[arg-type]
)


def _cover() -> tuple[Case, ...]:
    # Of rows that hold as many new pairs the first is taken: cheap ones before, in no order otherwise, where the first
    # of the table itself would always be the plainest.
    order = random.Random(0).sample(range(len(EVERY)), len(EVERY))
    order.sort(key=lambda index: EVERY[index].accumulation)
    chosen = pairwise([dataclasses.astuple(EVERY[index]) for index in order])
    return tuple(EVERY[index] for index in sorted(order[place] for place in chosen))


COVERING: tuple[Case, ...] = _cover()
"""Every two values of two columns of `AXES` that any row has together, and of three columns as it falls."""
