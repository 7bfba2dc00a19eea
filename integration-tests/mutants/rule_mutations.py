"""Faults in what surrounds the kernels: patching, rules, losses, adapters, packing, saving."""

from __future__ import annotations

from mutation import Mutation

PATCHING = (
    Mutation(
        "verification: whatever is not far off stays",
        "core/patching/verify.py",
        "if not new_error <= max(SLACK * old_error, floor):",
        "if not new_error <= FARTHEST:",
        ("core/test_verify.py",),
    ),
    Mutation(
        "verification: gradients are not compared",
        "core/patching/verify.py",
        "return Trial([t.detach() for t in outputs], list(gradients))",
        "return Trial([t.detach() for t in outputs], [None] * len(leaves))",
        ("core/test_verify.py",),
    ),
    Mutation(
        "patcher: restore() forgets one forward",
        "core/patching/patcher.py",
        "while self._bound:",
        "while len(self._bound) > 1:",
        ("core/test_patcher.py",),
    ),
    Mutation(
        "patcher: an attribute stays after restore()",
        "core/patching/patcher.py",
        "                del owner.__dict__[name]\n",
        "                pass\n",
        ("core/test_patcher.py",),
    ),
    Mutation(
        "patcher: of two rules for one forward the second wins",
        "core/patching/patcher.py",
        '            if plan.replaced_by:\n                return f"the forward is replaced already',
        '            if False:\n                return f"the forward is replaced already',
        ("core/test_patcher.py",),
    ),
    Mutation(
        "binding: the class is patched, not the instance",
        "core/patching/binding.py",
        "module.__dict__[slot] = types.MethodType(function, module)",
        "setattr(type(module), slot, function)",
        ("core/test_patcher.py",),
    ),
    Mutation(
        "binding: what somebody has wrapped goes on computing",
        "core/patching/binding.py",
        'layer.__globals__["_implementation"] = _call_inner if wraps else self.previous_function',
        "assert wraps is not None",
        ("core/test_patcher.py",),
    ),
    Mutation(
        "binding: the signature is lost, so that Trainer divides by the accumulation steps once more",
        "core/patching/binding.py",
        "    functools.update_wrapper(function, like)\n",
        "",
        ("core/test_patcher.py",),
    ),
    Mutation(
        "guards: a wrapped model is taken",
        "core/guards.py",
        '    _check_prepared(model)\n    if getattr(model, "config", None) is None:',
        '    if getattr(model, "config", None) is None:',
        ("core/test_guards.py",),
    ),
)

MODELS = (
    Mutation(
        "loss: labels are not shifted",
        "fast_kernels/loss/causal_lm.py",
        "F.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "labels",
        ("fast_kernels/test_architectures.py::test_loss_and_every_gradient",),
    ),
    Mutation(
        "loss: labels are shifted the other way",
        "fast_kernels/loss/causal_lm.py",
        "F.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "F.pad(labels, (1, 0), value=ignore_index)[..., :-1]",
        ("fast_kernels/test_architectures.py::test_loss_and_every_gradient",),
    ),
    Mutation(
        "loss without logits: num_items_in_batch is ignored",
        "fast_kernels/loss/causal_lm.py",
        'LossCall(targets, ignore_index, "mean", num_items_in_batch)',
        'LossCall(targets, ignore_index, "mean", None)',
        ("integration/trainer/test_trainer.py::test_curves[accumulation]",),
    ),
    Mutation(
        "loss over real logits: num_items_in_batch is ignored",
        "fast_kernels/loss/causal_lm.py",
        "ignore_index=ignore_index, num_items_in_batch=num_items_in_batch)",
        "ignore_index=ignore_index)",
        ("fast_kernels/test_patching_models.py::test_ways_to_call",),
    ),
    Mutation(
        "loss without logits: label smoothing is ignored",
        "fast_kernels/loss/label_smoothing.py",
        "                self.epsilon,\n",
        "                0.0,\n",
        ("integration/trainer/test_trainer.py::test_curves[label smoothing]",),
    ),
    Mutation(
        "loss without logits: a division of the logits is forgotten",
        "fast_kernels/loss/recorded.py",
        'op=("scale", 1.0 / number)',
        'op=("scale", 1.0)',
        ("fast_kernels/test_architectures.py::test_loss_and_every_gradient",),
    ),
    Mutation(
        "loss without logits: the head is not trained",
        "fast_kernels/loss/request.py",
        "weight, bias = head.weight, head.bias",
        "weight, bias = head.weight.detach(), head.bias",
        ("fast_kernels/test_architectures.py::test_loss_and_every_gradient",),
    ),
    Mutation(
        "loss without logits: logits are read from weights that have changed",
        "fast_kernels/loss/request.py",
        "        self.state.check(head, values=self.loss is None)\n",
        "",
        ("fast_kernels/test_lazy_logits.py::test_reading_after_the_head_has_changed_is_an_error",),
    ),
    Mutation(
        "norms: the weight's distance from one is forgotten",
        "fast_kernels/rules/norm.py",
        "y = rms_norm(x, weight, eps, self.offset)",
        "y = rms_norm(x, weight, eps)",
        ("fast_kernels/test_norms.py",),
    ),
    Mutation(
        "norms: epsilon is that of the first call",
        "fast_kernels/rules/norm.py",
        "eps = getattr(norm, self.eps)",
        "eps = norm.__dict__.setdefault('_seen', getattr(norm, self.eps))",
        ("fast_kernels/test_norms.py::test_eps_and_weight_are_read_when_called",),
    ),
    Mutation(
        "norms: an fp32 norm in a bf16 model gives bf16",
        "fast_kernels/rules/norm.py",
        'return y.to(x.dtype if self.dtype == "input" else weight.dtype)',
        "return y.to(x.dtype)",
        ("fast_kernels/test_norms.py",),
    ),
    Mutation(
        "activations: any gated MLP is taken for a SwiGLU",
        "fast_kernels/rules/activation.py",
        "_MATCH = 1e-9",
        "_MATCH = 1e9",
        ("fast_kernels/test_activations.py",),
    ),
)

