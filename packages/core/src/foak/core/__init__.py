"""foak's framework: configuration, plugins, the model patcher and the command line.

Importing this package does nothing but define names; each is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foak.core._version import __version__

if TYPE_CHECKING:
    from foak.core.errors import ConfigError, UnsupportedError
    from foak.core.framework import AccelerationFramework
    from foak.core.patching import ModelPatcher, NotApplicable, Rule
    from foak.core.plugin import AccelerationPlugin, Key, Section
    from foak.core.report import PatchRecord, PatchReport

__all__ = [
    "AccelerationFramework",
    "AccelerationPlugin",
    "ConfigError",
    "Key",
    "ModelPatcher",
    "NotApplicable",
    "PatchRecord",
    "PatchReport",
    "Rule",
    "Section",
    "UnsupportedError",
    "__version__",
]

_HOMES = {
    "AccelerationFramework": "framework",
    "AccelerationPlugin": "plugin",
    "ConfigError": "errors",
    "Key": "plugin",
    "ModelPatcher": "patching",
    "NotApplicable": "patching",
    "PatchRecord": "report",
    "PatchReport": "report",
    "Rule": "patching",
    "Section": "plugin",
    "UnsupportedError": "errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
