"""`linear_cross_entropy` against the fp64 twin: every option, which gradients, chunks, memory and products."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foak.kernels.cross_entropy import TokenStats, cross_entropy
from foak.kernels.cross_entropy.options import LossOptions
from foak.kernels.linear_cross_entropy import chunks, linear_cross_entropy
from foak.kernels.linear_cross_entropy.head_gradient import HeadGradient
from foak.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from foak.kernels.testing import assert_close_to_fp64, check_against_fp64

SINGLE_OPTIONS = (
    {"label_smoothing": 0.1},
    {"logit_scale": 0.25},
    {"softcap": 5.0},
    {"z_loss": 1e-2},
    {"ignore_index": 3},
)
OPTIONS = ({}, *SINGLE_OPTIONS, *({**a, **b} for a, b in itertools.combinations(SINGLE_OPTIONS, 2)))
ALL_OPTIONS = {"label_smoothing": 0.1, "logit_scale": 0.25, "softcap": 5.0, "z_loss": 1e-2}
TRAINED = {"frozen": (True, False, False), "head": (False, True, True), "bias": (True, False, True), "all": (True,) * 3}

# Chains of roundings to a 16-bit dtype on the way to a gradient: the logits, their gradient, the product, its scaling.
ROUNDINGS = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that every test crosses their boundaries."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 4)


def make(
    count: int,
    vocab_size: int,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    trained: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[list[Tensor], Tensor]:
    """(hidden, weight, bias) and labels, every fourth of them ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((count, hidden_size), (vocab_size, hidden_size), (vocab_size,))
    scales = (1.0, 2.0 / hidden_size**0.5, 1.0)
    leaves = [
        (torch.randn(shape, generator=generator) * scale).to(dtype).to(device).requires_grad_(needed)
        for shape, scale, needed in zip(shapes, scales, trained, strict=True)
    ]
    labels = torch.randint(0, vocab_size, (count,), generator=generator)
    labels[1::4] = -100
    return leaves, labels.to(device)


def ours(labels: Tensor, wanted: tuple[str, ...] = (), **options):
    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        if not wanted:
            return linear_cross_entropy(hidden, weight, labels, bias, **options)
        loss, stats = linear_cross_entropy(hidden, weight, labels, bias, return_stats=wanted, **options)
        return (loss, *(value for value in stats if value is not None))

    return function


def twin(labels: Tensor, wanted: tuple[str, ...] = (), num_items_in_batch: int | None = None, **options):
    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        loss, stats = linear_cross_entropy_reference(
            hidden, weight, labels, bias, LossOptions(**options), num_items_in_batch, wanted
        )
        return (loss, *(value for value in stats if value is not None)) if wanted else loss

    return function


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_alone_and_in_pairs(backend, device, options, reduction):
    leaves, labels = make(7, 101, 24, device)
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
        labels[2] = options["ignore_index"]
    check_against_fp64(
        ours(labels, reduction=reduction, **options),
        twin(labels, reduction=reduction, **options),
        leaves,
        reduction_length=101,
    )


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("wanted", [("log_probs",), ("entropy",), ("log_probs", "entropy")], ids=str)
def test_gradients_through_statistics(backend, device, trained, reduction, options, wanted):
    """The upstream gradients of loss, log-probabilities and entropy arrive together, in every combination."""
    leaves, labels = make(7, 101, 24, device, trained=trained)
    check_against_fp64(
        ours(labels, wanted, reduction=reduction, **options),
        twin(labels, wanted, reduction=reduction, **options),
        leaves,
        reduction_length=101,
    )
    # and each of them alone, as when a trainer builds its loss from one and only logs the others
    for index in range(1 + len(wanted)):
        check_against_fp64(
            lambda *x, index=index: ours(labels, wanted, reduction=reduction, **options)(*x)[index],
            lambda *x, index=index: twin(labels, wanted, reduction=reduction, **options)(*x)[index],
            leaves,
            reduction_length=101,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 33])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(101, 24), (517, 70)])