ADAPTERS = (
    Mutation(
        "LoRA: a base that trains after apply gets no gradient",
        "fast_kernels/lora/forward.py",
        "    if weight.requires_grad or (bias is not None and bias.requires_grad):\n        return None\n",
        "",
        ("fast_kernels/test_lora_precision.py",),
    ),
    Mutation(
        "LoRA: a sibling's own precision is ignored",
        "fast_kernels/lora/forward.py",
        "if other is not None and other[1] == precision:",
        "if other is not None:",
        ("fast_kernels/test_lora_precision.py",),
        (("*versions, member.scaling, member.dropout_p, precision", "*versions, member.scaling, member.dropout_p"),),
    ),
    Mutation(
        "LoRA: cast_input_dtype_enabled is ignored",
        "fast_kernels/lora/forward.py",
        " or not layer.cast_input_dtype_enabled",
        "",
        ("fast_kernels/test_lora_precision.py::test_an_input_that_peft_would_not_cast_is_not_cast",),
    ),
    Mutation(
        "LoRA: dropout goes on in evaluation",
        "fast_kernels/lora/forward.py",
        "type(dropout) is nn.Dropout and dropout.training",
        "type(dropout) is nn.Dropout",
        ("fast_kernels/test_fused_lora.py::test_dropout_is_off_in_evaluation",),
    ),
    Mutation(
        "LoRA: a disabled adapter goes on",
        "fast_kernels/lora/forward.py",
        " or layer.disable_adapters or layer.merged",
        " or layer.merged",
        ("fast_kernels/test_peft.py::test_switching_disabling_and_merging",),
    ),
    Mutation(
        "LoRA: a merged adapter counts twice",
        "fast_kernels/lora/forward.py",
        " or layer.disable_adapters or layer.merged",
        " or layer.disable_adapters",
        ("fast_kernels/test_peft.py::test_switching_disabling_and_merging",),
    ),
    Mutation(
        "LoRA: a promise is taken by a layer that has changed",
        "fast_kernels/lora/shared_input.py",
        "return promise if kept_in == state else None",
        "return promise",
        ("fast_kernels/test_fused_lora.py::test_a_promise_is_not_taken_when_the_layer_has_changed",),
    ),
    Mutation(
        "LoRA: a promise is taken for an input that has changed",
        "fast_kernels/lora/shared_input.py",
        " or self._circumstances != _circumstances(x)",
        "",
        ("fast_kernels/test_fused_lora.py::test_a_promise_is_not_taken_when_the_layer_has_changed",),
    ),
    Mutation(
        "LoRA: a frozen weight may change before the backward",
        "fast_kernels/lora/forward.py",
        '        if _version_of(tensor_of(base, "weight")) != version:\n',
        "        if version == -1:\n",
        ("fast_kernels/test_fused_lora.py::test_a_frozen_weight_that_changes_before_the_backward_is_an_error",),
    ),
    Mutation(
        "LoRA: a hook on a part of the layer is not called",
        "fast_kernels/lora/forward.py",
        'any(has_hooks(module) or "forward" in module.__dict__ for module in modules)',
        'any("forward" in module.__dict__ for module in modules)',
        ("fast_kernels/test_fused_lora.py::test_hooks_and_replaced_parts_are_called",),
    ),
    Mutation(
        "4-bit layers: products run in the input's dtype, whatever compute_dtype says",
        "quantized_peft/bitsandbytes/layers.py",
        "return x.dtype if given is None else given",
        "return x.dtype",
        ("quantized_peft/test_bitsandbytes_layers.py",),
    ),
)

