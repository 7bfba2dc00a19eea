"""What holds for every op alike: how it lives with autograd, checkpointing, compilation, streams and devices."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foak.kernels import geglu, layer_norm, lora_linear, rms_norm, rope, swiglu
from foak.kernels.testing import assert_close_to_fp64, evaluate, random_upstream


@dataclass(frozen=True)
class Op:
    """An op as the tests call it: `function(*leaves)`, with the shapes of its leaves for a number of rows."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    trains: tuple[bool, ...]
    same_when_compiled: bool = True  # False: another formula is traced, and is tested with the op

    def leaves(
        self, device: torch.device, batch: int = 2, length: int = 5, dtype: torch.dtype = torch.bfloat16
    ) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_(trains)
            for shape, trains in zip(self.shapes(batch, length), self.trains, strict=True)
        ]


OPS = (
    Op("rms_norm", lambda x, w: rms_norm(x, w, 1e-6, 1.0), lambda b, s: ((b, s, 72), (72,)), (True, True)),
    Op("layer_norm", layer_norm, lambda b, s: ((b, s, 72), (72,), (72,)), (True, True, True)),
    Op(
        "rope",
        rope,
        lambda b, s: ((b, 3, s, 16), (b, 1, s, 16), (1, s, 16), (1, s, 16)),
        (True, True, False, False),
    ),
    Op("swiglu", swiglu, lambda b, s: ((b, s, 72), (b, s, 72)), (True, True)),
    Op("geglu", geglu, lambda b, s: ((b, s, 72), (b, s, 72)), (True, True)),
    Op("geglu_tanh", lambda g, u: geglu(g, u, "tanh"), lambda b, s: ((b, s, 72), (b, s, 72)), (True, True)),
    Op(
        "lora_linear",
        lora_linear,
        lambda b, s: ((b, s, 72), (40, 72), (4, 72), (40, 4)),
        (True, False, True, True),
        same_when_compiled=False,
    ),
)
compiled_op = pytest.mark.parametrize("op", [op for op in OPS if op.same_when_compiled], ids=lambda op: op.name)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def loss_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = (result,) if isinstance(result, Tensor) else result
    return torch.stack([(output.float() * output.float()).sum() for output in outputs]).sum()


def trained(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.requires_grad]