def test_dtypes_and_shapes(backend, device, dtype, count, vocab_size, hidden_size):
    leaves, labels = make(count, vocab_size, hidden_size, device, dtype)
    result = check_against_fp64(
        ours(labels),
        twin(labels),
        leaves,
        reduction_length=vocab_size,
        roundings=ROUNDINGS,
        rounded_to=dtype,
    )
    assert result.outputs[0].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_less_accurate_than_the_plain_product(backend, device, dtype, reduction):
    """In 16 bits the distance to fp64 is at most a small factor of `F.linear` and `F.cross_entropy`'s."""
    leaves, labels = make(33, 517, 70, device, dtype)
    upstream = 1.0 if reduction == "mean" else 1.0 / 33

    def gradients(function, inputs: list[Tensor]) -> list[Tensor]:
        inputs = [leaf.detach().requires_grad_() for leaf in inputs]
        loss = function(*inputs)
        return [loss.detach(), *torch.autograd.grad(loss.sum() * upstream, inputs)]

    got = gradients(ours(labels, reduction=reduction), leaves)
    plain = gradients(lambda h, w, b: F.cross_entropy(F.linear(h, w, b).float(), labels, reduction=reduction), leaves)
    exact = gradients(twin(labels, reduction=reduction), [leaf.double() for leaf in leaves])
    for mine, theirs, truth in zip(got, plain, exact, strict=True):
        error, plain_error = (mine.double() - truth).norm(), (theirs.double() - truth).norm()
        assert error <= 1.5 * plain_error + 1e-7 * truth.norm()


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
def test_statistics(backend, device, options):
    leaves, labels = make(33, 101, 24, device)
    _, stats = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], return_stats=True, **options)
    wide = [leaf.detach().double() for leaf in leaves]
    z = F.linear(wide[0], wide[1], wide[2]) * options.get("logit_scale", 1.0)
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    kept = labels != -100
    log_p = z.log_softmax(1)
    expected = TokenStats(
        log_p.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1),
        -(log_p.exp() * log_p).sum(1),
        z.argmax(1) == labels,
        log_p.exp().square().sum(1).log(),
        z.mean(1),
    )
    for name, value, truth in zip(TokenStats._fields, stats, expected, strict=True):
        assert value.requires_grad == (name in ("log_probs", "entropy"))
        truth = truth * kept
        if name == "is_top1":
            assert torch.equal(value, truth)
        else:
            assert_close_to_fp64(value, truth, reduction_length=101, name=name)
    _, fewer = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], return_stats=("is_top1",), **options)
    assert fewer._replace(is_top1=None) == TokenStats()
    assert torch.equal(fewer.is_top1, stats.is_top1)


def test_memory_layouts(backend, device):
    """Strided, transposed and expanded inputs give what contiguous ones give; gradients keep the inputs' shape."""
    (hidden, weight, bias), labels = make(7, 101, 24, device)
    wide_hidden, wide_weight = torch.zeros(7, 48, device=device), torch.zeros(202, 48, device=device)
    wide_hidden[:, ::2], wide_weight[::2, ::2] = hidden.detach(), weight.detach()
    layouts = [
        [hidden.detach().t().contiguous().t(), weight.detach().t().contiguous().t(), bias.detach()],
        [wide_hidden[:, ::2], wide_weight[::2, ::2], bias.detach()[:1].expand(101)],
        [hidden.detach()[:1].expand(7, 24), weight.detach()[:, :1].expand(101, 24), bias.detach()],
    ]
    for layout in layouts:
        check_against_fp64(ours(labels), twin(labels), [leaf.requires_grad_() for leaf in layout], reduction_length=101)
    strided_labels = torch.stack([labels, labels], 1)[:, 0]
    assert torch.equal(
        linear_cross_entropy(hidden, weight, strided_labels, bias), linear_cross_entropy(hidden, weight, labels, bias)
    )
    loss = linear_cross_entropy(hidden, weight, labels, bias, reduction="none")
    upstream = torch.tensor(0.5, device=device)
    expanded = torch.autograd.grad(loss, hidden, upstream.expand(7), retain_graph=True)
    assert torch.equal(expanded[0], torch.autograd.grad(loss, hidden, torch.full((7,), 0.5, device=device))[0])


def test_written_memory_only(backend, device, poisoned):
    leaves, labels = make(7, 101, 24, device)
    for reduction in ("mean", "none"):
        loss, stats = linear_cross_entropy(
            leaves[0], leaves[1], labels, leaves[2], reduction=reduction, return_stats=True
        )
        found = torch.autograd.grad(loss.sum() + stats.entropy.sum(), leaves, retain_graph=True)
        found += torch.autograd.grad(loss.sum(), leaves)
        assert all(torch.isfinite(value).all() for value in (loss, *stats, *found))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("count", [5, 0])
