"""The ops that `kernels.py` measures: their inputs, their rivals, and the least that each must move or multiply."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import foak.kernels

Function = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """The shapes of a run; as they stand those of Llama 3 8B."""

    tokens: int = 8192
    hidden: int = 4096
    intermediate: int = 14336
    q_heads: int = 32
    k_heads: int = 8
    head: int = 128
    vocabulary: int = 128256
    checked_tokens: int = 512
    replays: int = 30


NF4_BLOCK, NESTED_BLOCK, GPTQ_GROUP = 64, 256, 128
"""The block sizes that bitsandbytes and GPTQ's tools use unless told otherwise."""

RANK = 16

TINY = Sizes(
    tokens=24, hidden=48, intermediate=80, q_heads=3, k_heads=1, head=16, vocabulary=96, checked_tokens=24, replays=2
)


@dataclass(frozen=True)
class Case:
    """An op with its inputs for a number of tokens, its rivals, and the least that each pass must move or multiply.

    An op none of whose inputs trains has no backward.
    """

    name: str
    inputs: Callable[["Maker", int], list[Tensor]]
    foak: Function
    plain: Function
    other: Function | None  # that of the library named below, where it is installed
    length: int  # of the longest sum inside, for the tolerance
    forward_bytes: int = 0
    backward_bytes: int = 0
    flops: int = 0  # of forward and backward together; such a case is timed as a whole
    capturable: bool = True
    library: str = "liger"

    @property
    def functions(self) -> dict[str, Function]:
        """The implementations that are here, by name."""
        found = {"foak": self.foak, self.library: self.other, "plain": self.plain}
        return {name: function for name, function in found.items() if function is not None}


@dataclass(frozen=True)
class Maker:
    """Random tensors in the dtype and on the device of the run."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, trains: bool = True, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)
        return (values * scale).requires_grad_(trains)

    def labels(self, tokens: int, vocabulary: int) -> Tensor:
        return torch.randint(0, vocabulary, (tokens,), generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)


def liger_functions() -> dict[str, Function]:
    """Liger's ops under our names; empty where Liger or a GPU is missing."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return {}
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "rope": LigerRopeFunction.apply,
        "swiglu": LigerSiLUMulFunction.apply,
        "geglu (tanh)": LigerGELUMulFunction.apply,
        "cross_entropy": lambda z, labels: LigerCrossEntropyFunction.apply(z, labels, None)[0],
        "linear_cross_entropy, frozen head": lambda h, w, labels: LigerFusedLinearCrossEntropyFunction.apply(
            h, w, labels
        )[0],
        "linear_cross_entropy, trained head": lambda h, w, labels: LigerFusedLinearCrossEntropyFunction.apply(
            h, w, labels
        )[0],
    }


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1] // 2
    q_turned, k_turned = (torch.cat((-x[..., half:], x[..., :half]), dim=-1) for x in (q, k))
    return q * cos + q_turned * sin, k * cos + k_turned * sin


def plain_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def cases(sizes: Sizes, width: int) -> list[Case]:
    """All ops; `width` is the bytes of one element."""
    hidden, inner = sizes.hidden, sizes.intermediate
    liger = liger_functions()
    row, gate = sizes.tokens * hidden * width, sizes.tokens * inner * width
    heads = sizes.tokens * (sizes.q_heads + sizes.k_heads) * sizes.head * width
    product = 2 * sizes.tokens * hidden * sizes.vocabulary

    def rotary(make: Maker, tokens: int) -> list[Tensor]:
        q = make.normal(1, tokens, sizes.q_heads, sizes.head).transpose(1, 2)
        k = make.normal(1, tokens, sizes.k_heads, sizes.head).transpose(1, 2)
        angle = make.normal(1, tokens, sizes.head, trains=False)
        return [q.detach().requires_grad_(), k.detach().requires_grad_(), angle.cos(), angle.sin()]

    def gated(make: Maker, tokens: int) -> list[Tensor]:
        return [make.normal(tokens, inner), make.normal(tokens, inner)]

    def headed(trains: bool) -> Callable[[Maker, int], list[Tensor]]:
        return lambda make, tokens: [
            make.normal(tokens, hidden),
            make.normal(sizes.vocabulary, hidden, trains=trains, scale=hidden**-0.5),
            make.labels(tokens, sizes.vocabulary),
        ]

    def linear(name: str, trains: bool) -> Case:
        return Case(
            name,
            headed(trains),
            foak.kernels.linear_cross_entropy,
            lambda h, w, labels: plain_cross_entropy(h @ w.t(), labels),
            liger.get(name),
            max(hidden, sizes.vocabulary),
            flops=product * (3 if trains else 2),
            capturable=False,
        )

    return [
        Case(
            "rms_norm",
            lambda make, tokens: [make.normal(tokens, hidden), make.normal(hidden)],
            lambda x, w: foak.kernels.rms_norm(x, w, 1e-6),
            plain_rms_norm,
            liger.get("rms_norm"),
            max(hidden, sizes.tokens),
            2 * row,
            3 * row,
        ),
        Case(
            "layer_norm",
            lambda make, tokens: [make.normal(tokens, hidden), make.normal(hidden), make.normal(hidden)],
            lambda x, w, b: foak.kernels.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, (hidden,), w, b, 1e-5),
            liger.get("layer_norm"),
            max(hidden, sizes.tokens),
            2 * row,
            3 * row,
        ),
        Case("rope", rotary, foak.kernels.rope, plain_rope, liger.get("rope"), 1, 2 * heads, 2 * heads),
        Case(
            "swiglu",
            gated,
            foak.kernels.swiglu,
            lambda g, u: F.silu(g) * u,
            liger.get("swiglu"),
            1,
            3 * gate,
            5 * gate,
        ),
        Case(
            "geglu (tanh)",
            gated,
            lambda g, u: foak.kernels.geglu(g, u, "tanh"),
            lambda g, u: F.gelu(g, approximate="tanh") * u,
            liger.get("geglu (tanh)"),
            1,
            3 * gate,
            5 * gate,
        ),
        Case(
            "cross_entropy",
            lambda make, tokens: [
                make.normal(tokens, sizes.vocabulary, scale=3.0),
                make.labels(tokens, sizes.vocabulary),
            ],
            foak.kernels.cross_entropy,
            plain_cross_entropy,
            liger.get("cross_entropy"),
            sizes.vocabulary,
            sizes.tokens * sizes.vocabulary * width,
            2 * sizes.tokens * sizes.vocabulary * width,
            capturable=False,
        ),
        linear("linear_cross_entropy, frozen head", trains=False),
        linear("linear_cross_entropy, trained head", trains=True),
        Case(
            f"lora_linear, rank {RANK}",
            lambda make, tokens: [
                make.normal(tokens, hidden),
                make.normal(inner, hidden, trains=False, scale=hidden**-0.5),
                make.normal(RANK, hidden, scale=hidden**-0.5),
                make.normal(inner, RANK, scale=0.1),
            ],
            foak.kernels.lora_linear,
            lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b),
            None,
            max(hidden, inner, sizes.tokens),
            # The base forward and back to its input; both factors forward, back, and to their own gradients.
            flops=4 * sizes.tokens * hidden * inner + 6 * sizes.tokens * RANK * (hidden + inner),
            capturable=False,
        ),
        *decode_cases(sizes, width),
    ]