PACKING = (
    Mutation(
        "packing: a batch is one sequence, whose tokens see their neighbours",
        "padding_free/collator.py",
        "flat = self._pack(lengths[lengths > 0].tolist())",
        "flat = self._pack([int(lengths.sum())])",
        ("padding_free/test_collator.py", "padding_free/test_model.py"),
    ),
    Mutation(
        "packing: positions do not restart",
        "padding_free/packed.py",
        " - starts[self.sequence_ids[0].long()])[None]",
        " - 0 * starts[self.sequence_ids[0].long()])[None]",
        ("padding_free/test_packed.py",),
    ),
    Mutation(
        "packing: a sequence's first token is learned from the one before it",
        "padding_free/collator.py",
        "            labels[0, flat[PACKED].cu_seqlens[:-1].long()] = _IGNORED\n",
        "",
        ("padding_free/test_collator.py", "padding_free/test_model.py"),
    ),
    Mutation(
        "packing: a sliding window is ignored",
        "padding_free/masks.py",
        "return PackedMask(packed, backend, size)",
        "return PackedMask(packed, backend)",
        ("padding_free/test_model.py",),
    ),
    Mutation(
        "packing: rows go back to the wrong tokens",
        "padding_free/packed.py",
        "restore[gather[::-1]] = np.arange(len(gather))[::-1]",
        "restore[gather[::-1]] = np.arange(len(gather))",
        ("padding_free/test_packed.py",),
    ),
    Mutation(
        "multipack: the last sample of a batch is dropped",
        "padding_free/packing.py",
        "return [members for members in bins if members]",
        "return [members[:-1] or members for members in bins if members]",
        ("padding_free/test_packing.py",),
    ),
    Mutation(
        "multipack: every epoch has the batches of the first",
        "padding_free/sampler.py",
        "(self.seed, epoch, attempt)",
        "(self.seed, 0, attempt)",
        ("padding_free/test_packing.py",),
    ),
    Mutation(
        "multipack: every rank trains on the first one's batches",
        "padding_free/sampler.py",
        "yield dealt[self.rank]",
        "yield dealt[0]",
        ("padding_free/test_packing.py",),
    ),
)

RUNS = (
    Mutation(
        "saving: a checkpoint that was cut off is the last one",
        "core/train/storage.py",
        "if is_complete_checkpoint(path)), None)",
        "if path.is_dir()), None)",
        ("core/train/test_train_storage.py",),
    ),
    Mutation(
        "saving: what a failed write left stays",
        "core/train/storage.py",
        "    except BaseException:\n        if owner:\n",
        "    except BaseException:\n        if False:\n",
        ("core/train/test_train_storage.py",),
    ),
    Mutation(
        "interruption: no checkpoint at the end",
        "core/train/interrupt.py",
        'control.should_save = args.save_strategy != "no"',
        "control.should_save = False",
        ("core/train/test_train_process.py::test_a_signal_ends_the_run_with_a_whole_checkpoint",),
    ),
    Mutation(
        "configuration: an unknown key is passed over",
        "core/activation.py",
        "        if not keys:\n            raise _unknown(config, path, name, claimed)\n",
        "",
        ("core/test_activation.py",),
    ),
    Mutation(
        "configuration: of two stanzas with different values the first wins",
        "core/activation.py",
        "if key.name in written and not _same(values[key.name], value):",
        "if key.name in written and value is values:",
        ("core/test_activation.py",),
    ),
)

MUTATIONS = PATCHING + MODELS + ADAPTERS + PACKING + RUNS
