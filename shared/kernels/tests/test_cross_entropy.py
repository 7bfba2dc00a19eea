"""`cross_entropy` against the fp64 twin: every option, values and gradients, and what must not happen."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foak.kernels.cross_entropy import TokenStats, cross_entropy
from foak.kernels.cross_entropy.options import LossOptions
from foak.kernels.cross_entropy.reference import cross_entropy_reference
from foak.kernels.testing import assert_close_to_fp64, check_against_fp64

SINGLE_OPTIONS = (
    {"label_smoothing": 0.1},
    {"logit_scale": 0.25},
    {"softcap": 5.0},
    {"z_loss": 1e-2},
    {"ignore_index": 3},
)
OPTIONS = ({}, *SINGLE_OPTIONS, *({**a, **b} for a, b in itertools.combinations(SINGLE_OPTIONS, 2)))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(
    shape: tuple[int, ...], vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, vocab_size, generator=generator) * 3).to(dtype).to(device)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    labels.view(-1)[1::4] = -100
    return logits.requires_grad_(), labels.to(device)


def twin(labels: Tensor, num_items=None, wanted=(), **options):
    def function(logits: Tensor) -> Tensor | tuple[Tensor, ...]:
        loss, stats = cross_entropy_reference(logits, labels, LossOptions(**options), num_items, wanted)
        return (loss, *(value for value in stats if value is not None)) if wanted else loss

    return function


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_alone_and_in_pairs(backend, device, options, reduction):
    logits, labels = make((7,), 101, device)
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
        labels[2] = options["ignore_index"]
    check_against_fp64(
        lambda x: cross_entropy(x, labels, reduction=reduction, **options),
        twin(labels, reduction=reduction, **options),
        [logits],
        reduction_length=101,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (33,), (2, 5), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 517, 8200])
def test_dtypes_and_shapes(backend, device, dtype, shape, vocab_size):
    logits, labels = make(shape, vocab_size, device, dtype)
    for reduction in ("mean", "none"):
        result = check_against_fp64(
            lambda x, reduction=reduction: cross_entropy(x, labels, reduction=reduction),
            twin(labels, reduction=reduction),
            [logits],
            reduction_length=vocab_size,
        )
        assert result.outputs[0].dtype is torch.float32
        assert result.outputs[0].shape == (shape if reduction == "none" else ())


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0}], ids=str)
def test_statistics_and_their_gradients(backend, device, options):
    """Gradients flow through the loss, the log-probabilities and the entropy at once."""
    logits, labels = make((3, 11), 101, device)
    differentiable = ("log_probs", "entropy")

    def function(x: Tensor) -> tuple[Tensor, ...]:
        loss, stats = cross_entropy(x, labels, return_stats=differentiable, **options)
        return loss, stats.log_probs, stats.entropy

    check_against_fp64(
        function, twin(labels, wanted=differentiable, **options), [logits], reduction_length=101, roundings=2
    )

    _, stats = cross_entropy(logits, labels, return_stats=True, **options)
    _, expected = cross_entropy_reference(logits.double(), labels, LossOptions(**options), None, TokenStats._fields)
    assert torch.equal(stats.is_top1, expected.is_top1)
    assert stats.is_top1.dtype is torch.bool
    for name in ("log_sum_sq_probs", "mean_logits"):
        value = getattr(stats, name)
        assert not value.requires_grad
        assert_close_to_fp64(value, getattr(expected, name).detach(), reduction_length=101, name=name)
    ignored = labels == -100
    assert ignored.any()
    assert all(not value[ignored].any() for value in stats)


def test_top1_is_the_first_of_equal_logits(backend, device):
    logits = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [1.0, 2.0, 2.0]], device=device)
    _, stats = cross_entropy(logits, torch.tensor([0, 1, 2], device=device), return_stats=("is_top1",))
    assert stats.is_top1.tolist() == [False, True, False]
    assert stats.entropy is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_near_zero(backend, device, dtype):
    """Every element of loss and gradient keeps its relative accuracy where the label's probability is near one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 101, generator=generator).to(dtype).to(device)
    labels = torch.arange(6, device=device) * 7
    logits[torch.arange(6), labels] = torch.tensor([4.0, 8.0, 12.0, 20.0, 24.0, 30.0], dtype=dtype, device=device)
    scale = 2.0**12 if dtype is torch.float16 else 1.0  # what a loss scaler does: tiny gradients leave fp16's range
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss = cross_entropy(leaf, labels, reduction="none")
    expected = twin(labels, reduction="none")(wide)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=0.0)
    (gradient,) = torch.autograd.grad(loss.sum() * scale, leaf)
    (expected_gradient,) = torch.autograd.grad(expected.sum() * scale, wide)
    smallest = torch.finfo(dtype).smallest_normal
    shown = expected_gradient.abs() > smallest
    error = (gradient.double() - expected_gradient).abs() / expected_gradient.abs()
    assert shown.sum() > 300
    assert error[shown].max() <= torch.finfo(dtype).eps / 2 + 2e-5


