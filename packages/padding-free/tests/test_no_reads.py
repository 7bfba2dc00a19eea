"""No layer asks the device for a value: on the meta device, where there are none, a whole packed step goes through."""

from __future__ import annotations

from typing import Any

import packs
import pytest
import torch

from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.packed import PACKED

NO_DROPOUT: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def on_meta(lengths: tuple[int, ...]) -> dict[str, Any]:
    batch = PaddingFreeCollator(device_type="cpu")(packs.sequences(lengths))
    return {name: value.to(torch.device("meta")) for name, value in batch.items()}


def model(prefix: str, **fields: Any) -> Any:
    with torch.device("meta"):
        made = packs.build(prefix, **fields)
    packs.framework().apply(made)
    return made


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"attn_implementation": "eager"}),
        ("Llama", {"attention_dropout": 0.1}),
        ("Mistral", {"sliding_window": 6}),
        ("Gemma2", {"head_dim": 12, "sliding_window": 6}),
        ("GPT2", NO_DROPOUT),
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_packed_step_reads_no_value(prefix: str, fields: dict[str, Any], checkpointed: bool) -> None:
    fast = model(prefix, **fields)
    if checkpointed:
        fast.gradient_checkpointing_enable({"use_reentrant": False})
    for lengths in (packs.LENGTHS, (1,), (7, 7), (1, 1, 60, 3)):
        fast.zero_grad()
        fast(**on_meta(lengths), num_items_in_batch=torch.tensor(3, device="meta")).loss.backward()
        assert all(parameter.grad is not None for parameter in fast.parameters())


def test_a_batch_without_its_layout_would_be_read() -> None:
    """Positions alone tell where sequences begin, but only on the host."""
    batch = on_meta(packs.LENGTHS)
    del batch[PACKED]
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        model("Llama")(**batch)