def test_no_label_left(backend, device, reduction, count):
    leaves, labels = make(count, 101, 24, device)
    loss, stats = linear_cross_entropy(
        leaves[0], leaves[1], torch.full_like(labels, -100), leaves[2], reduction=reduction, return_stats=True
    )
    assert not loss.any()
    assert all(value.shape == (count,) and not value.any() for value in stats)
    for total in (loss.sum(), loss.sum() + stats.log_probs.sum() + stats.entropy.sum()):
        gradients = torch.autograd.grad(total, leaves, retain_graph=True)
        assert all(g.shape == leaf.shape and not g.any() for g, leaf in zip(gradients, leaves, strict=True))


@pytest.mark.parametrize("label", [-1, 101])
def test_label_out_of_range(backend, label):
    leaves, labels = make(7, 101, 24, torch.device("cpu"))
    labels[3] = label
    with pytest.raises(ValueError, match=rf"label {label} is neither in the vocabulary \[0, 101\)"):
        linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_items_in_batch(backend, device, as_tensor):
    leaves, labels = make(7, 101, 24, device)
    items = torch.tensor(13, device=device) if as_tensor else 13
    check_against_fp64(
        ours(labels, num_items_in_batch=items), twin(labels, num_items_in_batch=13), leaves, reduction_length=101
    )


def test_accumulated_micro_batches_equal_one_batch(backend, device):
    leaves, labels = make(16, 101, 24, device)
    hidden, weight, bias = leaves
    items = int((labels != -100).sum())
    whole = linear_cross_entropy(hidden, weight, labels, bias, num_items_in_batch=items)
    pieces = sum(
        linear_cross_entropy(hidden[i : i + 1], weight, labels[i : i + 1], bias, num_items_in_batch=items)
        for i in range(16)
    )
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=0.0)
    expected = torch.autograd.grad(whole, leaves)
    torch.testing.assert_close(torch.autograd.grad(pieces, leaves), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_second_backward(backend, device, reduction, trained):
    leaves, labels = make(7, 101, 24, device, torch.bfloat16, trained)
    before = [leaf.detach().clone() for leaf in leaves]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    loss = ours(labels, reduction=reduction)(*leaves).sum()
    first = torch.autograd.grad(loss * 2.0, wanted, retain_graph=True)
    second = torch.autograd.grad(loss * 2.0, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))


def test_tied_weight(backend, device):
    """The embedding is the head: both uses add to one gradient."""
    (_, weight, bias), labels = make(7, 101, 24, device)
    tokens = torch.arange(7, device=device)

    def tied(function):
        return lambda w, b: function(F.embedding(tokens, w) * 3.0, w, b)

    check_against_fp64(tied(ours(labels)), tied(twin(labels)), [weight, bias], reduction_length=101)


def test_loss_near_zero(backend, device):
    """Hidden states that predict their label with a probability of 1 - 1e-9: the gradient is small, not zero."""
    weight = torch.eye(40, device=device, requires_grad=True)
    hidden = (25.0 * torch.eye(40, device=device)[:5]).requires_grad_()
    labels = torch.arange(5, device=device)
    wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    loss = linear_cross_entropy(hidden, weight, labels)
    expected = twin(labels)(wide[0], wide[1], None)
    assert 0 < expected < 1e-8
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0.0)
    got, truth = torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, wide)
    torch.testing.assert_close([g.double() for g in got], list(truth), rtol=1e-4, atol=0.0)


