"""Models that take packed batches: equal to padded ones, apart from one another, themselves again after `restore`."""

from __future__ import annotations

import copy
from typing import Any

import packs
import pytest
import torch
from torch import nn

from foak.core import UnsupportedError
from foak.padding_free.attention import packed_name
from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.packed import PACKED

EXAMPLES = packs.sequences()
MAMBA: dict[str, Any] = {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 24,
    "mamba_chunk_size": 8,
}
"""A hybrid of a state-space layer and attention."""


def pair(prefix: str = "Llama", **fields: Any) -> tuple[Any, Any]:
    """A plain model and an equal one that takes packed batches."""
    plain = packs.build(prefix, **fields)
    fast = copy.deepcopy(plain)
    packs.framework().apply(fast)
    return plain, fast


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "lengths",
    [packs.LENGTHS, (1,), (1, 1, 1), (12,), (7, 7), (1, 40), tuple(range(1, packs.MAX_LENGTH + 1))],
    ids=lambda lengths: "-".join(map(str, lengths[:6])),
)
def test_loss_and_gradients_equal_the_padded_batch(lengths: tuple[int, ...], side: packs.Side) -> None:
    plain, fast = pair()
    examples = packs.sequences(lengths)
    # where no label is left, plain transformers' mean is not a number, and its sum is one
    options = {"num_items_in_batch": torch.tensor(3)} if max(lengths) == 1 else {}
    expected = packs.step(plain, packs.padded(examples, side), **options)
    packs.assert_equal_steps(packs.step(fast, packs.packed(examples), **options), expected)


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("Mistral", {"sliding_window": 6}),
        ("Gemma2", {"head_dim": 12, "sliding_window": 6}),
        (
            "GPT2",
            {
                "n_embd": 48,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        (
            "Llama4Text",
            {"head_dim": 12, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 6},
        ),
        ("GptOss", {"head_dim": 12, "num_local_experts": 4, "sliding_window": 6}),
        (
            "DeepseekV3",
            {
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 12,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
            },
        ),
        ("GraniteMoeHybrid", MAMBA),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_other_kinds_of_attention(prefix: str, fields: dict[str, Any], side: packs.Side) -> None:
    plain, fast = pair(prefix, **fields)
    expected = packs.step(plain, packs.padded(EXAMPLES, side))
    packs.assert_equal_steps(packs.step(fast, packs.packed(EXAMPLES)), expected)


def test_a_batch_without_labels_that_count() -> None:
    _, fast = pair()
    examples = [
        {"input_ids": example["input_ids"], "labels": [-100] * len(example["input_ids"])} for example in EXAMPLES
    ]
    step = packs.step(fast, packs.packed(examples), num_items_in_batch=torch.tensor(1))
    assert float(step.loss) == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in step.gradients.values() if gradient is not None)


def test_a_sequence_without_labels_that_count_among_others() -> None:
    plain, fast = pair()
    for number in range(len(EXAMPLES)):
        examples = copy.deepcopy(EXAMPLES)
        examples[number]["labels"] = [-100] * len(examples[number]["labels"])
        expected = packs.step(plain, packs.padded(examples))
        packs.assert_equal_steps(packs.step(fast, packs.packed(examples)), expected)


@pytest.mark.parametrize("prefix", ["Llama", "GPT2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_the_batch_brings(prefix: str, side: packs.Side) -> None:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    plain, fast = pair(prefix, **(no_dropout if prefix == "GPT2" else {}))
    batch = packs.padded(EXAMPLES, side)
    batch["position_ids"] = 2 * batch["position_ids"] + 3  # no position goes on by one
    expected = packs.step(plain, batch)
    packs.assert_equal_steps(packs.step(fast, PaddingFreeCollator(lambda examples: batch)(EXAMPLES)), expected)


def test_embeddings_in_the_place_of_tokens() -> None:
    plain, fast = pair()
    batch = packs.packed(EXAMPLES)
    batch["inputs_embeds"] = fast.get_input_embeddings()(batch.pop("input_ids"))
    packs.assert_equal_steps(packs.step(fast, batch), packs.step(plain, packs.padded(EXAMPLES)))


def test_the_loss_over_routers_counts_real_tokens_alone() -> None:
    plain, fast = pair("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    packs.assert_equal_steps(packs.step(fast, packs.packed(EXAMPLES)), packs.step(plain, packs.padded(EXAMPLES)))


@pytest.mark.parametrize("prefix", ["Llama", "Mistral", "GraniteMoeHybrid"])
def test_changing_one_sequence_leaves_the_others_bit_for_bit(prefix: str) -> None:
    fields = {"GraniteMoeHybrid": MAMBA, "Mistral": {"sliding_window": 6}}
    _, fast = pair(prefix, **fields.get(prefix, {}))
    batch = packs.packed(EXAMPLES)
    with torch.no_grad():
        before = fast(**batch).logits.split(packs.LENGTHS, dim=1)
        for number in range(len(packs.LENGTHS)):
            changed = copy.copy(batch)
            own = batch[PACKED].sequence_ids == number
            changed["input_ids"] = torch.where(own, (batch["input_ids"] + 7) % packs.VOCAB_SIZE, batch["input_ids"])
            after = fast(**changed).logits.split(packs.LENGTHS, dim=1)
            equal = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert equal == [other != number for other in range(len(packs.LENGTHS))]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("prefix", ["Llama", "GraniteMoeHybrid"])
def test_checkpointing_recomputes_with_the_layout(prefix: str, reentrant: bool) -> None:
    plain, fast = pair(prefix, **(MAMBA if prefix == "GraniteMoeHybrid" else {}))
    fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fast.enable_input_require_grads()
    expected = packs.step(plain, packs.padded(EXAMPLES))
    packs.assert_equal_steps(packs.step(fast, packs.packed(EXAMPLES)), expected)


def test_two_layouts_in_flight_are_not_mixed_up() -> None:
    plain, fast = pair()
    fast.gradient_checkpointing_enable({"use_reentrant": False})
    first, second = packs.sequences((9, 3, 6), seed=1), packs.sequences((2, 12, 4), seed=2)
    losses = [fast(**packs.packed(examples)).loss for examples in (first, second)]
    sum(losses).backward()  # type: ignore[union-attr]
    sum(plain(**packs.padded(examples)).loss for examples in (first, second)).backward()
    for (name, mine), theirs in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_bf16_is_within_its_noise() -> None:
    plain, _ = pair()
    exact = packs.step(copy.deepcopy(plain).double(), packs.padded(EXAMPLES))
    half = copy.deepcopy(plain).bfloat16()
    padded = packs.step(half, packs.padded(EXAMPLES))
    packs.framework().apply(half)
    packed = packs.step(half, packs.packed(EXAMPLES))
    for name, gradient in exact.gradients.items():
        assert gradient is not None

        def distance(step: packs.Step, name: str = name, gradient: torch.Tensor = gradient) -> float:
            mine = step.gradients[name]
            assert mine is not None
            return float((mine.double() - gradient).norm() / gradient.norm())

        # the same roundings in another order: twice the padded step's own distance from float64 is far for either
        assert distance(packed) <= 2 * distance(padded) + torch.finfo(torch.bfloat16).eps, name


def test_padded_batches_and_generation_stay_what_they_are() -> None:
    plain, fast = pair()
    plain.eval()
    fast.eval()
    batch = packs.padded(EXAMPLES, "left")
    torch.testing.assert_close(fast(**batch).logits, plain(**batch).logits, rtol=0, atol=0)
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        arguments = {"max_new_tokens": 4, "do_sample": False, **options}
        assert torch.equal(fast.generate(**prompt, **arguments), plain.generate(**prompt, **arguments))


def test_boundaries_of_other_collators_are_taken() -> None:
    plain, fast = pair()
    batch = packs.packed(EXAMPLES)
    layout = batch.pop(PACKED)
    expected = packs.step(plain, packs.padded(EXAMPLES))
    boundaries = {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens}
    lengths = {"max_length_q": layout.max_length, "max_length_k": layout.max_length}
    packs.assert_equal_steps(packs.step(fast, {**batch, **boundaries, **lengths}), expected)
    packs.assert_equal_steps(packs.step(fast, batch), expected)


def test_positions_are_made_where_a_batch_has_none() -> None:
    plain, fast = pair()
    batch = packs.packed(EXAMPLES)
    del batch["position_ids"]
    packs.assert_equal_steps(packs.step(fast, batch), packs.step(plain, packs.padded(EXAMPLES)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b | {"attention_mask": torch.ones_like(b["input_ids"])}, "has no attention_mask"),
        (lambda b: b | {"input_ids": b["input_ids"][:, :-1]}, r"a packed batch of 57 tokens is one row .* \(1, 56\)"),
        (lambda b: b | {"input_ids": b["input_ids"].view(3, 19)}, r"\(3, 19\)"),
    ],
)
def test_a_batch_that_is_not_one_row_is_refused(change: Any, message: str) -> None:
    _, fast = pair()
    with pytest.raises(UnsupportedError, match=message):
        fast(**change(packs.packed(EXAMPLES)))


def test_attention_that_is_chosen_afterwards_is_refused() -> None:
    """It would get no layout, and take the row for one sequence."""
    plain, fast = pair()
    fast.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError, match="has been set to 'eager' since; choose the implementation before foak"):
        fast(**packs.packed(EXAMPLES))
    batch = packs.padded(EXAMPLES)
    torch.testing.assert_close(fast(**batch).logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)


def test_apply_and_restore_leave_no_trace() -> None:
    model = packs.build()
    model.config.name_or_path = "shared"
    shared = nn.Module()
    shared.config = model.config
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    framework = packs.framework()
    report = framework.apply(model)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [(record.rule, record.module) for record in report.patched] == [("packed_batches", "")]
    assert model.config._attn_implementation == packed_name("sdpa")
    assert shared.config._attn_implementation == "sdpa"
    assert len({id(m.config) for m in model.modules() if hasattr(m, "config")}) == 1
    framework.restore()
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert all(before[name].keys() == after[name].keys() for name in before)
    assert all(before[name][key] is value for name in after for key, value in after[name].items())


def test_saved_files_and_copies_do_not_know_of_it(tmp_path: Any) -> None:
    plain, fast = pair()
    for name, model in (("plain", plain), ("fast", fast)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "fast" / file.name).read_bytes(), file.name
    twin = copy.deepcopy(fast)
    expected = packs.step(plain, packs.padded(EXAMPLES))
    packs.assert_equal_steps(packs.step(twin, packs.packed(EXAMPLES)), expected)
    assert all(p.grad is None for p in fast.parameters())


def test_lora_trains_the_same() -> None:
    from peft import LoraConfig, get_peft_model

    plain, _ = pair()
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    plain = get_peft_model(plain, config)
    fast = copy.deepcopy(plain)
    report = packs.framework().apply(fast)
    assert [record.module for record in report.patched] == ["base_model.model"]
    packs.assert_equal_steps(packs.step(fast, packs.packed(EXAMPLES)), packs.step(plain, packs.padded(EXAMPLES)))


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_compiled_models_give_the_same(by_layer: bool) -> None:
    plain, fast = pair(num_hidden_layers=1)
    compiled = fast if by_layer else torch.compile(fast, backend="eager")
    if by_layer:
        fast.model.layers[0].compile(backend="eager")
    for lengths in ((4, 9, 2), packs.LENGTHS):
        examples = packs.sequences(lengths)
        expected = packs.step(plain, packs.padded(examples))
        fast.zero_grad()
        loss = compiled(**packs.packed(examples)).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in fast.named_parameters()}
        packs.assert_equal_steps(packs.Step(loss.detach(), gradients), expected)


def test_a_training_by_hand() -> None:
    plain, fast = pair()
    collator = PaddingFreeCollator(device_type="cpu")
    loader = torch.utils.data.DataLoader(packs.sequences((4, 9, 2, 7, 3, 11)), batch_size=3, collate_fn=collator)
    mine = [packs.step(fast, batch) for batch in loader]
    for number, step in enumerate(mine):
        examples = packs.sequences((4, 9, 2, 7, 3, 11))[3 * number : 3 * number + 3]
        packs.assert_equal_steps(step, packs.step(plain, packs.padded(examples)))