def plain_nf4(packed: Tensor, absmax: Tensor, code: Tensor, outer: Tensor, table: Tensor, offset: Tensor) -> Tensor:
    """By table look-ups; in bf16 where the tables are in fp32."""
    scales = table[absmax.long()] * outer.repeat_interleave(NESTED_BLOCK)[: len(absmax)] + offset
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(len(absmax), -1)
    values = code[codes.long()] * scales.unsqueeze(1)
    return values.to(torch.bfloat16) if code.dtype is torch.float32 else values


def bitsandbytes_nf4(shape: torch.Size) -> Function | None:
    """bitsandbytes' decoding of one tensor; None where it or a GPU is missing."""
    if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        return None
    from bitsandbytes.functional import QuantState, dequantize_4bit

    def decode(packed: Tensor, absmax: Tensor, code: Tensor, outer: Tensor, table: Tensor, offset: Tensor) -> Tensor:
        nested = QuantState(absmax=outer, code=table, blocksize=NESTED_BLOCK, dtype=torch.float32)
        state = QuantState(
            absmax=absmax,
            shape=shape,
            code=code,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=torch.bfloat16,
            offset=offset,
            state2=nested,
        )
        return dequantize_4bit(packed.view(-1, 1), state)

    return decode


def plain_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """By shifts; in bf16 where the scales are in half precision."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=qweight.device)
    codes = ((qweight.unsqueeze(1) >> shifts.view(1, 8, 1)) & 15).flatten(0, 1)
    zeros = (((qzeros.unsqueeze(2) >> shifts) & 15).flatten(1) + 1) & 15
    groups = torch.arange(len(codes), device=qweight.device) // GPTQ_GROUP
    wide = torch.promote_types(scales.dtype, torch.float32)
    weight = ((codes - zeros[groups]).to(wide) * scales.to(wide)[groups]).t()
    return weight.to(torch.bfloat16) if wide is torch.float32 else weight


def decode_cases(sizes: Sizes, width: int) -> list[Case]:
    """The decoding of a frozen weight `[intermediate, hidden]`; its bytes are those of the ops' READMEs."""
    outputs, features = sizes.intermediate, sizes.hidden
    values, blocks = outputs * features, outputs * features // NF4_BLOCK
    outer = -(-blocks // NESTED_BLOCK)
    shape = torch.Size((outputs, features))

    def nf4(make: Maker, tokens: int) -> list[Tensor]:
        return [
            make.integers(0, 256, torch.uint8, values // 2),
            make.integers(0, 256, torch.uint8, blocks),
            make.uniform(16) * 2 - 1,
            make.uniform(outer),
            make.uniform(256),
            make.uniform(1).squeeze(),
        ]

    def decode_nf4(p: Tensor, absmax: Tensor, code: Tensor, o: Tensor, table: Tensor, offset: Tensor) -> Tensor:
        nested = foak.kernels.NestedScales(o, table, offset, NESTED_BLOCK)
        return foak.kernels.dequantize_nf4(p, absmax, code, shape, blocksize=NF4_BLOCK, nested=nested)

    groups = -(-features // GPTQ_GROUP)

    def gptq(make: Maker, tokens: int) -> list[Tensor]:
        return [
            make.integers(-(2**31), 2**31, torch.int32, features // 8, outputs),
            make.integers(-(2**31), 2**31, torch.int32, groups, outputs // 8),
            make.uniform(groups, outputs).half(),
        ]

    return [
        Case(
            "dequantize_nf4, double quantization",
            nf4,
            decode_nf4,
            lambda *leaves: plain_nf4(*leaves).view(shape),
            bitsandbytes_nf4(shape),
            1,
            values // 2 + values * width + blocks,
            library="bitsandbytes",
        ),
        Case(
            "dequantize_gptq, 4 bits",
            gptq,
            lambda qweight, qzeros, scales: foak.kernels.dequantize_gptq(
                qweight, qzeros, scales, None, 4, group_size=GPTQ_GROUP, dtype=torch.bfloat16
            ),
            plain_gptq,
            None,
            1,
            values // 2 + values * width + groups * outputs * 5 // 2,
        ),
    ]
