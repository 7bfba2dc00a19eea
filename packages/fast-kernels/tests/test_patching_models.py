"""What a patched model must still do: be copied, saved, compiled, generate, be patched again, and be let go."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    BY_NAME,
    FP32_TOLERANCE,
    Pair,
    accelerate,
    assert_same_gradients,
    assert_untouched,
    configuration,
    counting_computed,
    distance,
    pair,
    snapshot,
    step,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foak.core import AccelerationFramework, UnsupportedError
from foak.fast_kernels.loss.lazy_logits import LazyLogits

BATCH = BY_NAME["Llama"].batch()
SOME = pytest.mark.parametrize("architecture", ["Llama", "Gemma 3", "Mixtral", "GPTBigCode", "Phi-3"])


def assert_alike(models: Pair, batch: dict[str, torch.Tensor] = BATCH) -> None:
    losses = [step(model, batch) for model in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def is_fast(model: Any) -> bool:
    """Whether a step of the model takes its loss without logits."""
    return isinstance(model(**BATCH).logits, LazyLogits)


# -- copies and files ------------------------------------------------------------------------------------------------


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@SOME
@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_is_a_model_of_its_own(architecture: str, duplicate: Callable[[Any], Any]) -> None:
    models = pair(architecture)
    other = duplicate(models.fast)
    for mine, theirs in zip(other.parameters(), models.fast.parameters(), strict=True):
        assert mine is not theirs
    with torch.no_grad():
        for parameter in models.fast.parameters():
            parameter.zero_()
    models.framework.restore()
    assert_alike(Pair(models.plain, other, models.framework, models.report))
    restored = copy.deepcopy(other)
    assert_alike(Pair(models.plain, restored, models.framework, models.report))


@SOME
def test_files_and_keys_are_the_plain_ones(architecture: str, tmp_path: Path) -> None:
    models = pair(architecture)
    assert list(models.fast.state_dict()) == list(models.plain.state_dict())
    assert [n for n, _ in models.fast.named_parameters()] == [n for n, _ in models.plain.named_parameters()]
    assert [n for n, _ in models.fast.named_buffers()] == [n for n, _ in models.plain.named_buffers()]
    assert [n for n, _ in models.fast.named_modules()] == [n for n, _ in models.plain.named_modules()]
    for folder, model in zip(("plain", "fast"), models.both, strict=True):
        step(model, BATCH)
        model.save_pretrained(tmp_path / folder)
    names = sorted(f.name for f in (tmp_path / "plain").iterdir())
    assert sorted(f.name for f in (tmp_path / "fast").iterdir()) == names
    for name in names:
        plain, fast = tmp_path / "plain" / name, tmp_path / "fast" / name
        if name.endswith(".safetensors"):
            weights = load_file(plain), load_file(fast)
            assert weights[0].keys() == weights[1].keys()
            assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
        else:
            assert fast.read_bytes() == plain.read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fast").train()
    assert not is_fast(loaded)
    assert_alike(Pair(models.plain, loaded, models.framework, models.report))


def test_loading_weights_into_a_patched_model() -> None:
    models = pair()
    other = {key: value * 1.1 for key, value in models.plain.state_dict().items()}
    for assign in (False, True):
        for model in models.both:
            model.load_state_dict({key: value.clone() for key, value in other.items()}, assign=assign)
        assert_alike(models)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16).float(), lambda m: m.double().float()])
def test_moving_a_patched_model(move: Callable[[Any], Any]) -> None:
    models = pair()
    for model in models.both:
        move(model)
    assert_alike(models)


def test_a_patched_model_in_another_dtype() -> None:
    models = pair("Qwen3")
    for model in models.both:
        model.double()
    losses = [step(model, BATCH) for model in models.both]
    assert losses[1].dtype == losses[0].dtype
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def test_resizing_the_embeddings_of_a_patched_model() -> None:
    models = pair()
    for model in models.both:
        torch.manual_seed(0)
        model.resize_token_embeddings(117, mean_resizing=False)
        assert model(**BATCH).logits.shape[-1] == 117
    assert_alike(models)


# -- several models, several patches ---------------------------------------------------------------------------------


def test_one_of_two_models_of_a_class() -> None:
    first, second = BY_NAME["Llama"].build(seed=0), BY_NAME["Llama"].build(seed=1)
    before = snapshot(second)
    accelerate(first)
    assert is_fast(first)
    assert not is_fast(second)
    assert_untouched(second, before)
    fresh = BY_NAME["Llama"].build(seed=1)
    assert torch.equal(step(second, BATCH), step(fresh, BATCH))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(second.parameters(), fresh.parameters(), strict=True))


def test_two_models_with_their_own_switches_and_one_configuration_object() -> None:
    config = configuration(fast_rms_layernorm=False)
    models = [BY_NAME["Llama"].build() for _ in range(2)]
    reports = []
    for model, switch in zip(models, (False, "auto"), strict=True):
        config["plugins"]["training"]["fused_ops_and_kernels"]["fast_rms_layernorm"] = switch
        reports.append(AccelerationFramework(config).apply(model))  # type: ignore[arg-type]
    assert not any(r.rule == "rms_norm" for r in reports[0])
    assert any(r.rule == "rms_norm" for r in reports[1])
    assert "forward" not in vars(models[0].model.norm)
    assert "forward" in vars(models[1].model.norm)


def test_applying_twice_changes_nothing() -> None:
    models = pair()
    after_one = snapshot(models.fast)
    report = models.framework.apply(models.fast)
    assert report.to_dict() == models.report.to_dict()
    assert_untouched(models.fast, after_one)


def test_a_second_framework_keeps_what_the_first_has_patched() -> None:
    models = pair()
    before = snapshot(models.plain)
    second = AccelerationFramework(configuration())
    report = second.apply(models.fast)
    assert report.kept
    assert all("already, by" in r.reason for r in report.kept)
    assert_alike(models)
    second.restore()
    assert_alike(models)
    models.framework.restore()
    assert snapshot(models.fast).keys() == before.keys()
    assert all("forward" not in vars(module) for module in models.fast.modules())


@SOME
def test_patch_restore_patch(architecture: str) -> None:
    model: Any = BY_NAME[architecture].build()
    plain = copy.deepcopy(model)
    before = snapshot(model)
    framework = AccelerationFramework(configuration())
    reports = []
    for _ in range(3):
        reports.append(framework.apply(model).to_dict())
        assert is_fast(model)
        assert_alike(Pair(plain, model, framework, None))  # type: ignore[arg-type]
        model.zero_grad()
        framework.restore()
        assert not is_fast(model)
        assert_untouched(model, before)
    assert reports[0] == reports[1] == reports[2]
    loss, expected = step(model, BATCH), step(plain, BATCH)
    assert torch.equal(loss, expected)


def test_restore_below_accelerates_wrapper_leaves_plain_numbers() -> None:
    """accelerate wraps the model's forward for bf16 after foak has patched it; its wrapper must survive."""
    from accelerate import Accelerator

    models = pair()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = [accelerator.prepare_model(model) for model in models.both]
    assert prepared[1].forward.__func__ is not models.fast.__class__.forward
    with counting_computed() as computed:
        output = prepared[1](**BATCH)
        output.loss.backward()
    assert not computed
    assert output.logits.dtype == torch.float32
    models.framework.restore()
    for module in models.fast.modules():
        assert module is models.fast or "forward" not in vars(module)
    losses = [step(model, BATCH) for model in prepared]
    assert torch.equal(losses[0], losses[1])
    pairs = zip(models.plain.parameters(), models.fast.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    for model in prepared:
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert_alike(models)


# -- other modes -----------------------------------------------------------------------------------------------------


@SOME
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_between_training_steps(architecture: str, use_cache: bool) -> None:
    models = pair(architecture)
    prompt = {"input_ids": BATCH["input_ids"][:1, :6], "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    written: list[list[Any]] = []
    for model in models.both:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        written.append([])
        for seed in range(3):
            model.train()
            step(model, BY_NAME["Llama"].batch(seed=seed))
            optimizer.step()
            model.eval()
            options: dict[str, Any] = {"max_new_tokens": 8, "use_cache": use_cache}
            written[-1].append(model.generate(**prompt, **options, do_sample=False).tolist())
            torch.manual_seed(seed)
            written[-1].append(model.generate(**prompt, **options, do_sample=True).tolist())
            if use_cache:
                written[-1].append(model.generate(**prompt, **options, num_beams=3).tolist())
    assert written[0] == written[1]


@SOME
def test_evaluation(architecture: str) -> None:
    models = pair(architecture)
    outputs = []
    for model in models.both:
        model.eval()
        with torch.no_grad():
            outputs.append((model(**BATCH), model(input_ids=BATCH["input_ids"])))
    (expected, without), (actual, fast_without) = outputs
    assert distance(actual.loss, expected.loss) <= FP32_TOLERANCE
    assert torch.equal(actual.logits.argmax(-1), expected.logits.argmax(-1))
    assert distance(fast_without.logits, without.logits) <= FP32_TOLERANCE
    assert fast_without.loss is None


CALLS: dict[str, Callable[[Any], Any]] = {
    "labels by position": lambda m: m(BATCH["input_ids"], BATCH["attention_mask"], None, None, None, BATCH["labels"]),
    "tuple": lambda m: m(**BATCH, return_dict=False),
    "logits_to_keep": lambda m: m(input_ids=BATCH["input_ids"], labels=BATCH["labels"][:, -5:], logits_to_keep=5),
    "num_items_in_batch": lambda m: m(**BATCH, num_items_in_batch=torch.tensor(7)),
    "num_items_in_batch, a number": lambda m: m(**BATCH, num_items_in_batch=7),
    "another ignore_index": lambda m: m(
        input_ids=BATCH["input_ids"], labels=BATCH["labels"].clamp(min=0), ignore_index=0
    ),
    "shifted labels": lambda m: m(
        input_ids=BATCH["input_ids"], labels=BATCH["labels"], shift_labels=BATCH["labels"].roll(-1, 1).contiguous()
    ),
    "embeddings": lambda m: m(
        inputs_embeds=m.get_input_embeddings()(BATCH["input_ids"]).detach(), labels=BATCH["labels"]
    ),
    "hidden states": lambda m: m(**BATCH, output_hidden_states=True),
}


@pytest.mark.parametrize("fast_loss", ["fused_linear", True])
@pytest.mark.parametrize("name", CALLS)
def test_ways_to_call(name: str, fast_loss: bool | str) -> None:
    models = pair("Llama", fast_loss=fast_loss)
    losses = []
    for model in models.both:
        output = CALLS[name](model)
        losses.append(output[0])
        losses[-1].backward()
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


@pytest.mark.parametrize("fast_loss", ["fused_linear", True])
@pytest.mark.parametrize("items", [None, 0, 5])
def test_a_batch_without_labels_gives_zero_and_zero_gradients(fast_loss: bool | str, items: int | None) -> None:
    model = pair("Llama", fast_loss=fast_loss).fast
    more = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    nothing = torch.full_like(BATCH["input_ids"], -100)
    loss = step(model, {"input_ids": BATCH["input_ids"], "labels": nothing}, **more)
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("fast_loss", ["fused_linear", True])
def test_a_custom_loss_function_of_the_model_is_used(fast_loss: bool | str) -> None:
    def loss_function(logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return logits.float().logsumexp(-1)[labels != -100].mean()

    plain: Any = BY_NAME["Llama"].build()
    plain.loss_function = loss_function
    fast = copy.deepcopy(plain)
    framework = AccelerationFramework(configuration(fast_loss=fast_loss))
    framework.apply(fast, strict=False)
    assert_alike(Pair(plain, fast, framework, None))  # type: ignore[arg-type]


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(("architecture", "backend"), [("Llama", "eager"), ("Gemma 2", "aot_eager")])
def test_compiling_the_whole_model(architecture: str, backend: str) -> None:
    models = pair(architecture)
    compiled = torch.compile(models.fast, backend=backend, fullgraph=True)
    loss = compiled(**BATCH).loss
    loss.backward()
    assert distance(loss, step(models.plain, BATCH)) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)
    without = compiled(input_ids=BATCH["input_ids"]).logits
    assert distance(without, models.plain(input_ids=BATCH["input_ids"]).logits) <= FP32_TOLERANCE


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("architecture", ["Qwen3", "Mixtral"])
def test_no_graph_break_more_than_without_foak(architecture: str) -> None:
    breaks = []
    for model in pair(architecture).both:
        torch._dynamo.reset()
        breaks.append(torch._dynamo.explain(model)(**BATCH).graph_break_count)
    assert breaks[1] <= breaks[0]


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiling_each_layer_keeps_the_loss_without_logits() -> None:
    models = pair("Llama")
    for model in models.both:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    with counting_computed() as computed:
        assert_alike(models)
    assert not computed


@pytest.mark.usefixtures("_fresh_dynamo")
def test_no_recompilation_when_the_length_changes() -> None:
    counts = []
    for model in pair("Llama").both:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(model, backend=counter, dynamic=True)
        for length in (9, 12, 17, 23):
            compiled(**BY_NAME["Llama"].batch(length=length)).loss.backward()
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]


def test_a_base_layer_that_is_not_there_is_refused_and_noted_where_no_weights_are() -> None:
    """A model without weights, as `foak explain` looks at it, is not quantized yet."""
    stanza = {"base_layer": "bitsandbytes", "fast_rms_layernorm": True}
    plugins = {"plugins": {"peft": {"quantization": {"fused_ops_and_kernels": stanza}}}}
    with pytest.raises(UnsupportedError, match=r"fused_ops_and_kernels\.base_layer is bitsandbytes"):
        AccelerationFramework(plugins).apply(BY_NAME["Llama"].build())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(BY_NAME["Llama"].tiny_config())
    report = AccelerationFramework(plugins).apply(model)
    assert report.patched
    assert any("the model has no bitsandbytes layer" in note for note in report.notes)
