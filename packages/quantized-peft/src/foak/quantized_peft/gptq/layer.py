"""A linear layer whose frozen weight stays in GPTQ's format."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foak.kernels import dequantize_gptq
from foak.kernels.autograd import once_differentiable
from foak.kernels.decode_once import ATTRIBUTE, Keeper, Reading

__all__ = ["GptqLinear"]

_Stored = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""`qweight`, `qzeros`, `scales`, `g_idx`."""

_Form = tuple[int, int, int, int]
"""`bits`, `group_size`, `in_features`, `zero_offset`."""

_NO_WEIGHT = (
    "a GptqLinear stores its weight in GPTQ's format and cannot change it, so nothing can be merged into it, and no "
    "adapter initialised from it (weight.{name} was asked for); dequantize() gives a dense copy, and an adapter can be "
    "merged into the 16-bit model"
)


class StoredWeight:
    """What is known of a weight without decoding it: to place an adapter beside it, and to see that it changed."""

    _is_hf_initialized = True
    requires_grad = False

    def __init__(self, layer: GptqLinear) -> None:
        self._layer = layer
        self.shape = torch.Size((layer.out_features, layer.in_features))
        self.dtype = layer.compute_dtype
        self.device = layer.qweight.device

    @property
    def _version(self) -> int:
        return sum(parameter._version for parameter in self._layer.parameters(recurse=False))

    def data_ptr(self) -> int:
        return self._layer.qweight.data_ptr()

    def is_inference(self) -> bool:
        return self._layer.qweight.is_inference()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_NO_WEIGHT.format(name=name))


class GptqLinear(nn.Linear):
    """`x @ weight.T + bias`, with the weight decoded for each product and kept by none.

    It is a `torch.nn.Linear`, so that PEFT adapts it like any other, under `target_modules="all-linear"` too, but its
    `weight` is a `StoredWeight`. What it stores are parameters that never train: `DistributedDataParallel` would send
    buffers round before each forward.

    Args:
        in_features: inputs.
        out_features: outputs.
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale and a zero; -1 for all.
        bias: whether there is a bias.
        zero_offset: what is added to a stored zero, modulo `2 ** bits`: 1 or 0, see `foak.kernels.dequantize_gptq`.
        act_order: whether there is a `g_idx`; without, groups are of consecutive inputs.
        scale_dtype: of the scales.
        dtype: of the bias, and of the activations that the layer is meant for.
        device: of all of it.

    Attributes:
        qweight: `[ceil(in_features * bits / 32), out_features]` int32.
        qzeros: `[groups, ceil(out_features * bits / 32)]` int32.
        scales: `[groups, out_features]`.
        g_idx: `[in_features]` int32, or None.
        bias: `[out_features]`, or None.
        compute_dtype: `dtype`.
        bias_was_added: whether the architecture has no bias here, but the checkpoint has.
    """

    qweight: nn.Parameter
    qzeros: nn.Parameter
    scales: nn.Parameter
    g_idx: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int,
        *,
        bias: bool = False,
        zero_offset: int = 1,
        act_order: bool = True,
        scale_dtype: torch.dtype = torch.float16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size, self.zero_offset = bits, group_size, zero_offset
        self.compute_dtype = dtype
        size = in_features if group_size == -1 else group_size
        groups = -(-in_features // size)

        def frozen(*shape: int, of: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=of, device=device), requires_grad=False)

        self.qweight = frozen(-(-in_features * bits // 32), out_features, of=torch.int32)
        self.qzeros = frozen(groups, -(-out_features * bits // 32), of=torch.int32)
        self.scales = frozen(groups, out_features, of=scale_dtype)
        self.g_idx = frozen(in_features, of=torch.int32) if act_order else None
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        )
        self.bias_was_added = False
        self._in_order: bool | None = None

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The dense weight `[out_features, in_features]`.

        Args:
            dtype: of the result; that of the scales if None.
            out: see `foak.kernels.dequantize_gptq`.
        """
        return dequantize_gptq(
            self.qweight,
            self.qzeros,
            self.scales,
            self._groups(),
            self.bits,
            group_size=self.group_size,
            in_features=self.in_features,
            zero_offset=self.zero_offset,
            dtype=dtype,
            out=out,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Args: x: `[..., in_features]`. Returns `[..., out_features]` in its dtype.

        Under autocast the product runs in autocast's dtype, and its result has that of `x`, as with bitsandbytes' 4-bit
        layers.
        """
        dtype = x.dtype
        device = x.device.type
        if dtype is not torch.float64 and not x.is_meta and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        stored = (self.qweight, self.qzeros, self.scales, self._groups())
        form = (self.bits, self.group_size, self.in_features, self.zero_offset)
        reading = self._reading(stored, form)
        result: Tensor = _Product.apply(x.to(dtype), bias, *stored, form, reading)  # type: ignore[no-untyped-call]
        return result.to(x.dtype)

    def _reading(self, stored: _Stored, form: _Form) -> Reading | None:
        keeper: Keeper | None = self.__dict__.get(ATTRIBUTE)
        if keeper is None or torch.compiler.is_compiling():
            return None
        weight = self.weight
        # Of the tensors as they are now: a layer that accelerate offloads has none when its backward runs.
        return keeper.reading(partial(_dense, stored, form), (weight.data_ptr(), weight._version))

    def groups_changed(self) -> None:
        """Looks at `g_idx` anew: to be called after it was written to. The host waits for the device here."""
        self._in_order = None
        self._groups()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}, group_size={self.group_size}"

    @property
    def weight(self) -> StoredWeight:  # type: ignore[override]
        """Shape, dtype of the activations, device, address and version; all else: an `AttributeError` that says why."""
        return StoredWeight(self)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.groups_changed()

    def _groups(self) -> Tensor | None:
        """`g_idx` where it says more than the group size does, which is found once."""
        if self.g_idx is None:
            return None
        if self._in_order is None and self.g_idx.device.type != "meta":
            size = self.in_features if self.group_size == -1 else self.group_size
            plain = torch.arange(self.in_features, device=self.g_idx.device) // size
            self._in_order = bool((self.g_idx == plain).all())
        return None if self._in_order else self.g_idx


class _Product(torch.autograd.Function):
    """Decodes in the forward and again in the backward; keeps what is stored, and nothing dense but in a keeper."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor | None,
        form: _Form,
        reading: Reading | None,
    ) -> Tensor:
        stored = (qweight, qzeros, scales, g_idx)
        ctx.save_for_backward(*stored)
        ctx.form = form
        ctx.reading = reading
        return F.linear(x, _decode(stored, ctx.form, x.dtype, reading), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dy @ _decode(ctx.saved_tensors, ctx.form, dy.dtype, ctx.reading)
        if ctx.needs_input_grad[1]:
            dbias = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dbias, None, None, None, None, None, None


def _decode(stored: _Stored, form: _Form, dtype: torch.dtype, reading: Reading | None) -> Tensor:
    return _dense(stored, form, dtype) if reading is None else reading(dtype)


def _dense(stored: _Stored, form: _Form, dtype: torch.dtype) -> Tensor:
    bits, group_size, in_features, zero_offset = form
    return dequantize_gptq(
        *stored, bits, group_size=group_size, in_features=in_features, zero_offset=zero_offset, dtype=dtype
    )