def test_mixed_dtypes_without_autocast(backend, device):
    (hidden, weight, bias), labels = make(7, 101, 24, device, torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    check_against_fp64(ours(labels), twin(labels), [hidden, weight, bias], reduction_length=101)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(backend, device, reduction):
    """As `F.linear` under autocast: a bf16 product, an fp32 loss, and gradients in the leaves' dtype."""
    leaves, labels = make(33, 517, 70, device)

    def autocast(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, labels, bias, reduction=reduction)
        assert loss.dtype is torch.float32
        return loss

    check_against_fp64(
        autocast,
        twin(labels, reduction=reduction),
        leaves,
        reduction_length=517,
        roundings=ROUNDINGS + 1,  # the inputs are rounded too
        rounded_to=torch.bfloat16,
    )
    wide = [leaf.detach().double() for leaf in leaves]
    with torch.autocast(device.type, torch.bfloat16):
        assert linear_cross_entropy(wide[0], wide[1], labels).dtype is torch.float64


@pytest.mark.parametrize("trained", [TRAINED["frozen"], TRAINED["all"]], ids=["frozen", "all"])
def test_float64_passes_gradcheck(device, trained):
    leaves, labels = make(6, 7, 5, device, torch.float64, trained)
    assert torch.autograd.gradcheck(
        ours(labels, ("log_probs", "entropy"), reduction="none", **ALL_OPTIONS), leaves, atol=1e-6
    )
    assert torch.autograd.gradcheck(ours(labels, **ALL_OPTIONS), leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_activation_checkpointing(backend, device, use_reentrant, reduction):
    leaves, labels = make(7, 101, 24, device)
    function = ours(labels, reduction=reduction)
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    checkpoint(function, *leaves, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(leaf.grad, truth) for leaf, truth in zip(leaves, expected, strict=True))


def test_compiled_model_breaks_its_graph_here(backend, device):
    leaves, labels = make(7, 101, 24, device)

    def model(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 2.0, weight, labels, bias) * 3.0

    compiled = torch.compile(model, backend="aot_eager")
    check_against_fp64(
        compiled,
        lambda hidden, weight, bias: twin(labels)(hidden * 2.0, weight, bias) * 3.0,
        leaves,
        reduction_length=101,
    )


class Watch(TorchDispatchMode):
    """Counts matrix products, and notes the most numbers that any operation gives (the interpreter copies bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        tensors = [value for value in outputs if isinstance(value, Tensor) and value.is_floating_point()]
        self.largest = max([self.largest, *(value.numel() for value in tensors)])
        return result


@pytest.mark.parametrize(
    ("trained", "reduction", "through", "products"),
    [
        ((True, False, False), "mean", "loss", 2),
        ((True, False, False), "none", "loss", 2),
        ((True, False, False), "none", "log_probs", 2),
        ((True, False, False), "mean", "log_probs", 2),
        ((True, False, False), "none", "entropy", 4),
        ((True, True, False), "mean", "loss", 3),
        ((False, True, False), "mean", "loss", 2),
        ((True, True, False), "none", "log_probs", 4),
        ((False, False, False), "mean", "loss", 1),
    ],
)
def test_products_and_the_largest_tensor(backend, device, monkeypatch, trained, reduction, through, products):
    """No tensor of N x V elements is ever made, and no product that nobody needs."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 8)
    (hidden, weight, _), labels = make(64, 101, 24, device, trained=trained)
    wanted = (through,) if through != "loss" else False
    with Watch() as watch:
        result = linear_cross_entropy(hidden, weight, labels, reduction=reduction, return_stats=wanted)
        output = getattr(result[1], through) if wanted else result
        if output.requires_grad:
            output.sum().backward()
    kept = int((labels != -100).sum())
    assert kept == 48
    assert watch.products == products * kept // 8
    assert watch.largest <= max(8 * 101, 101 * 24, 64 * 24)


def test_no_gradient_work_without_gradients(backend, device):
    leaves, labels = make(8, 101, 24, device)
    with torch.no_grad(), Watch() as watch:
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2])
    assert watch.products == 2  # the chunks' logits
    assert not loss.requires_grad


def test_what_is_saved_is_no_larger_than_the_inputs(backend, device):
    """For a summed loss only gradients are kept for the backward; the hidden states are not."""
    (hidden, weight, bias), labels = make(64, 101, 24, device, trained=(True, False, False))
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(hidden, weight, labels, bias)
    assert all(tensor.data_ptr() not in (hidden.data_ptr(), weight.data_ptr()) for tensor in saved)
    assert sum(tensor.numel() for tensor in saved if tensor.is_floating_point()) <= hidden.numel() + 1


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
def test_waits_for_the_device_once(device, trained):
    leaves, labels = make(64, 517, 64, device, torch.bfloat16, (True, trained, False))
    ours(labels)(*leaves).backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ours(labels)(*leaves).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(warning.message) for warning in found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
