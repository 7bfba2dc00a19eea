"""SwiGLU's elementwise part: the gate through SiLU, times the up projection."""

from torch import Tensor

from foak.kernels.autograd import apply
from foak.kernels.backend import backend_for
from foak.kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate: `[..., I]`, of any floating-point dtype. Half of a packed projection (rows further apart than they are
            long) is read where it lies.
        up: same shape.

    Returns:
        `[..., I]` in the dtype that PyTorch promotes both to, computed in fp32 (fp64 for fp64 inputs) and rounded
        once. Differentiable in both; only `gate` and `up` are kept for the backward.

    Raises:
        ValueError: if the shapes differ.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    if backend_for(gate, up) == "reference":
        return swiglu_reference(gate, up)
    from foak.kernels.swiglu.triton import SwiGlu

    result: Tensor = apply(SwiGlu, gate, up)
    return result
