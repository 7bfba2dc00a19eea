"""Finds the installed plugins through the entry-point group `foak.plugins`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from foak.core.errors import ConfigError
from foak.core.keys import Key
from foak.core.plugin import AccelerationPlugin

__all__ = ["GROUP", "InstalledPlugin", "check_declarations", "installed_plugins"]

GROUP = "foak.plugins"

# What importing a module that is broken or whose dependencies are too old or missing raises.
_IMPORT_FAILURES = (ImportError, AttributeError, SyntaxError, NameError, TypeError, ValueError, RuntimeError, OSError)


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin class, with the distribution that it comes from (None for one that was handed over in Python)."""

    plugin: type[AccelerationPlugin]
    dist: str | None = None
    version: str | None = None


def installed_plugins(entry_points: Iterable[metadata.EntryPoint] | None = None) -> list[InstalledPlugin]:
    """The plugins of every installed distribution, by `order` and then by name.

    Args:
        entry_points: the entry points to load; those of the group `foak.plugins` if None.

    Raises:
        ConfigError: an entry point cannot be imported or is no plugin; the message names its distribution.
    """
    found: dict[type[AccelerationPlugin], InstalledPlugin] = {}
    for entry_point in metadata.entry_points(group=GROUP) if entry_points is None else entry_points:
        installed = _load(entry_point)
        found.setdefault(installed.plugin, installed)  # an editable install may be listed twice
    by_name: dict[str, InstalledPlugin] = {}
    for installed in found.values():
        other = by_name.setdefault(installed.plugin.name, installed)
        if other is not installed:
            raise ConfigError(
                f"Two installed packages have a plugin named {installed.plugin.name!r}: {other.dist} and "
                f"{installed.dist}; uninstall one of them"
            )
    return sorted(found.values(), key=lambda item: (item.plugin.order, item.plugin.name))


def _load(entry_point: metadata.EntryPoint) -> InstalledPlugin:
    dist = entry_point.dist.name if entry_point.dist else None
    version = entry_point.dist.version if entry_point.dist else None
    label = f"The plugin {entry_point.name!r} ({entry_point.value}) of the package {dist or 'unknown'}"
    try:
        plugin = entry_point.load()
    except _IMPORT_FAILURES as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{label} cannot be imported ({type(error).__name__}: {reason}); reinstall or uninstall {dist or 'it'}"
        ) from error
    if not (isinstance(plugin, type) and issubclass(plugin, AccelerationPlugin)):
        raise ConfigError(f"{label} is not a subclass of foak.core.AccelerationPlugin")
    check_declarations(plugin, label)
    return InstalledPlugin(plugin, dist, version)


def check_declarations(plugin: type[AccelerationPlugin], label: str = "") -> None:
    """Checks the class attributes of a plugin, so that a mistake shows where it is made.

    Raises:
        ConfigError: the name is empty, or a declaration is not what `AccelerationPlugin` says.
    """
    label = label or f"The plugin {plugin.__module__}.{plugin.__qualname__}"
    if not isinstance(plugin.name, str) or not plugin.name:
        raise ConfigError(f"{label} has no name; set the class attribute `name`")
    for attribute in ("all_of", "any_of", "requires"):
        value = getattr(plugin, attribute)
        if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
            raise ConfigError(f"{label} must declare `{attribute}` as a tuple of texts")
    paths = {*plugin.all_of, *plugin.any_of}
    for key in plugin.keys:
        if not isinstance(key, Key) or not key.name or "." in key.name or not key.allowed:
            raise ConfigError(f"{label} must declare `keys` as a tuple of Key with a name without dots and `allowed`")
        strangers = set(key.under) - paths
        if strangers:
            raise ConfigError(
                f"{label} declares the key {key.name!r} under paths it does not have: {sorted(strangers)}"
            )
