"""LayerNorm: every row shifted to mean zero and scaled to variance one, times a weight, plus a bias."""

from torch import Tensor

from foak.kernels.autograd import apply
from foak.kernels.backend import backend_for
from foak.kernels.layer_norm.reference import layer_norm_reference

__all__ = ["layer_norm"]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`, mean and (biased) variance over the last dimension.

    Args:
        x: `[..., H]`, of any floating-point dtype and memory layout; no rows at all are fine.
        weight: `[H]`, or None for 1.
        bias: `[H]`, or None for 0.
        eps: added to the variance.

    Returns:
        `[..., H]` in the dtype that PyTorch promotes `x`, `weight` and `bias` to, computed in fp32 (fp64 for fp64
        inputs) and rounded once. Differentiable in all three; the gradients of weight and bias are summed in fp32, in
        the same order every time.

    Raises:
        ValueError: if `weight` or `bias` is not one-dimensional of the length of `x`'s last dimension.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"layer_norm: {name} has shape {tuple(parameter.shape)}, x has shape {tuple(x.shape)}; "
                f"allowed is one value for each element of x's last dimension"
            )
    if backend_for(x, weight, bias) == "reference":
        return layer_norm_reference(x, weight, bias, eps)
    from foak.kernels.layer_norm.triton import LayerNorm

    result: Tensor = apply(LayerNorm, x, weight, bias, eps)
    return result
