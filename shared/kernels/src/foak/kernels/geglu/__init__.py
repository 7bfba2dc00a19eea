"""GeGLU's elementwise part: the gate through GELU, times the up projection."""

from typing import Literal

from torch import Tensor

from foak.kernels.autograd import apply
from foak.kernels.backend import backend_for
from foak.kernels.geglu.reference import geglu_reference

__all__ = ["geglu"]


def geglu(gate: Tensor, up: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """`gelu(gate, approximate) * up`.

    Args:
        gate: `[..., I]`, of any floating-point dtype. Half of a packed projection (rows further apart than they are
            long) is read where it lies.
        up: same shape.
        approximate: "none" is GELU itself, "tanh" the approximation that Gemma's models are defined with
            (`gelu_pytorch_tanh`).

    Returns:
        `[..., I]` in the dtype that PyTorch promotes both to, computed in fp32 (fp64 for fp64 inputs) and rounded
        once. Differentiable in both; only `gate` and `up` are kept for the backward.

    Raises:
        ValueError: if the shapes differ, or `approximate` is neither "none" nor "tanh".

    Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error Linear Units",
    2016.
    """
    if gate.shape != up.shape:
        raise ValueError(f"geglu: gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate is {approximate!r}; allowed are "none" and "tanh"')
    if backend_for(gate, up) == "reference":
        return geglu_reference(gate, up, approximate)
    from foak.kernels.geglu.triton import GeGlu

    result: Tensor = apply(GeGlu, gate, up, approximate == "tanh")
    return result
