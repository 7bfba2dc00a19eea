"""The plugin: which kernels a configuration switches on, and what that means for a model and a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from foak.core import AccelerationPlugin, ConfigError, UnsupportedError
from foak.core.plugin import Key, Section
from foak.fast_kernels.checkpointing import limit, setup
from foak.fast_kernels.lora.shared_input import ATTRIBUTE as SHARED_INPUT
from foak.fast_kernels.loss.head import LAZY_WITHOUT_LABELS
from foak.fast_kernels.loss.label_smoothing import FusedLabelSmoother
from foak.fast_kernels.rules import activation, lora, loss, norm, rope

if TYPE_CHECKING:
    from torch import nn

_TRAINING = "training.fused_ops_and_kernels"
_QUANTIZED = "peft.quantization.fused_ops_and_kernels"
_CHECKPOINTING = "training.activation_checkpointing"
_KERNELS = (_TRAINING, _QUANTIZED)
_SWITCH = (True, False, "auto")
_WITHOUT_LOGITS = ("fused_linear", "fused_ce_liger", "auto")


class FastKernelsPlugin(AccelerationPlugin):
    """Fused norms, rotary embedding, activations and losses for every architecture that has them.

    A switch is ``true`` (asked for by name: a model that has nothing of the kind is refused), ``auto`` (where it fits)
    or ``false``.
    """

    name: ClassVar[str] = "fast-kernels"
    any_of: ClassVar[tuple[str, ...]] = (*_KERNELS, _CHECKPOINTING)
    order: ClassVar[int] = 200
    keys: ClassVar[tuple[Key, ...]] = (
        Key(
            "fast_loss",
            (True, False, "auto", "fused_linear", "fused_ce_liger"),
            "true: fast cross entropy over real logits; fused_linear (or fused_ce_liger): no logits at all",
            False,
            _KERNELS,
        ),
        Key("fast_rms_layernorm", _SWITCH, "RMSNorm and LayerNorm", False, _KERNELS),
        Key("fast_rope_embeddings", _SWITCH, "rotary position embedding", False, _KERNELS),
        Key("fast_activation", _SWITCH, "SwiGLU and GeGLU of gated MLPs", False, _KERNELS),
        Key("fused_lora", _SWITCH, "LoRA layers: base and adapter in one product, rounded once", False, _KERNELS),
        Key("base_layer", ("bitsandbytes", "auto_gptq"), "the quantization of the base", None, under=(_QUANTIZED,)),
        Key(
            "budget",
            (float, str),
            "GiB that a step may allocate: layers keep their activations as far as it reaches; auto: at no cost",
            under=(_CHECKPOINTING,),
        ),
    )

    @classmethod
    def from_config(cls, section: Section) -> Self:
        """Check the budget.

        Raises:
            ConfigError: it is no amount of memory.
        """
        budget = section.get("budget")
        if budget is not None:
            try:
                limit.parse_limit(budget)
            except ValueError as error:
                where = section.source or "configuration"
                raise ConfigError(
                    f"{where}: {section.key('budget')} is {budget!r}; allowed: {limit.ALLOWED}"
                ) from error
        return cls(section)

    def augment(self, model: nn.Module, train_args: Any, peft_config: Any) -> None:
        """Add the rules of every kernel that is switched on."""
        self._check_base_layer(model)
        mode = self._get("fast_loss")
        if mode:
            mode = True if mode is True else "fused_linear"
            for rule in loss.rules(model, mode, self._key("fast_loss")):
                self.patcher.add(rule)
        for name, make in (
            ("fast_rms_layernorm", norm.rules),
            ("fast_rope_embeddings", rope.rules),
            ("fast_activation", activation.rules),
        ):
            if self._get(name):
                for rule in make(self._key(name)):
                    self.patcher.add(rule)
        if self._get("fused_lora"):
            for rule in lora.rules(self._key("fused_lora")):
                self.patcher.add(rule)
            for layer, group in lora.shared_inputs(model):
                self.patcher.set_attribute(layer, SHARED_INPUT, group)
        if self._get("budget") is not None:
            amount = limit.parse_limit(self._get("budget"))
            setup.add_budget(self.patcher, model, train_args, amount, self.section.key("budget"))

    def prepare(self, trainer: Any) -> None:
        """Serve label smoothing and a loss function of the user's, which compute the loss from the model's logits."""
        if self._get("budget") is not None:
            setup.check_trainer(trainer, self.section.key("budget"))
        if self._get("fast_loss") not in _WITHOUT_LOGITS:
            return
        smoother = getattr(trainer, "label_smoother", None)
        if smoother is not None:
            self.patcher.set_attribute(trainer, "label_smoother", FusedLabelSmoother(smoother))
        if smoother is not None or getattr(trainer, "compute_loss_func", None) is not None:
            self.patcher.set_attribute(loss.language_model(trainer.model), LAZY_WITHOUT_LABELS, True)

    @classmethod
    def diagnose(cls) -> list[tuple[str, str]]:
        """Rows for ``foak doctor``: which form of the kernels runs on a GPU's and on a CPU's tensors, and why."""
        from foak.kernels.backend import explain

        return [(f"{device} tensors", explain(device).removeprefix(f"{device}: ")) for device in ("cuda", "cpu")]

    def _get(self, name: str) -> Any:
        return self.section.get(name)

    def _key(self, name: str) -> str | None:
        """The key by which a kernel was asked for by name; None under ``auto``."""
        return None if self._get(name) == "auto" else self.section.key(name)

    def _check_base_layer(self, model: nn.Module) -> None:
        wanted = self._get("base_layer")
        if wanted is None:
            return
        found = {kind for module in model.modules() if (kind := _quantization_of(module)) is not None}
        if wanted in found:
            return
        problem = (
            f"{self.section.key('base_layer')} is {wanted}, but the model has no {wanted} layer"
            + (f" (it has {', '.join(sorted(found))})" if found else "")
            + f": load it quantized, or use {_TRAINING} for an unquantized model."
        )
        if any(parameter.is_meta for parameter in model.parameters()):  # looked at without its weights: not loaded yet
            self.patcher.report.notes.append(problem)
            return
        raise UnsupportedError(problem)


def _quantization_of(module: nn.Module) -> str | None:
    package = type(module).__module__.partition(".")[0]
    if package == "bitsandbytes":
        return "bitsandbytes"
    return "auto_gptq" if hasattr(module, "qweight") and hasattr(module, "qzeros") else None