def assert_equal(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or wanted is None or torch.equal(got, wanted)


@every_op
def test_a_second_backward_gives_the_same(op: Op, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device)
    loss = loss_of(op.function(*leaves))
    first = torch.autograd.grad(loss, trained(leaves), retain_graph=True)
    assert_equal(torch.autograd.grad(loss, trained(leaves)), first)


@every_op
def test_gradients_accumulate(op: Op, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device, dtype=torch.float32)
    once = torch.autograd.grad(loss_of(op.function(*leaves)), trained(leaves))
    for _ in range(2):
        loss_of(op.function(*leaves)).backward()
    for leaf, gradient in zip(trained(leaves), once, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * gradient)


@every_op
def test_the_same_run_gives_the_same_bits(op: Op, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device, length=7)
    first, second = (evaluate(op.function, leaves, random_upstream()) for _ in range(2))
    assert_equal(second.outputs, first.outputs)
    assert_equal(second.gradients, first.gradients)


@every_op
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(op: Op, use_reentrant: bool, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device)
    expected = torch.autograd.grad(loss_of(op.function(*leaves)), trained(leaves))
    loss_of(checkpoint(op.function, *leaves, use_reentrant=use_reentrant)).backward()  # type: ignore[no-untyped-call]
    assert_equal(tuple(leaf.grad for leaf in trained(leaves)), expected)


@every_op
def test_nothing_saved_or_given_is_written_to(op: Op, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device)
    before = [leaf.detach().clone() for leaf in leaves]
    saved: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor, tensor.detach().clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(op.function(*leaves))
    loss.backward()  # type: ignore[no-untyped-call]
    assert saved
    for tensor, value in [*saved, *zip(leaves, before, strict=True)]:
        assert torch.equal(tensor, value)


@every_op
def test_an_input_changed_before_the_backward_is_an_error(op: Op, device: torch.device) -> None:
    leaves = op.leaves(device)
    inputs = [leaf.clone() for leaf in leaves]
    loss = loss_of(op.function(*inputs))
    with torch.no_grad():
        for tensor in inputs:
            tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@every_op
def test_without_gradients_no_graph_is_made(op: Op, backend: str, device: torch.device) -> None:
    with torch.no_grad():
        result = op.function(*op.leaves(device))
    assert not any(output.requires_grad for output in ((result,) if isinstance(result, Tensor) else result))


@every_op
def test_a_second_derivative_is_refused_and_never_wrong(op: Op, device: torch.device) -> None:
    leaves = op.leaves(device)
    gradients = torch.autograd.grad(loss_of(op.function(*leaves)), trained(leaves), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradients[0].sum().backward()  # type: ignore[no-untyped-call]


@every_op
def test_autocast_changes_no_dtype(op: Op, backend: str, device: torch.device) -> None:
    leaves = op.leaves(device, dtype=torch.float32)
    expected = evaluate(op.function, leaves, random_upstream())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        actual = evaluate(op.function, leaves, random_upstream())
    for got, wanted in zip(actual.outputs, expected.outputs, strict=True):
        assert got.dtype is wanted.dtype


@compiled_op
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_reference_compiles_without_a_graph_break(op: Op, dynamic: bool, device: torch.device) -> None:
    from foak.kernels.backend import forced_backend

    leaves = op.leaves(device)
    torch.compiler.reset()
    with forced_backend("reference"):
        compiled = torch.compile(op.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        actual = evaluate(compiled, leaves, random_upstream())
        expected = evaluate(op.function, leaves, random_upstream())
    assert_equal(actual.outputs, expected.outputs)
    assert_equal(actual.gradients, expected.gradients)


@pytest.mark.gpu
@compiled_op
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_kernel_compiles_without_a_graph_break(op: Op, dynamic: bool, device: torch.device) -> None:
    leaves = op.leaves(device)
    torch.compiler.reset()
    compiled = torch.compile(op.function, fullgraph=True, dynamic=dynamic)
    actual = evaluate(compiled, leaves, random_upstream())
    expected = evaluate(op.function, leaves, random_upstream())
    # Not bit for bit: where the twin is traced instead, Inductor contracts its products and sums in another way.
    for got, wanted in zip(actual.outputs + actual.gradients, expected.outputs + expected.gradients, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert_close_to_fp64(got, wanted.double(), reduction_length=wanted.shape[-1], roundings=2)


def compiled_kernels() -> int:
    """Compiled variants of all kernels of this package in this process."""
    import sys

    from triton.runtime import JITFunction

    kernels = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("foak.kernels.") and name.endswith("triton")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


@pytest.mark.gpu
@every_op
def test_other_batch_and_sequence_lengths_compile_nothing(op: Op, device: torch.device) -> None:
    """1 and multiples of 16 are what Triton makes variants of, for arguments that it is not told to leave alone."""
    evaluate(op.function, op.leaves(device, batch=2, length=16), random_upstream())
    before = compiled_kernels()
    for batch, length in ((1, 1), (1, 16), (3, 7), (2, 33), (16, 16), (5, 1)):
        evaluate(op.function, op.leaves(device, batch=batch, length=length), random_upstream())
    assert compiled_kernels() == before


@pytest.mark.gpu
@every_op
def test_the_current_stream_is_used(op: Op, device: torch.device) -> None:
    leaves = op.leaves(device)
    expected = evaluate(op.function, leaves, random_upstream())
    stream = torch.cuda.Stream()
    late = [leaf.detach().zero_().clone() for leaf in op.leaves(device)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # the values arrive late: a kernel on another stream would read zeros
        for target, leaf in zip(late, leaves, strict=True):
            target.copy_(leaf.detach())
        result = op.function(*late)
    stream.synchronize()
    assert_equal((result,) if isinstance(result, Tensor) else result, expected.outputs)


@pytest.mark.gpu
@every_op
def test_another_device_than_the_current_one(op: Op) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    expected = evaluate(op.function, op.leaves(torch.device("cuda:0")), random_upstream())
    actual = evaluate(op.function, op.leaves(torch.device("cuda:1")), random_upstream())
    assert torch.cuda.current_device() == 0
    for got, wanted in zip(actual.outputs, expected.outputs, strict=True):
        assert got.get_device() == 1
        assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.gpu
@every_op
def test_a_step_never_waits_for_the_device(op: Op, device: torch.device) -> None:
    leaves = op.leaves(device)
    evaluate(op.function, leaves, lambda _, output: torch.ones_like(output))
    torch.cuda.set_sync_debug_mode("error")
    try:
        evaluate(op.function, leaves, lambda _, output: torch.ones_like(output))
    finally:
        torch.cuda.set_sync_debug_mode("default")