@pytest.mark.parametrize("poisoned_memory", [False, True])
def test_memory_layouts(backend, device, poisoned_memory, request):
    """Strided rows, strided columns and an expanded upstream gradient give what contiguous memory gives."""
    logits, labels = make((2, 6), 101, device)
    if poisoned_memory:
        request.getfixturevalue("poisoned")
    values = logits.detach()
    padded = torch.zeros(2, 6, 128, device=device)
    padded[..., :101] = values
    layouts = [values, padded[..., :101], values.transpose(0, 2).contiguous().transpose(0, 2), padded[:, ::2, :101]]
    for layout in layouts:
        these = labels if layout.shape[1] == 6 else labels[:, ::2]
        leaf, plain = layout.detach().requires_grad_(), layout.contiguous().requires_grad_()
        upstream = torch.tensor(0.5, device=device).expand(these.shape)
        loss = cross_entropy(leaf, these, reduction="none")
        expected = cross_entropy(plain, these, reduction="none")
        # Not bit for bit: a compiled kernel loads an aligned row in wider pieces, and sums in another order.
        assert_close_to_fp64(loss, expected.double(), reduction_length=101, roundings=2)
        (gradient,) = torch.autograd.grad(loss, leaf, upstream)
        (expected_gradient,) = torch.autograd.grad(expected, plain, upstream.contiguous())
        assert_close_to_fp64(gradient, expected_gradient.double(), reduction_length=101, roundings=2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored(backend, device, reduction):
    logits, labels = make((4,), 101, device)
    loss, stats = cross_entropy(logits, torch.full_like(labels, -100), reduction=reduction, return_stats=True)
    assert not loss.any()
    assert all(not value.any() for value in stats)
    (gradient,) = torch.autograd.grad(loss.sum() + stats.entropy.sum(), logits)
    assert gradient.shape == logits.shape
    assert not gradient.any()


def test_no_tokens(backend, device):
    logits = torch.zeros(0, 5, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64, device=device))
    loss.backward()
    assert loss == 0
    assert logits.grad.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("label", [-1, 101, -101, 2**31 - 1])
def test_label_out_of_range(backend, device, label, dtype):
    logits, labels = make((4,), 101, torch.device("cpu"))
    assert cross_entropy(logits, labels.to(dtype)) == cross_entropy(logits, labels)
    labels[2] = label
    with pytest.raises(ValueError, match=rf"label {label} is neither in the vocabulary \[0, 101\)"):
        cross_entropy(logits, labels.to(dtype))


