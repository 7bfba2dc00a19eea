"""Faults in the kernels, in their plain twins, and in what decodes quantized weights."""

from __future__ import annotations

from mutation import Mutation

NORMS = (
    Mutation(
        "RMSNorm kernel: another epsilon",
        "kernels/rms_norm/triton.py",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)",
        "rstd = tl.rsqrt(tl.sum(x * x, axis=1) / H + 10 * eps)",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm twin: another epsilon",
        "kernels/rms_norm/reference.py",
        "wide.square().mean(-1, keepdim=True) + eps)",
        "wide.square().mean(-1, keepdim=True) + 10 * eps)",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm twin: rounded before the weight",
        "kernels/rms_norm/reference.py",
        "return (normed * scale).to(",
        "return (normed.to(x.dtype) * scale).to(",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm kernel: the weight gets no gradient",
        "kernels/rms_norm/triton.py",
        "return dx, sum_partials(partial, weight.dtype) if needs_dw else None, None, None",
        "return dx, None, None, None",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm kernel: the weight is left out of the input's gradient",
        "kernels/rms_norm/triton.py",
        "            g = dy * scale[None, :]\n",
        "            g = dy\n",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm kernel: a mean over the tile, not the row",
        "kernels/rms_norm/triton.py",
        "mean = tl.sum(g * x_hat, axis=1) / H",
        "mean = tl.sum(g * x_hat, axis=1) / BLOCK_H",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "RMSNorm kernel: long rows keep the last part of the weight's gradient",
        "kernels/rms_norm/triton.py",
        "dw = tl.load(partial_row + columns, mask=mask, other=0.0) + dy * x_hat",
        "dw = dy * x_hat",
        ("kernels/test_rms_norm.py",),
    ),
    Mutation(
        "LayerNorm kernel: the mean's part of the gradient is dropped",
        "kernels/layer_norm/triton.py",
        "dx = rstd * (g - x_hat * along[:, None] - mean[:, None])",
        "dx = rstd * (g - x_hat * along[:, None])",
        ("kernels/test_layer_norm.py",),
    ),
    Mutation(
        "LayerNorm kernel: the variance counts what fills the tile",
        "kernels/layer_norm/triton.py",
        "centred = tl.where(mask, x - mean[:, None], 0.0)",
        "centred = x - mean[:, None]",
        ("kernels/test_layer_norm.py",),
    ),
)

ROPE_AND_ACTIVATIONS = (
    Mutation(
        "RoPE kernel: the backward rotates forwards",
        "kernels/rope/triton.py",
        "sin_low, sin_high = -sin_high, -sin_low",
        "sin_low, sin_high = sin_high, sin_low",
        ("kernels/test_rope.py",),
    ),
    Mutation(
        "RoPE kernel: one half of the table stands for both",
        "kernels/rope/triton.py",
        "y_high = high * cos_high[None, :] + low * sin_high[None, :]",
        "y_high = high * cos_low[None, :] + low * sin_low[None, :]",
        ("kernels/test_rope.py::test_halves_of_cos_that_differ",),
    ),
    Mutation(
        "RoPE kernel: every row has the positions of the first",
        "kernels/rope/triton.py",
        "offset = batch * cos_batch_stride + position * cos_position_stride",
        "offset = position * cos_position_stride",
        ("kernels/test_rope.py",),
    ),
    Mutation(
        "RoPE kernel: what a partial rotation passes on is lost",
        "kernels/rope/triton.py",
        "tl.store(y_heads + rest, passed.to(",
        "tl.store(y_heads + rest, (passed * 0.0).to(",
        ("kernels/test_rope.py::test_head_sizes_and_counts",),
    ),
    Mutation(
        "RoPE twin: the sign of the sine is on the wrong half",
        "kernels/rope/reference.py",
        "torch.cat((-wide_sin[..., :half], wide_sin[..., half:]), dim=-1)",
        "torch.cat((wide_sin[..., :half], -wide_sin[..., half:]), dim=-1)",
        ("kernels/test_rope.py",),
    ),
    Mutation(
        "SwiGLU kernel: the sigmoid's slope is wrong",
        "kernels/swiglu/triton.py",
        "dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))",
        "dgate = dy * up * sigmoid * (1.0 + gate * sigmoid)",
        ("kernels/test_swiglu.py",),
    ),
    Mutation(
        "GeGLU kernel: the cubic term is forgotten in the slope",
        "kernels/geglu/triton.py",
        "(1.0 + 0.134145 * square)",
        "(1.0 + 0.044715 * square)",
        ("kernels/test_geglu.py",),
    ),
    Mutation(
        "GeGLU kernel: the gate's own derivative is forgotten",
        "kernels/geglu/triton.py",
        "dgate = dy * up * (p + gate * slope)",
        "dgate = dy * up * p",
        ("kernels/test_geglu.py",),
    ),
    Mutation(
        "GeGLU twin: always the exact form",
        "kernels/geglu/reference.py",
        "approximate=approximate",
        'approximate="none"',
        ("kernels/test_geglu.py",),
    ),
)