def test_extra_memory(device, monkeypatch, trained):
    """8192 tokens, hidden size 4096, vocabulary 128256, bf16: 0.2 GiB for a frozen head, 2.3 GiB for a trained one."""
    monkeypatch.undo()
    hidden = torch.randn(8192, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 4096, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_(trained)
    labels = torch.randint(0, 128256, (8192,), device=device)
    linear_cross_entropy(hidden, weight, labels).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert torch.cuda.max_memory_allocated() - before <= (2.3 if trained else 0.2) * 2**30


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 127, 128, 129, 130, 517, 1000])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_gradient_is_summed_in_fp32(device, vocab_size, weight_dtype):
    """Many chunks, each of which a 16-bit sum would round away."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(40, 5, vocab_size, generator=generator).to(device)
    hidden = torch.randn(40, 5, 24, generator=generator).to(device)
    total = HeadGradient(vocab_size, 24, torch.float32, torch.empty(vocab_size, 24, dtype=weight_dtype, device=device))
    for gradient, rows in zip(gradients, hidden, strict=True):
        total.add(gradient, rows)
    result = total.finish()
    assert result.shape == (vocab_size, 24)
    assert result.is_contiguous()
    assert result.dtype is (torch.bfloat16 if weight_dtype is torch.bfloat16 else torch.float32)
    expected = torch.einsum("cnv,cnh->vh", gradients.double(), hidden.double())
    assert_close_to_fp64(result, expected, reduction_length=200)
    if weight_dtype is torch.bfloat16:
        assert result.untyped_storage().nbytes() <= (vocab_size + 1) * 24 * 2


def test_chunks_of_sixteen_bits_are_summed_in_fp32(device):
    """600 chunks of one sign: a sum that is rounded after each of them stops growing after half of them."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.rand(600, 2, 53, generator=generator).bfloat16().to(device)
    hidden = torch.rand(600, 2, 24, generator=generator).bfloat16().to(device)
    total = HeadGradient(53, 24, torch.bfloat16, torch.empty(53, 24, dtype=torch.bfloat16, device=device))
    for gradient, rows in zip(gradients, hidden, strict=True):
        total.add(gradient, rows)
    expected = torch.einsum("cnv,cnh->vh", gradients.double(), hidden.double())
    # Rounded are a chunk's product, on a CPU, and the result.
    assert_close_to_fp64(total.finish(), expected, reduction_length=1200, roundings=2)


def test_chunk_sizes(monkeypatch):
    monkeypatch.undo()
    rows = chunks.chunk_rows
    assert rows(8192, 128256, 2, "cuda", False) == 512
    assert rows(8192, 128256, 2, "cuda", True) == 1024
    assert rows(1024, 49152, 4, "cpu", False) == 512
    for count, vocab_size, itemsize, device, trained in itertools.product(
        (0, 1, 100, 1000, 8192, 100_000), (11, 32000, 50257, 262144), (2, 4), ("cpu", "cuda"), (False, True)
    ):
        size = rows(count, vocab_size, itemsize, device, trained)
        assert size % 128 == 0
        covered = list(chunks.spans(count, size))
        assert sum(span.stop - span.start for span in covered) == count
        assert len(covered) <= 1 or size - (covered[-1].stop - covered[-1].start) < 128 * len(covered)


def test_equals_the_loss_of_real_logits(backend, device):
    (hidden, weight, bias), labels = make(33, 517, 70, device)
    logits = F.linear(hidden, weight, bias)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, bias), cross_entropy(logits, labels))


def test_inputs_that_do_not_fit():
    (hidden, weight, bias), labels = make(4, 11, 6, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"hidden has shape \(4, 6\), weight \(11, 5\)"):
        linear_cross_entropy(hidden, weight[:, :5], labels)
    with pytest.raises(ValueError, match=r"labels \(3,\)"):
        linear_cross_entropy(hidden, weight, labels[:3])
    with pytest.raises(ValueError, match=r"bias \(10,\)"):
        linear_cross_entropy(hidden, weight, labels, bias[:10])
    with pytest.raises(TypeError, match=r"hidden is torch\.int64"):
        linear_cross_entropy(torch.zeros(4, 6, dtype=torch.int64), weight, labels)
    with pytest.raises(TypeError, match=r"labels are torch\.float32"):
        linear_cross_entropy(hidden, weight, labels.float())
