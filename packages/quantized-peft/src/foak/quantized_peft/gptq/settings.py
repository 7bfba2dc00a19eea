"""How a GPTQ checkpoint says that it is stored: `quantize_config.json`, or `quantization_config` in `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foak.core.errors import UnsupportedError
from foak.kernels.gptq import BITS
from foak.quantized_peft.gptq.errors import CheckpointError

__all__ = ["LayerSettings", "Settings", "read_settings"]

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_SKIP, _KEEP = "-:", "+:"
_SERVED_OVERRIDES = {"bits", "group_size", "sym", "desc_act"}
_STORED_OTHERWISE = {
    "adapter",
    "format",
    "checkpoint_format",
    "lora",
    "method",
    "pack_dtype",
    "quant_method",
    "rotation",
}


@dataclass(frozen=True)
class LayerSettings:
    """How one layer is stored.

    Attributes:
        bits: the width of a code.
        group_size: inputs that share a scale; -1 for all.
        sym: whether every zero is the middle code.
        desc_act: whether groups are made of inputs in an order of their own (act-order).
    """

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


@dataclass(frozen=True)
class Settings:
    """How a checkpoint is stored.

    Attributes:
        default: what holds for each layer.
        zero_offset: 1 where zeros are stored less one (version 1 of the format), 0 where they are stored as they are.
        by_gptqmodel: whether GPTQModel wrote it. It takes the one from a whole word of zeros, not from each, so that a
            zero of 0 borrows from its neighbour.
        overrides: GPTQModel's `dynamic`: patterns of layer names, each with what is different there; None: the layers
            are not quantized.
        origin: where this was read, for messages.
        written: the mapping as it was read.
    """

    default: LayerSettings
    zero_offset: int
    by_gptqmodel: bool
    overrides: tuple[tuple[re.Pattern[str], Mapping[str, Any] | None], ...]
    origin: str
    written: Mapping[str, Any]

    def of(self, layer: str) -> LayerSettings | None:
        """What holds for the layer of that name: the first pattern that matches its beginning decides; None: plain."""
        for pattern, changes in self.overrides:
            if pattern.match(layer):
                return None if changes is None else _layer_settings({**self.written, **changes}, self.origin)
        return self.default


def read_settings(written: Mapping[str, Any], origin: str) -> Settings:
    """Reads and checks the settings of a checkpoint.

    Args:
        written: the mapping.
        origin: its file and key, for messages.

    Raises:
        CheckpointError: a value that no checkpoint of this kind has.
        UnsupportedError: a kind of checkpoint that is not served.
    """
    method = written.get("quant_method", written.get("method", "gptq"))
    if method != "gptq":
        raise UnsupportedError(
            f"{origin}: quant_method is {method!r}, and peft.quantization.auto_gptq loads 'gptq' only"
        )
    stored = "marlin" if written.get("is_marlin_format") else _format(written)
    if stored not in _ZERO_OFFSETS:
        raise UnsupportedError(
            f"{origin}: checkpoint_format is {stored!r}, a layout for one kernel; served are 'gptq' and 'gptq_v2', "
            "into which GPTQModel can convert it"
        )
    for key, plain in (("pack_dtype", "int32"), ("rotation", None), ("adapter", None)):
        value = written.get(key) or plain
        if value != plain:
            allowed = f"only {plain!r} is" if plain else "checkpoints without it are"
            raise UnsupportedError(f"{origin}: {key} is {value!r}; {allowed} served")
    quantizer = (written.get("meta") or {}).get("quantizer") or ()
    names = [quantizer] if isinstance(quantizer, str) else quantizer
    return Settings(
        default=_layer_settings(written, origin),
        zero_offset=_ZERO_OFFSETS[stored],
        by_gptqmodel=any(str(name).startswith("gptqmodel:") for name in names),
        overrides=tuple(_override(key, value, origin) for key, value in (written.get("dynamic") or {}).items()),
        origin=origin,
        written=written,
    )


def _format(written: Mapping[str, Any]) -> Any:
    return written.get("checkpoint_format") or written.get("format") or "gptq"


def _override(key: str, changes: Any, origin: str) -> tuple[re.Pattern[str], Mapping[str, Any] | None]:
    try:
        pattern = re.compile(key.removeprefix(_SKIP).removeprefix(_KEEP))
    except re.error as error:
        raise CheckpointError(f"{origin}: dynamic has the pattern {key!r}, which is not one: {error}") from error
    if key.startswith(_SKIP):
        return pattern, None
    if not isinstance(changes, Mapping):
        raise CheckpointError(f"{origin}: dynamic[{key!r}] is {changes!r}; it must be a mapping")
    other = sorted(_STORED_OTHERWISE.intersection(name for name, value in changes.items() if value))
    if other:
        raise UnsupportedError(
            f"{origin}: dynamic[{key!r}] changes {', '.join(other)}; served are changes of "
            f"{', '.join(sorted(_SERVED_OVERRIDES))}"
        )
    return pattern, {name: value for name, value in changes.items() if name in _SERVED_OVERRIDES}


def _layer_settings(written: Mapping[str, Any], origin: str) -> LayerSettings:
    bits, group_size = written.get("bits"), written.get("group_size", -1)
    if isinstance(bits, bool) or bits not in BITS:
        raise CheckpointError(f"{origin}: bits is {bits!r}; there are layers of 2, 3, 4 and 8 bits")
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size == 0 or group_size < -1:
        raise CheckpointError(f"{origin}: group_size is {group_size!r}; it is at least 1, or -1 for a single group")
    return LayerSettings(int(bits), group_size, bool(written.get("sym", True)), bool(written.get("desc_act", False)))