LOSSES = (
    Mutation(
        "cross entropy kernel: the soft cap has no gradient",
        "kernels/cross_entropy/triton.py",
        "slope = bend * logit_scale",
        "slope = logit_scale",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy kernel: the scale has no gradient",
        "kernels/cross_entropy/triton.py",
        "    slope = logit_scale\n",
        "    slope = 1.0\n",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy kernel: one minus the probability, by subtraction",
        "kernels/cross_entropy/triton.py",
        "miss = rest / mass",
        "miss = 1.0 - own / mass",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy kernel: smoothing is left out of the gradient",
        "kernels/cross_entropy/triton.py",
        "floor = d_loss * smoothing / vocab_size",
        "floor = d_loss * 0.0 / vocab_size",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy kernel: half of the z-loss's gradient",
        "kernels/cross_entropy/triton.py",
        "growth = 2.0 * z_loss * lse",
        "growth = z_loss * lse",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy kernel: ignored tokens have a gradient",
        "kernels/cross_entropy/triton.py",
        "        _write_zeros(gradient_ptr, vocab_size, BLOCK)\n        return\n    label = tl.where((label >= 0)",
        "        label = tl.cast(0, tl.int64)\n    label = tl.where((label >= 0)",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "cross entropy twin: the soft cap has no gradient",
        "kernels/cross_entropy/plain.py",
        "return (z / options.softcap).square_().neg_().add_(1.0)",
        "return torch.ones_like(z)",
        ("kernels/test_cross_entropy.py",),
    ),
    Mutation(
        "losses: num_items_in_batch is ignored",
        "kernels/cross_entropy/options.py",
        "        divisor = num_items_in_batch\n",
        "        divisor = kept\n",
        ("kernels/test_cross_entropy.py::test_num_items_in_batch",),
    ),
    Mutation(
        "losses: a batch without labels is 0 / 0",
        "kernels/cross_entropy/options.py",
        "return losses / max(divisor, 1)",
        "return losses / divisor",
        ("kernels/test_cross_entropy.py::test_all_labels_ignored",),
    ),
    Mutation(
        "loss without logits: the head's gradient is rounded after each chunk",
        "kernels/linear_cross_entropy/head_gradient.py",
        "total.add_(part @ hidden)",
        "total.copy_((total + part @ hidden).to(part.dtype))",
        ("kernels/test_linear_cross_entropy.py::test_chunks_of_sixteen_bits_are_summed_in_fp32",),
    ),
    Mutation(
        "loss without logits: what flows into the loss is ignored",
        "kernels/linear_cross_entropy/autograd.py",
        "found = Gradients(*(_scaled(gradient, loss_gradient) for gradient in early))",
        "found = Gradients(*early)",
        ("kernels/test_linear_cross_entropy.py",),
    ),
)

