"""How far a kernel may be from the fp64 result, and helpers that compare values and every gradient with it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foak.kernels.backend import trust_interpreter

FP32_STEPS = 8
"""fp32 operations that a value passes through between its inputs and its one rounding (products, an exponential, a
reciprocal root: the GPU's fast versions of the last two err by about 2 units)."""


def tolerance(dtype: torch.dtype, reduction_length: int = 1, roundings: int = 1) -> float:
    """The relative error that a correct op may have against fp64.

    `roundings * u(dtype) + FP32_STEPS * sqrt(reduction_length) * u(fp32)`, where `u` is the unit roundoff, half of
    `torch.finfo(dtype).eps` (for float64 both terms are taken in fp64).

    The first term is the worst case of rounding a result to `dtype`; `roundings` counts how often a value is stored in
    `dtype` on its way (1: computed in fp32 and rounded once). The second is what fp32 arithmetic loses: each of the
    `reduction_length` terms of a sum contributes an independent error of about one unit, and independent errors add up
    as the square root of their number (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    2019). Nothing in it depends on the machine.
    """
    unit = torch.finfo(dtype).eps / 2
    accumulator_unit = min(unit, torch.finfo(torch.float32).eps / 2)
    return roundings * unit + FP32_STEPS * math.sqrt(max(reduction_length, 1)) * accumulator_unit


def assert_close_to_fp64(
    actual: Tensor,
    expected64: Tensor,
    *,
    reduction_length: int = 1,
    roundings: int = 1,
    name: str = "result",
    rounded_to: torch.dtype | None = None,
) -> None:
    """Asserts that `actual` is within `tolerance` of `expected64` [same shape, float64], in two measures.

    The L2 norm of the error relative to the L2 norm of `expected64` catches what is a little wrong everywhere; the
    largest error relative to the largest value of `expected64` catches what is wrong in one place. Both allow, on
    top, the spacing of subnormal numbers, below which no value of the dtype exists. A NaN or an infinity in `actual`
    never passes. `rounded_to` names the coarsest dtype that a value is stored in on its way when that is not
    `actual.dtype` (bf16 gradients added up in an fp32 one).
    """
    dtype = rounded_to or actual.dtype
    assert expected64.dtype is torch.float64, f"{name}: the expected value is {expected64.dtype}, not float64"
    assert actual.shape == expected64.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected64.shape)}"
    assert bool(torch.isfinite(expected64).all()), f"{name}: the expected value itself is not finite"
    bad = int((~torch.isfinite(actual)).sum())
    assert bad == 0, f"{name}: {bad} of {actual.numel()} values are NaN or infinite"
    if actual.numel() == 0:
        return
    allowed = tolerance(dtype, reduction_length, roundings)
    limits = torch.finfo(dtype)
    spacing = limits.smallest_normal * limits.eps
    error = actual.detach().to(torch.float64).to(expected64.device) - expected64.detach()
    l2, l2_scale = float(error.norm()), float(expected64.norm())
    assert l2 <= allowed * l2_scale + spacing * actual.numel() ** 0.5, (
        f"{name} ({actual.dtype}): relative L2 error {l2 / (l2_scale or 1.0):.3e}, allowed {allowed:.3e}"
    )
    worst, scale = float(error.abs().max()), float(expected64.abs().max())
    assert worst <= allowed * scale + spacing, (
        f"{name} ({actual.dtype}): largest error {worst:.3e} at a scale of {scale:.3e}, allowed {allowed:.3e} of it"
    )


@dataclass(frozen=True)
class Evaluation:
    """What an op gave: its outputs, and one gradient per leaf (None where the leaf does not require one)."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


def evaluate(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    leaves: Sequence[Tensor | None],
    upstream: Callable[[int, Tensor], Tensor],
) -> Evaluation:
    """Runs `function(*leaves)` and its backward.

    Each leaf enters detached but with its own memory layout, dtype and `requires_grad`; None is passed on as it is.
    `upstream(index, output)` gives the gradient that flows into each output. `.grad` of the leaves is left alone.
    """
    inputs = [None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    result = function(*inputs)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    wanted = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
    gradients: dict[int, Tensor | None] = {}
    differentiable = [(index, output) for index, output in enumerate(outputs) if output.requires_grad]
    if wanted and differentiable:
        found = torch.autograd.grad(
            [output for _, output in differentiable],
            wanted,
            [upstream(index, output) for index, output in differentiable],
            allow_unused=True,
        )
        gradients = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True)}
    return Evaluation(
        tuple(output.detach() for output in outputs),
        tuple(gradients.get(id(leaf)) for leaf in inputs),
    )


def random_upstream(seed: int = 1000) -> Callable[[int, Tensor], Tensor]:
    """An `upstream` for `evaluate`: standard normal values in the output's dtype and device, the same for one seed."""

    def make(index: int, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed + index)
        return torch.randn(output.shape, generator=generator).to(output.dtype).to(output.device)

    return make


