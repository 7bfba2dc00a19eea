"""What a model's lazy logits answer: everything that can be read from real ones, and every cross entropy over them."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB_SIZE, Architecture
from pairs import FP32_TOLERANCE, Pair, assert_same_gradients, counting_computed, distance, pair
from torch.nn import functional as F

from foak.core import UnsupportedError
from foak.fast_kernels.loss.lazy_logits import LazyLogits

V = VOCAB_SIZE
BATCH = Architecture.batch()
LABELS = BATCH["labels"]
ROWS = LABELS.numel()
TEACHER = torch.linspace(-1, 1, V).softmax(-1)

Use = Callable[[torch.Tensor], Any]


@pytest.fixture(scope="module")
def models() -> Pair:
    return pair()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**BATCH).logits
    return logits


def both_logits(models: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    real, lazy = logits_of(models.plain), logits_of(models.fast)
    assert isinstance(lazy, LazyLogits)
    assert not lazy.is_computed
    return real, lazy


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert tuple(actual.shape) == tuple(expected.shape)
        assert actual.stride() == expected.stride()
        # a cast to 16 bits, or to an integer, may fall to the other side of a half
        coarse = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 1.0
        values, reference = torch.nan_to_num(actual.double()), torch.nan_to_num(expected.double())
        assert (values - reference).abs().max() <= max(FP32_TOLERANCE, coarse) * max(1.0, float(reference.abs().max()))
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same(mine, theirs)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert actual == expected


RECORDED: dict[str, Use] = {
    "float": lambda z: z.float(),
    "double": lambda z: z.double(),
    "half": lambda z: z.half(),
    "bfloat16": lambda z: z.bfloat16(),
    "to dtype": lambda z: z.to(torch.bfloat16),
    "to dtype by name": lambda z: z.to(dtype=torch.float64),
    "to device": lambda z: z.to("cpu"),
    "to device and dtype": lambda z: z.to("cpu", torch.float64),
    "to copy": lambda z: z.to(torch.float32, copy=True),
    "to like": lambda z: z.to(torch.zeros(1, dtype=torch.float64)),
    "type_as": lambda z: z.type_as(torch.zeros(1, dtype=torch.float64)),
    "clone": lambda z: z.clone(),
    "contiguous": lambda z: z.contiguous(),
    "detach": lambda z: z.detach(),
    "view": lambda z: z.view(-1, V),
    "view of a size": lambda z: z.view(torch.Size([ROWS, V])),
    "view with the last free": lambda z: z.view(ROWS, -1),
    "reshape": lambda z: z.reshape(17, 2, V),
    "flatten": lambda z: z.flatten(0, 1),
    "flatten by name": lambda z: z.flatten(start_dim=0, end_dim=-2),
    "times": lambda z: z * 3,
    "times from the left": lambda z: 0.5 * z,
    "times zero": lambda z: z * 0,
    "mul": lambda z: torch.mul(z, 2.0),
    "over": lambda z: z / 8,
    "true_divide": lambda z: torch.true_divide(z, 3.0),
    "tanh": lambda z: torch.tanh(z),
    "soft cap": lambda z: 30 * torch.tanh(z / 30),
    "slice": lambda z: z[:, :-1],
    "slice all but the last": lambda z: z[..., :-1, :],
    "slice with a step": lambda z: z[::2, 1::3],
    "row": lambda z: z[1],
    "row from the end": lambda z: z[-1, -2],
    "everything": lambda z: z[...],
    "chain": lambda z: (z[..., :-1, :].float().contiguous() * 2 / 3).view(-1, V),
}


@pytest.mark.parametrize("use", RECORDED.values(), ids=RECORDED)
def test_recorded_steps_stay_lazy_and_give_the_plain_values(models: Pair, use: Use) -> None:
    real, lazy = both_logits(models)
    with counting_computed() as computed:
        result = use(lazy)
        assert isinstance(result, LazyLogits)
        expected = use(real)
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        assert result.device == expected.device
    assert not computed
    assert result.stride() == expected.stride()
    assert result.is_contiguous() == expected.is_contiguous()
    assert_same(result + 0, expected + 0)


READ: dict[str, Use] = {
    "argmax": lambda z: z.argmax(-1),
    "max": lambda z: z.max(dim=-1).values,
    "topk": lambda z: torch.topk(z, 3).indices,
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: F.log_softmax(z, dim=-1, dtype=torch.float64),
    "logsumexp": lambda z: torch.logsumexp(z, -1),
    "gather": lambda z: z.gather(-1, LABELS.clamp(min=0)[..., None]),
    "plus": lambda z: z + 1,
    "plus from the left": lambda z: 1 + z,
    "minus": lambda z: 1 - z,
    "under": lambda z: 1 / z,
    "by zero": lambda z: z / 0.0,
    "floor": lambda z: torch.div(z, 0.01, rounding_mode="floor"),
    "power": lambda z: z**2,
    "negative": lambda z: -z,
    "compare": lambda z: z > 0.1,
    "times a tensor": lambda z: z * torch.tensor(2.0),
    "a tensor times": lambda z: torch.linspace(0, 1, V) * z,
    "matmul": lambda z: z @ torch.ones(V, 2),
    "einsum": lambda z: torch.einsum("bsv->bs", z),
    "where": lambda z: torch.where(z > 0, z, 0.0),
    "cat": lambda z: torch.cat([z, z]),
    "stack": lambda z: torch.stack([z[0], z[1]]),
    "cat of a slice": lambda z: torch.cat([z[:, :2], torch.zeros(2, 1, V)], dim=1),
    "split": lambda z: z.split(1),
    "chunk": lambda z: z.chunk(2, 1)[1],
    "unbind": lambda z: z.unbind(1)[3],
    "iterate": lambda z: [row.sum() for row in z],
    "transpose": lambda z: z.transpose(1, 2),
    "permute": lambda z: z.permute(2, 0, 1),
    "mT": lambda z: z.mT,
    "unsqueeze": lambda z: z.unsqueeze(0),
    "expand": lambda z: z[None].expand(2, -1, -1, -1),
    "view of all": lambda z: z.view(-1),
    "view as": lambda z: z.view_as(torch.empty(ROWS, V)),
    "view of bits": lambda z: z.view(torch.int32).shape,
    "unflatten": lambda z: z.unflatten(0, (1, 2)),
    "flatten of all": lambda z: z.flatten(),
    "mask": lambda z: z[LABELS != -100],
    "new axis": lambda z: z[None],
    "index of the vocabulary": lambda z: z[..., 3],
    "slice of the vocabulary": lambda z: z[..., :5],
    "one value": lambda z: z[0, 1, 2],
    "list index": lambda z: z[[1, 0]],
    "tensor index": lambda z: z[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "to int": lambda z: z.to(torch.int64),
    "long": lambda z: z.long(),
    "cpu": lambda z: z.cpu(),
    "type": lambda z: z.type(),
    "type to": lambda z: z.type(torch.bfloat16),
    "to meta": lambda z: tuple(z.to("meta").shape),
    "channels last": lambda z: z[None].contiguous(memory_format=torch.channels_last).stride(),
    "new_zeros": lambda z: z.new_zeros(3),
    "zeros_like": lambda z: torch.zeros_like(z),
    "ones like its type": lambda z: torch.ones(2, dtype=torch.float64).type_as(z),
    "tolist": lambda z: z.tolist()[1][2][3],
    "item": lambda z: z[0, 1, 2].item(),
    "float()": lambda z: float(z[0, 1, 2]),
    "bool()": lambda z: bool((z[0, 1, 2] == z[0, 1, 2]).all()),
    "format": lambda z: f"{z[0, 1, 2]:.2f}",
    "repr": lambda z: repr(z).partition("\n")[0][:12],
    "numpy": lambda z: torch.from_numpy(z.numpy()),
    "asarray": lambda z: torch.from_numpy(np.asarray(z)),
    "numpy function": lambda z: float(np.mean(np.array(z))),
    "dlpack": lambda z: torch.from_dlpack(z),
    "storage": lambda z: z.untyped_storage().nbytes(),
    "same storage": lambda z: z.data_ptr() == z.view(-1, V).data_ptr(),
    "version": lambda z: z._version,
    "no gradient function": lambda z: z.grad_fn is None,
    "is_leaf": lambda z: z.is_leaf,
    "grad": lambda z: z.grad is None,
    "deepcopy": lambda z: copy.deepcopy(z),
    "copy": lambda z: copy.copy(z),
    "pickle": lambda z: pickle.loads(pickle.dumps(z)),
    "equal": lambda z: torch.equal(z, z),
    "allclose": lambda z: torch.allclose(z, z.clone()),
    "member": lambda z: z in {z: 1},
    "length": lambda z: len(z),
    "metadata": lambda z: (tuple(z.shape), z.size(-1), z.dim(), z.ndim, z.numel(), z.dtype, z.device, z.element_size()),
    "kinds": lambda z: (z.is_floating_point(), torch.is_complex(z), torch.is_tensor(z), z.is_cuda, z.requires_grad),
    "strides of a slice": lambda z: (z[:, 1:].stride(), z[:, 1:].storage_offset(), z[:, 1:].is_contiguous()),
    "mul by name": lambda z: torch.mul(input=z, other=2.0),
    "div by name": lambda z: torch.div(input=z, other=2.0),
    "reshape by name": lambda z: torch.reshape(input=z, shape=(-1, V)),
    "flatten by torch's name": lambda z: torch.flatten(input=z, start_dim=0, end_dim=1),
    "clone by name": lambda z: torch.clone(input=z),
    "detach by name": lambda z: torch.detach(input=z),
    "tanh by name": lambda z: torch.tanh(input=z),
    "mul into": lambda z: torch.mul(z, 2.0, out=torch.empty(2, 17, V)),
    "tanh into": lambda z: torch.tanh(z, out=torch.empty(2, 17, V)),
    "operator": lambda z: operator.mul(z, 2),
    "aten": lambda z: torch.ops.aten.add.Tensor(z, z),
}


@pytest.mark.parametrize("use", READ.values(), ids=READ)
def test_everything_else_reads_the_plain_values(models: Pair, use: Use) -> None:
    real, lazy = both_logits(models)
    expected, actual = use(real), use(lazy)
    assert_same(actual + 0 if isinstance(actual, LazyLogits) else actual, expected)


WRONG: dict[str, Use] = {
    "row out of range": lambda z: z[9],
    "too many indices": lambda z: z[0, 0, 0, 0],
    "view of another size": lambda z: z.view(-1, V + 1),
    "two free sizes": lambda z: z.view(-1, -1),
    "fewer labels than rows": lambda z: F.cross_entropy(z.view(-1, V), LABELS.view(-1)[:-1]),
    "an unknown reduction": lambda z: F.cross_entropy(z.view(-1, V), LABELS.view(-1), reduction="total"),
    "bool of many": lambda z: bool(z),
    "item of many": lambda z: z.item(),
}


@pytest.mark.parametrize("use", WRONG.values(), ids=WRONG)
def test_what_real_logits_refuse_is_refused_in_kind(models: Pair, use: Use) -> None:
    real, lazy = both_logits(models)
    with pytest.raises((ValueError, RuntimeError, IndexError)) as expected:
        use(real)
    with pytest.raises((ValueError, RuntimeError, IndexError)) as actual:
        use(lazy)
    assert type(actual.value) is type(expected.value)


def test_torch_save(models: Pair) -> None:
    real, lazy = both_logits(models)
    buffer = io.BytesIO()
    torch.save({"logits": lazy}, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer)["logits"], real)


FLAT = LABELS.view(-1)
CROSS_ENTROPIES: dict[str, tuple[bool, Use]] = {
    # name: (whether no logits are needed for it, the loss)
    "mean": (True, lambda z: F.cross_entropy(z.view(-1, V), FLAT)),
    "sum": (True, lambda z: F.cross_entropy(z.view(-1, V), FLAT, reduction="sum")),
    "none": (True, lambda z: F.cross_entropy(z.view(-1, V), FLAT, reduction="none").sum()),
    "weighted none": (
        True,
        lambda z: (F.cross_entropy(z.view(-1, V), FLAT, reduction="none") * torch.linspace(-1, 2, ROWS)).sum(),
    ),
    "smoothed": (True, lambda z: F.cross_entropy(z.view(-1, V), FLAT, label_smoothing=0.2)),
    "smoothed sum": (True, lambda z: F.cross_entropy(z.view(-1, V), FLAT, reduction="sum", label_smoothing=0.2)),
    "another ignore_index": (
        True,
        lambda z: F.cross_entropy(z.view(-1, V), FLAT.clamp(min=0), ignore_index=0, reduction="sum"),
    ),
    "shifted": (True, lambda z: F.cross_entropy(z[:, :-1].float().reshape(-1, V), LABELS[:, 1:].reshape(-1))),
    "module": (True, lambda z: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(z.flatten(0, 1), FLAT)),
    "by name": (True, lambda z: F.cross_entropy(target=FLAT, input=z.view(-1, V))),
    "scaled up": (True, lambda z: F.cross_entropy((z * 3).view(-1, V), FLAT)),
    "scaled down": (True, lambda z: F.cross_entropy((z / 0.25).view(-1, V), FLAT)),
    "scaled negative": (True, lambda z: F.cross_entropy((z * -2).view(-1, V), FLAT)),
    "capped": (True, lambda z: F.cross_entropy((0.5 * torch.tanh(z / 0.5)).view(-1, V), FLAT)),
    "scaled and capped": (True, lambda z: F.cross_entropy((torch.tanh(z * 4 / 0.7) * 0.7).view(-1, V), FLAT)),
    "capped twice": (False, lambda z: F.cross_entropy(torch.tanh(torch.tanh(z)).view(-1, V), FLAT)),
    "capped by a negative": (False, lambda z: F.cross_entropy((torch.tanh(z) * -1.0).view(-1, V), FLAT)),
    "one row": (True, lambda z: F.cross_entropy(z[0], LABELS[0])),
    "weights of classes": (False, lambda z: F.cross_entropy(z.view(-1, V), FLAT, weight=torch.linspace(0.1, 2, V))),
    "probabilities": (False, lambda z: F.cross_entropy(z.view(-1, V), torch.full((ROWS, V), 1 / V))),
    "classes in the middle": (False, lambda z: F.cross_entropy(z.transpose(1, 2), LABELS)),
    "rows as classes": (False, lambda z: F.cross_entropy(z, torch.zeros(2, V, dtype=torch.long))),
    "a single token": (False, lambda z: F.cross_entropy(z[0, 5], LABELS[0, 5])),
    "size_average": (False, lambda z: F.cross_entropy(z.view(-1, V), FLAT, size_average=False)),
    "nll_loss": (False, lambda z: F.nll_loss(F.log_softmax(z.view(-1, V), -1), FLAT)),
    "written out": (
        False,
        lambda z: -z.float().log_softmax(-1).gather(-1, LABELS.clamp(min=0)[..., None])[LABELS != -100].mean(),
    ),
    "distillation": (
        False,
        lambda z: F.kl_div(
            F.log_softmax(z / 2, -1), torch.arange(V).div(V).softmax(-1).expand_as(z), reduction="batchmean"
        ),
    ),
    "auxiliary": (
        False,
        lambda z: F.cross_entropy(z.view(-1, V), FLAT) + 1e-2 * z.float().logsumexp(-1).pow(2).mean(),
    ),
}


@pytest.mark.parametrize(("fused", "loss"), CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
def test_losses_in_a_users_loop(fused: bool, loss: Use) -> None:
    models = pair("Qwen2")
    values = []
    with counting_computed() as computed:
        for model in models.both:
            value = loss(model(**BATCH).logits)
            value.backward()
            values.append(value)
    assert (not computed) == fused
    assert values[1].dtype == values[0].dtype
    assert distance(values[1], values[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def test_reading_before_and_after_the_backward() -> None:
    models = pair()
    real = logits_of(models.plain)
    for when in ("before", "after"):
        output = models.fast(**BATCH)
        if when == "after":
            output.loss.backward()
        assert distance(output.logits + 0, real) <= FP32_TOLERANCE
        if when == "before":
            output.loss.backward()


@pytest.mark.parametrize("in_place", ["step", "load_state_dict", "replaced"])
def test_reading_after_the_head_has_changed_is_an_error(in_place: str) -> None:
    model = pair().fast
    output = model(**BATCH)
    output.loss.backward()
    if in_place == "step":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    elif in_place == "load_state_dict":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    else:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(UnsupportedError, match="before the optimizer step"):
        output.logits.argmax(-1)


def test_what_was_read_before_the_step_stays() -> None:
    model = pair().fast
    output = model(**BATCH)
    output.loss.backward()
    value = output.logits.detach().clone().sum().item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert output.logits.detach().sum().item() == value


def test_hidden_states_changed_in_place_are_an_error() -> None:
    model = pair().fast
    with torch.no_grad():
        output = model(**BATCH, output_hidden_states=True)
        output.hidden_states[-1].zero_()
        with pytest.raises(UnsupportedError):
            output.logits.sum()