@pytest.mark.gpu
def test_label_out_of_range_on_the_gpu():
    """In a process of its own: a device-side assertion ends the use of the device."""
    code = (
        "import torch\nfrom foak.kernels.cross_entropy import cross_entropy\n"
        "cross_entropy(torch.zeros(4, 101, device='cuda'), torch.tensor([1, 2, 101, 3], device='cuda'))\n"
        "torch.cuda.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode != 0
    assert "assert" in run.stderr


@pytest.mark.gpu
def test_no_host_synchronisation(device):
    logits, labels = make((64,), 517, device)
    cross_entropy(logits, labels, num_items_in_batch=torch.tensor(7, device=device)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cross_entropy(logits, labels).backward()
        cross_entropy(logits, labels, num_items_in_batch=torch.tensor(7)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_items_in_batch(backend, device, reduction, as_tensor):
    logits, labels = make((7,), 101, device)
    for count in (13, 0):
        items = torch.tensor(count, device=device) if as_tensor else count
        check_against_fp64(
            lambda x, items=items: cross_entropy(x, labels, reduction=reduction, num_items_in_batch=items),
            lambda x, count=count: twin(labels, reduction="sum")(x) / max(count, 1),
            [logits],
            reduction_length=101,
        )


def test_accumulated_micro_batches_equal_one_batch(backend, device):
    logits, labels = make((16,), 101, device)
    items = int((labels != -100).sum())
    (whole,) = torch.autograd.grad(cross_entropy(logits, labels, num_items_in_batch=items), logits)
    pieces = [cross_entropy(logits[i : i + 1], labels[i : i + 1], num_items_in_batch=items) for i in range(16)]
    (summed,) = torch.autograd.grad(sum(pieces), logits)
    torch.testing.assert_close(summed, whole, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(sum(pieces), cross_entropy(logits, labels), rtol=1e-6, atol=0.0)


def test_second_backward_and_unchanged_logits(backend, device):
    logits, labels = make((7,), 101, device, torch.bfloat16)
    before = logits.detach().clone()
    loss = cross_entropy(logits, labels)
    first = torch.autograd.grad(loss, logits, retain_graph=True)
    second = torch.autograd.grad(loss, logits)
    assert torch.equal(first[0], second[0])
    assert torch.equal(logits, before)


def test_minus_infinity_logits(backend, device):
    """Vocabulary entries that are switched off by a logit of minus infinity have no probability and no gradient."""
    logits, labels = make((7,), 101, device)
    labels = labels.clamp(min=0, max=49)
    masked = logits.detach().clone()
    masked[:, 50:] = float("-inf")
    leaf, cut = masked.requires_grad_(), logits.detach()[:, :50].clone().requires_grad_()
    loss, stats = cross_entropy(leaf, labels, return_stats=("log_probs", "entropy"))
    expected, expected_stats = cross_entropy(cut, labels, return_stats=("log_probs", "entropy"))
    torch.testing.assert_close((loss, *stats[:2]), (expected, *expected_stats[:2]))
    (gradient,) = torch.autograd.grad(loss + stats.entropy.sum(), leaf)
    (expected_gradient,) = torch.autograd.grad(expected + expected_stats.entropy.sum(), cut)
    torch.testing.assert_close(gradient[:, :50], expected_gradient)
    assert not gradient[:, 50:].any()


def test_nan_logits_give_a_nan_loss(backend, device):
    logits, labels = make((4,), 101, device)
    with torch.no_grad():
        logits[0, 40] = float("nan")
        logits[2, labels[2]] = float("nan")
    loss = cross_entropy(logits, labels, reduction="none")
    assert torch.isnan(loss).tolist() == [True, False, True, False]


def test_same_meaning_as_torch(backend, device):
    logits, labels = make((9,), 101, device)
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}, {"reduction": "none"}):
        torch.testing.assert_close(cross_entropy(logits, labels, **options), F.cross_entropy(logits, labels, **options))


def test_float64_passes_gradcheck(device):
    logits, labels = make((3,), 7, device, torch.float64)
    options = {"label_smoothing": 0.1, "logit_scale": 0.5, "softcap": 4.0, "z_loss": 0.1}

    def function(x: Tensor) -> tuple[Tensor, ...]:
        loss, stats = cross_entropy(x, labels, reduction="none", return_stats=("log_probs", "entropy"), **options)
        return loss, stats.log_probs, stats.entropy

    assert torch.autograd.gradcheck(function, [logits])


def test_compiles_into_one_graph(backend, device):
    logits, labels = make((7,), 101, device)
    compiled = torch.compile(lambda x, y: cross_entropy(x * 2.0, y, softcap=5.0), backend="aot_eager", fullgraph=True)
    check_against_fp64(
        lambda x: compiled(x, labels), lambda x: twin(labels, softcap=5.0)(x * 2.0), [logits], reduction_length=101
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(backend, device, use_reentrant):
    logits, labels = make((7,), 101, device)
    checkpoint(lambda x: cross_entropy(x, labels), logits, use_reentrant=use_reentrant).backward()
    (expected,) = torch.autograd.grad(cross_entropy(logits, labels), logits)
    assert torch.equal(logits.grad, expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reduction": "average"}, "reduction is 'average'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"return_stats": ("perplexity",)}, "'perplexity'"),
        ({"reduction": "none", "num_items_in_batch": 3}, "num_items_in_batch divides"),
        ({"num_items_in_batch": torch.ones(2)}, "has 2 elements"),
    ],
    ids=str,
)
def test_options_out_of_range(options, named):
    logits, labels = make((4,), 11, torch.device("cpu"))
    with pytest.raises(ValueError, match=named):
        cross_entropy(logits, labels, **options)


def test_inputs_that_do_not_fit():
    logits, labels = make((4,), 11, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"logits have shape \(4, 11\), labels \(3,\)"):
        cross_entropy(logits, labels[:3])
    with pytest.raises(TypeError, match=r"labels are torch\.float32"):
        cross_entropy(logits, labels.float())
    with pytest.raises(TypeError, match=r"logits are torch.int64"):
        cross_entropy(torch.zeros(4, 11, dtype=torch.int64), labels)