def check_against_fp64(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    leaves: Sequence[Tensor | None],
    *,
    reduction_length: int = 1,
    roundings: int = 1,
    rounded_to: torch.dtype | None = None,
    upstream: Callable[[int, Tensor], Tensor] | None = None,
) -> Evaluation:
    """Runs `function` on `leaves` and `reference` on the same values in fp64; compares outputs and every gradient.

    Both receive the same upstream gradients (drawn in the dtype of `function`'s outputs). A gradient must exist for
    exactly the leaves that require one, in the leaf's own dtype. Returns what `function` gave.
    """
    flowing_in: dict[int, Tensor] = {}
    draw = upstream or random_upstream()

    def record(index: int, output: Tensor) -> Tensor:
        flowing_in[index] = draw(index, output)
        return flowing_in[index]

    actual = evaluate(function, leaves, record)
    wide = [
        leaf.detach().double().requires_grad_(leaf.requires_grad)
        if leaf is not None and leaf.is_floating_point()
        else leaf
        for leaf in leaves
    ]
    expected = evaluate(reference, wide, lambda index, _: flowing_in[index].double())
    assert len(actual.outputs) == len(expected.outputs)
    for index, (got, want) in enumerate(zip(actual.outputs, expected.outputs, strict=True)):
        assert_close_to_fp64(
            got,
            want,
            reduction_length=reduction_length,
            roundings=roundings,
            rounded_to=rounded_to,
            name=f"output {index}",
        )
    for index, (leaf, gradient, wanted) in enumerate(zip(leaves, actual.gradients, expected.gradients, strict=True)):
        name = f"gradient of argument {index}"
        assert (gradient is None) == (wanted is None), f"{name} is {'missing' if gradient is None else 'not asked for'}"
        if leaf is None or gradient is None or wanted is None:
            continue
        assert gradient.dtype is leaf.dtype, f"{name} is {gradient.dtype}, the argument is {leaf.dtype}"
        assert_close_to_fp64(
            gradient,
            wanted,
            reduction_length=reduction_length,
            roundings=roundings,
            rounded_to=rounded_to,
            name=name,
        )
    return actual


LAYOUTS = ("contiguous", "sliced", "every_second", "transposed")
"""The memory layouts that `laid_out` knows."""


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The values of `tensor` in another memory layout; what lies between them is NaN, so that a stray read shows.

    "sliced": rows are part of longer ones and start at an odd address, as in a packed projection; "every_second": a
    stride of 2 in the last dimension; "transposed": the last two dimensions are swapped in memory.
    """
    length = tensor.shape[-1]
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        return _with_nan_around(tensor, 2 * length + 5)[..., 3 : 3 + length].copy_(tensor)
    if layout == "every_second":
        return _with_nan_around(tensor, 2 * length)[..., ::2].copy_(tensor)
    raise ValueError(f"laid_out: layout is {layout!r}; allowed are {', '.join(LAYOUTS)}")


def _with_nan_around(tensor: Tensor, length: int) -> Tensor:
    return torch.full((*tensor.shape[:-1], length), math.nan, dtype=tensor.dtype, device=tensor.device)


def make_interpreter_round_bf16() -> None:
    """Makes Triton's interpreter treat bf16 as GPUs do: rounded to the nearest, ties to even, multiplied by value.

    The interpreter cuts the lower half off an fp32 number instead, which doubles the error of every bf16 result and
    would call for a wider tolerance there than on the device; and `tl.dot` multiplies the bits of bf16 operands. For
    test sessions under `TRITON_INTERPRET=1`, where no kernel is chosen before this is called; it changes Triton's own
    class for the rest of the process, and does nothing when called again.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    truncating = builder.cast_impl
    if getattr(truncating, "rounds_bf16", False):
        return

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            data = np.where(is_nan, 0x7FC0, rounded).astype(np.uint16).reshape(src.data.shape)
            return interpreter.TensorHandle(data, target)
        if source == tl.bfloat16 and target == tl.float32:
            data = (np.ascontiguousarray(src.data).astype(np.uint32) << 16).view(np.float32).reshape(src.data.shape)
            return interpreter.TensorHandle(data, target)
        return truncating(self, src, dst_type)

    multiplying_bits = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = (cast_impl(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
        return multiplying_bits(self, *wide, *rest)

    cast_impl.rounds_bf16 = True  # type: ignore[attr-defined]
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    trust_interpreter()
