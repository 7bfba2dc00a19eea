"""`GptqLinear`: the product and its gradients, what it keeps, and how autograd, PEFT and fused ops live with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from foak.core import AccelerationFramework
from foak.kernels.decode_once import ATTRIBUTE, Keeper
from foak.kernels.dense_weight import dense_weight_of
from foak.kernels.gptq.packing import round_to_nearest
from foak.quantized_peft.gptq.dense import OWN
from foak.quantized_peft.gptq.layer import GptqLinear
from foak.quantized_peft.plugin import QuantizedPeftPlugin

IN, OUT = 96, 40
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
INPUT_IDS = torch.arange(40).reshape(2, 20) * 7 % 96


def layer_of(
    bits: int = 4, *, act_order: bool = False, bias: bool = False, dtype: torch.dtype = torch.float32
) -> GptqLinear:
    generator = torch.Generator().manual_seed(0)
    packed = round_to_nearest(torch.randn(OUT, IN, generator=generator), bits, 32, act_order=act_order)
    layer = GptqLinear(IN, OUT, bits, 32, bias=bias, dtype=dtype)
    for name in ("qweight", "qzeros", "scales", "g_idx"):
        getattr(layer, name).data.copy_(getattr(packed, name))
    if bias:
        layer.bias.data.copy_(torch.randn(OUT, generator=generator))
    return layer


def x_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 5), (5,), ()])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_and_gradients_are_those_of_the_dense_layer(
    dtype: torch.dtype, act_order: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    layer = layer_of(act_order=act_order, bias=bias, dtype=dtype)
    x, dense_x = x_of(dtype, *shape), x_of(dtype, *shape)
    y = layer(x)
    dense_bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_()
    expected = F.linear(dense_x, layer.dequantize(dtype), dense_bias)
    assert torch.equal(y, expected)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(upstream)
    expected.backward(upstream)
    assert torch.equal(x.grad, dense_x.grad)
    if dense_bias is not None:
        assert torch.equal(layer.bias.grad, dense_bias.grad)


def test_an_input_that_needs_no_gradient_makes_no_graph() -> None:
    assert not layer_of()(x_of(torch.float32, 3).detach()).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_dense_is_kept_for_the_backward(dtype: torch.dtype) -> None:
    layer = layer_of(dtype=dtype)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x_of(dtype, 3))
    stored = {parameter.data_ptr() for parameter in layer.parameters()}
    assert kept
    assert {tensor.data_ptr() for tensor in kept} <= stored


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_product(x_dtype: torch.dtype, autocast: torch.dtype) -> None:
    layer = layer_of(bias=True)
    dense = nn.Linear(IN, OUT)
    dense.weight.data, dense.bias.data = layer.dequantize(torch.float32), layer.bias.detach()
    found, expected = [], []
    for module, results in ((layer, found), (dense, expected)):
        x = x_of(x_dtype, 3)
        with torch.autocast("cpu", dtype=autocast):
            y = module(x)
        y.backward(torch.ones_like(y))
        results += [y, x.grad]
    assert expected[0].dtype is autocast
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype is x_dtype
        assert torch.equal(got, wanted.to(x_dtype))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation(use_reentrant: bool) -> None:
    layer = layer_of()
    plain, again = x_of(torch.float32, 3), x_of(torch.float32, 3)
    layer(plain).sum().backward()
    recompute(layer, again, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(plain.grad, again.grad)


def test_a_second_backward_through_the_graph() -> None:
    x = x_of(torch.float32, 3)
    y = layer_of()(x).sum()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)


@pytest.mark.parametrize("of_forwards", [None, False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_layer_that_accelerate_offloads(use_reentrant: bool | None, of_forwards: bool | None) -> None:
    """Its tensors are there during its forward alone, so the backward decodes what the forward had in its hands."""
    layer = layer_of(act_order=True)
    plain, x = x_of(torch.float32, 3), x_of(torch.float32, 3)
    layer(plain).sum().backward()
    cpu_offload(layer, execution_device=torch.device("cpu"))
    assert layer.qweight.is_meta
    if of_forwards is not None:
        setattr(layer, ATTRIBUTE, Keeper(of_forwards))
    y = layer(x) if use_reentrant is None else recompute(layer, x, use_reentrant=use_reentrant)
    y.sum().backward(retain_graph=True)
    assert torch.equal(x.grad, plain.grad)
    if use_reentrant is None:
        y.sum().backward()
        assert torch.equal(x.grad, 2 * plain.grad)


def test_a_weight_that_was_replaced_is_decoded_anew() -> None:
    layer = layer_of()
    setattr(layer, ATTRIBUTE, Keeper(of_forwards=True))
    x = x_of(torch.float32, 3)
    first = layer(x)  # whose graph owns the decoding
    assert first.requires_grad
    layer.qweight = nn.Parameter(layer.qweight.flip(1), requires_grad=False)
    with torch.no_grad():  # where nothing is noted in the place of the first
        expected = layer(x)

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            with torch.enable_grad():
                assert torch.equal(layer(x.detach().requires_grad_()), expected)
            return dy

    Recomputes.apply(x).sum().backward()  # type: ignore[no-untyped-call]


def test_the_forward_compiles_without_a_graph_break() -> None:
    layer = layer_of(act_order=True)
    eager, x = x_of(torch.float32, 3), x_of(torch.float32, 3)
    expected = layer(eager)  # after which the order of the groups is known
    torch.compiler.reset()
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(x.grad, eager.grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_gives_the_same(copied: Callable[[GptqLinear], GptqLinear]) -> None:
    layer, x = layer_of(act_order=True, bias=True), x_of(torch.float32, 3)
    assert torch.equal(copied(layer)(x), layer(x))


def test_a_state_dict_with_other_groups_is_followed() -> None:
    ordered, other, x = layer_of(), layer_of(act_order=True), x_of(torch.float32, 3)
    before = ordered(x)
    ordered.load_state_dict(other.state_dict())
    assert not torch.equal(ordered(x), before)
    assert torch.equal(ordered(x), other(x))


def test_on_the_meta_device_it_has_shapes() -> None:
    layer = GptqLinear(IN, OUT, 4, 32, bias=True, device="meta")
    assert layer(torch.empty(3, IN, device="meta")).shape == (3, OUT)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


def test_parameters_are_frozen_and_none_is_a_buffer() -> None:
    layer = layer_of()
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert not list(layer.buffers())
    assert set(layer.state_dict()) == {"qweight", "qzeros", "scales", "g_idx"}


def test_the_weight_says_when_it_changed() -> None:
    layer = layer_of()
    before = layer.weight._version
    assert before == layer.weight._version
    with torch.no_grad():
        layer.qzeros.add_(0)
    assert layer.weight._version > before
    assert not layer.weight.is_inference()
    with torch.inference_mode():
        assert layer_of().weight.is_inference()


def test_the_weight_has_a_shape_and_cannot_be_written_to() -> None:
    layer = layer_of(dtype=torch.bfloat16)
    assert (layer.weight.shape, layer.weight.dtype) == ((OUT, IN), torch.bfloat16)
    assert layer.weight.device == layer.qweight.device
    for use in (lambda: layer.weight.data, lambda: layer.weight.to(torch.float32), lambda: layer.weight.t()):
        with pytest.raises(AttributeError, match="nothing can be merged into it"):
            use()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_ops_read_it(dtype: torch.dtype) -> None:
    layer = layer_of(act_order=True)
    how = dense_weight_of(layer)
    assert how is OWN
    assert how.refusal(layer) is None
    assert how.product_dtype(layer, torch.empty(1, dtype=dtype)) is dtype
    buffer = torch.full((OUT, IN + 8), 7.0, dtype=dtype)
    assert how.decode(layer, dtype, buffer[:, :IN]).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:, :IN], layer.dequantize(dtype))
    assert torch.equal(how.decode(layer, dtype, None), layer.dequantize(dtype))
    assert bool((buffer[:, IN:] == 7.0).all())


def framework() -> AccelerationFramework:
    tree = {"plugins": {"peft": {"quantization": {"auto_gptq": {}}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


def trained(model: Any, steps: int = 5, lr: float = 2e-2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_trains_as_on_the_dense_model(dtype: torch.dtype, write_gptq: Callable[..., Any]) -> None:
    written = write_gptq(act_order=True, config={"attention_bias": True})
    for parameter in written.dense.parameters():  # not the rotation's frequencies, which stay float32 in any model
        parameter.data = parameter.to(dtype)
    curves = []
    for base in (framework().load_model(written.path, dtype=dtype), written.dense):
        torch.manual_seed(0)
        curves.append(trained(get_peft_model(base, LORA).train()))
    assert curves[0][-1] < curves[0][0] - 0.1
    # Both multiply with the same weights, rounded once to the dtype, in the same order.
    assert curves[0] == curves[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_preparation_and_gradient_checkpointing(use_reentrant: bool, write_gptq: Callable[..., Any]) -> None:
    """PEFT's preparation makes float32 of everything in 16 bits, but not of a GPTQ model."""
    written = write_gptq()
    plain = get_peft_model(framework().load_model(written.path, dtype=torch.bfloat16), copy.deepcopy(LORA))
    prepared = prepare_model_for_kbit_training(
        framework().load_model(written.path, dtype=torch.bfloat16),
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    assert {p.dtype for p in prepared.parameters()} == {torch.int32, torch.float16, torch.bfloat16}
    assert prepared.model.embed_tokens.weight.dtype is torch.bfloat16
    prepared = get_peft_model(prepared, copy.deepcopy(LORA)).train()
    assert prepared.is_gradient_checkpointing
    prepared.load_state_dict(plain.state_dict())
    assert trained(prepared) == trained(plain.train())


def test_adapters_are_added_switched_and_disabled(write_gptq: Callable[..., Any]) -> None:
    written = write_gptq()
    base = framework().load_model(written.path, dtype=torch.float32)
    with torch.no_grad():
        expected = base(INPUT_IDS).logits
    model = get_peft_model(base, LORA)
    trained(model)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad():
        first = model(INPUT_IDS).logits
        model.set_adapter("second")
        second = model(INPUT_IDS).logits
        with model.disable_adapter():
            assert torch.equal(model(INPUT_IDS).logits, expected)
    assert not torch.equal(first, expected)
    assert not torch.equal(second, first)


def test_an_adapter_of_the_dense_model_loads_on_the_quantized_one(
    write_gptq: Callable[..., Any], tmp_path: Any
) -> None:
    written = write_gptq()
    plain = get_peft_model(copy.deepcopy(written.dense), LORA)
    trained(plain)
    plain.eval().save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(framework().load_model(written.path, dtype=torch.float32), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(model.eval()(INPUT_IDS).logits, plain(INPUT_IDS).logits)


def test_merging_is_refused_and_changes_nothing(write_gptq: Callable[..., Any]) -> None:
    written = write_gptq()
    model = get_peft_model(framework().load_model(written.path, dtype=torch.float32), LORA)
    trained(model)
    with torch.no_grad():
        before = model.eval()(INPUT_IDS).logits
    with pytest.raises(ValueError, match="Cannot merge LORA layers when the model is gptq quantized"):
        model.merge_and_unload()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    for safe in (True, False):
        with pytest.raises(AttributeError, match="nothing can be merged into it"):
            layer.merge(safe_merge=safe)
    assert not layer.merged
    with torch.no_grad():
        assert torch.equal(model(INPUT_IDS).logits, before)


@pytest.mark.parametrize(
    "variant", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}]
)
def test_adapters_that_start_from_the_weight_are_refused(
    variant: dict[str, Any], write_gptq: Callable[..., Any]
) -> None:
    base = framework().load_model(write_gptq().path, dtype=torch.float32)
    with pytest.raises((AttributeError, TypeError), match=r"GptqLinear|StoredWeight"):
        get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], **variant))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_kernels_product_is_that_of_the_dense_weight(bits: int, act_order: bool) -> None:
    layer = layer_of(bits, act_order=act_order, dtype=torch.bfloat16).cuda()
    x = x_of(torch.bfloat16, 3, 5).detach().cuda().requires_grad_()
    y = layer(x)
    weight = layer_of(bits, act_order=act_order).dequantize(torch.bfloat16).cuda()
    assert torch.equal(y, F.linear(x, weight))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.ones_like(y) @ weight)