LORA = (
    Mutation(
        "LoRA: the 1 / (1 - p) is forgotten",
        "kernels/lora/autograd.py",
        "else self.scaling / (1 - p)",
        "else self.scaling",
        ("kernels/test_lora.py",),
    ),
    Mutation(
        "LoRA: the scaling is forgotten",
        "kernels/lora/autograd.py",
        "return self.scaling if p == 0 else 0.0 if p >= 1 else self.scaling / (1 - p)",
        "return 1.0 if p == 0 else 0.0 if p >= 1 else 1.0 / (1 - p)",
        ("kernels/test_lora.py",),
    ),
    Mutation(
        "LoRA twin: an adapter drops what its sibling drops",
        "kernels/lora/reference.py",
        "product = _wide(_masked(x, index, p, seed))",
        "product = _wide(_masked(x, 0, p, seed))",
        ("kernels/test_lora.py",),
    ),
    Mutation(
        "LoRA twin: the backward forgets what was dropped",
        "kernels/lora/reference.py",
        ".t() @ _wide(_masked(x, index, p, seed))",
        ".t() @ _wide(x)",
        ("kernels/test_lora.py",),
    ),
    Mutation(
        "LoRA twin: the sum is rounded twice",
        "kernels/lora/reference.py",
        "y = _wide(x).reshape(-1, x.shape[-1]) @ _wide(weight).t()",
        "y = _wide((_wide(x).reshape(-1, x.shape[-1]) @ _wide(weight).t()).to(x.dtype))",
        ("kernels/test_lora.py",),
    ),
    Mutation(
        "LoRA masks: kept and dropped are exchanged",
        "kernels/lora/dropout.py",
        "return numbers[:, :columns] >= threshold_of(p)",
        "return numbers[:, :columns] < threshold_of(p)",
        ("kernels/test_lora_autograd.py::test_masks_keep_the_right_share",),
    ),
    Mutation(
        "LoRA masks: all adapters have one",
        "kernels/lora/dropout.py",
        "torch.full_like(row, stream)",
        "torch.zeros_like(row)",
        ("kernels/test_lora_autograd.py::test_masks_of_adapters_seeds_and_rows_differ",),
    ),
    Mutation(
        "LoRA masks: the generator does not decide",
        "kernels/lora/dropout.py",
        'return int(torch.randint(2**62, (), device="cpu").item())',
        "return 1234",
        ("kernels/test_lora_autograd.py::test_the_generator_decides",),
    ),
)

DECODERS = (
    Mutation(
        "NF4 twin: the two values of a byte are exchanged",
        "kernels/nf4/reference.py",
        "torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)",
        "torch.stack((code.repeat(16), code.repeat_interleave(16)), dim=1)",
        ("kernels/test_nf4.py",),
    ),
    Mutation(
        "NF4 twin: the offset of nested scales is forgotten",
        "kernels/nf4/reference.py",
        " * groups + nested.offset",
        " * groups",
        ("kernels/test_nf4.py",),
    ),
    Mutation(
        "NF4 kernel: the offset of nested scales is forgotten",
        "kernels/nf4/triton.py",
        "scale = product + tl.load(offset_ptr)",
        "scale = product + 0.0 * tl.load(offset_ptr)",
        ("kernels/test_nf4.py",),
    ),
    Mutation(
        "4-bit layers: the table of quantiles is upside down",
        "quantized_peft/bitsandbytes/layers.py",
        "packed, state.absmax, state.code, state.shape",
        "packed, state.absmax, state.code.flip(0), state.shape",
        ("quantized_peft/test_bitsandbytes_layers.py",),
    ),
    Mutation(
        "GPTQ twin: zeros are taken as they are stored",
        "kernels/gptq/reference.py",
        "(_fields(qzeros, bits, scales.shape[1]) + zero_offset)",
        "_fields(qzeros, bits, scales.shape[1])",
        ("kernels/test_gptq.py",),
    ),
    Mutation(
        "GPTQ twin: a zero beyond the bits stays there",
        "kernels/gptq/reference.py",
        ".bitwise_and_(2**bits - 1)\n    if g_idx is None",
        "\n    if g_idx is None",
        ("kernels/test_gptq.py",),
    ),
    Mutation(
        "GPTQ kernel: zeros are taken as they are stored",
        "kernels/gptq/triton.py",
        "(found.to(tl.int32) + zero_offset)",
        "found.to(tl.int32)",
        ("kernels/test_gptq.py",),
    ),
    Mutation(
        "GPTQ layers: the order of act-order is ignored",
        "quantized_peft/gptq/layer.py",
        "return None if self._in_order else self.g_idx",
        "return None",
        ("quantized_peft/test_gptq_layer.py",),
    ),
    Mutation(
        "GPTQ layers: the bias is dropped",
        "quantized_peft/gptq/layer.py",
        "return F.linear(x, _decode(stored, ctx.form, x.dtype, reading), bias)",
        "return F.linear(x, _decode(stored, ctx.form, x.dtype, reading))",
        ("quantized_peft/test_gptq_layer.py",),
    ),
)

MUTATIONS = NORMS + ROPE_AND_ACTIVATIONS + LOSSES + LORA + DECODERS
