"""RMSNorm: every row divided by its root mean square, times a weight."""

from torch import Tensor

from foak.kernels.autograd import apply
from foak.kernels.backend import backend_for
from foak.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * (offset + weight)`, the mean over the last dimension.

    Args:
        x: `[..., H]`, of any floating-point dtype and memory layout; no rows at all are fine.
        weight: `[H]`, or None for a norm without weight.
        eps: added to the mean square.
        offset: added to the weight; 1.0 for models that store the weight's distance from one (Gemma).

    Returns:
        `[..., H]` in `torch.promote_types(x.dtype, weight.dtype)`, computed in fp32 (fp64 for fp64 inputs) and rounded
        once. Differentiable in `x` and `weight`; the weight's gradient is summed in fp32, in the same order every time.

    Raises:
        ValueError: if `weight` is not one-dimensional of the length of `x`'s last dimension.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, x has shape {tuple(x.shape)}; "
            f"allowed is one weight for each element of x's last dimension"
        )
    if backend_for(x, weight) == "reference":
        return rms_norm_reference(x, weight, eps, offset)
    from foak.kernels.rms_norm.triton import RmsNorm

    result: Tensor = apply(RmsNorm, x, weight, eps, offset)
    return result
