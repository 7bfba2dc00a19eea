"""Holds a configuration against the keys that plugins declare, and works out which plugins it activates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foak.core.catalog import SECTIONS, foreign_section, nearest, provider_of
from foak.core.config import Config, describe_kind, show_key
from foak.core.errors import UnsupportedError
from foak.core.keys import Key
from foak.core.plugin import AccelerationPlugin, Section, require_package

__all__ = ["activate", "check_keys", "everything_auto", "match_section"]

PluginTypes = Sequence[type[AccelerationPlugin]]


def activate(config: Config, plugins: PluginTypes) -> list[AccelerationPlugin]:
    """Makes the plugins that a configuration activates, by `order` and then by name.

    Args:
        config: what was read.
        plugins: the plugin classes to choose from.

    Raises:
        ConfigError: a key that no plugin reads, a value that is not allowed, two sections that contradict each other,
            or a package that is missing.
        UnsupportedError: two active plugins load the model, or a plugin refuses what its section asks for.
    """
    check_keys(config, plugins)
    matched: list[tuple[type[AccelerationPlugin], Section]] = []
    for plugin in sorted(plugins, key=lambda plugin: (plugin.order, plugin.name)):
        section = match_section(config, plugin)
        if section is not None:
            matched.append((plugin, section))
    loaders = [(plugin, section) for plugin, section in matched if plugin.loads]
    if len(loaders) > 1:
        (first, its_section), (second, other_section) = loaders[:2]
        raise UnsupportedError(
            f"The plugins {first.name} ({config.full_key(its_section.paths[0])}) and {second.name} "
            f"({config.full_key(other_section.paths[0])}) both load the model, and only one may; remove one section"
        )
    for plugin, section in matched:
        for package in plugin.requires:
            require_package(package, f"The plugin {plugin.name} ({config.full_key(section.paths[0])})")
    return [plugin.from_config(section) for plugin, section in matched]


def match_section(config: Config, plugin: type[AccelerationPlugin]) -> Section | None:
    """The union of the sections that activate `plugin`, with its defaults; None if the configuration does not.

    Raises:
        ConfigError: two matched sections give one key different values, or a path leads through a non-mapping.
    """
    all_of = plugin.all_of if plugin.all_of and all(config.lookup(path) is not None for path in plugin.all_of) else ()
    any_of = [path for path in plugin.any_of if config.lookup(path) is not None]
    paths = tuple(dict.fromkeys((*all_of, *any_of)))
    if not paths:
        return None
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for path in paths:
        node = config.lookup(path)
        for key in _keys_under(plugin, path):
            value = node.get(key.name)
            if value is None:
                continue
            if key.name in written and not _same(values[key.name], value):
                other = f"{written[key.name]}.{key.name}"
                raise config.error(
                    f"{path}.{key.name}",
                    f"is {describe_kind(value)}, but {config.full_key(other)} is {describe_kind(values[key.name])}; "
                    "give both the same value or remove one",
                )
            values[key.name] = value
            written.setdefault(key.name, path)
    for path in paths:
        for key in _keys_under(plugin, path):
            values.setdefault(key.name, key.default)
    return Section(values, paths, written=written, root=config.root, source=config.source)


def check_keys(config: Config, plugins: PluginTypes) -> None:
    """Checks every key and value below `plugins:` against what the plugins declare.

    Raises:
        ConfigError: a key that no plugin claims (with the nearest known one and the package that provides it), a
            section whose package is not installed, a non-mapping where a mapping belongs, or a value that is not
            allowed.
    """
    claimed: dict[str, list[type[AccelerationPlugin]]] = {}
    for plugin in plugins:
        for path in dict.fromkeys((*plugin.all_of, *plugin.any_of)):
            claimed.setdefault(path, []).append(plugin)
    _check_node(config, "", config.plugins, claimed)


def everything_auto(plugins: PluginTypes) -> dict[str, Any]:
    """A configuration (the mapping below `plugins:`) with every switch that allows `auto` set to it.

    Each plugin that does not load a model appears once, under the first path that has such switches.
    """
    tree: dict[str, Any] = {}
    for plugin in plugins:
        if plugin.loads:
            continue
        for path in plugin.any_of:
            switches = {key.name: "auto" for key in _keys_under(plugin, path) if "auto" in key.allowed}
            if switches:
                node = tree
                for part in path.split("."):
                    node = node.setdefault(part, {})
                node.update(switches)
                break
    return tree


def _check_node(
    config: Config, path: str, node: Mapping[str, Any], claimed: Mapping[str, Sequence[type[AccelerationPlugin]]]
) -> None:
    for name, value in node.items():
        child = f"{path}.{name}" if path else name
        if "." in name:  # a dotted key in one piece, which looks like a path and is none
            raise _unknown(config, path, name, claimed)
        if child in claimed:
            if value is None:  # null means absent
                continue
            _require_mapping(config, child, value)
            _check_section(config, child, value, claimed)
        elif _is_prefix(child, claimed) or _is_prefix(child, SECTIONS):
            _require_mapping(config, child, value)
            _check_node(config, child, value, claimed)
        elif child in SECTIONS:
            if value is None:
                continue
            dist = SECTIONS[child].dist
            raise config.error(child, f"needs the package {dist}, which is not installed: pip install {dist}")
        else:
            raise _unknown(config, path, name, claimed)


def _check_section(
    config: Config, path: str, section: Mapping[str, Any], claimed: Mapping[str, Sequence[type[AccelerationPlugin]]]
) -> None:
    inner: dict[str, Any] = {}
    for name, value in section.items():
        child = f"{path}.{name}"
        if "." not in name and (child in claimed or _is_prefix(child, claimed)):
            inner[name] = value
            continue
        keys = [key for plugin in claimed[path] for key in _keys_under(plugin, path) if key.name == name]
        if not keys:
            raise _unknown(config, path, name, claimed)
        for key in keys:
            if value is not None and not key.accepts(value):
                raise config.error(child, f"is {describe_kind(value)}; allowed: {key.describe_allowed()}")
    _check_node(config, path, inner, claimed)


def _require_mapping(config: Config, path: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise config.error(path, f"must be a mapping, but is {describe_kind(value)}")


def _unknown(
    config: Config, path: str, name: str, claimed: Mapping[str, Sequence[type[AccelerationPlugin]]]
) -> Exception:
    child = f"{path}.{name}" if path else name
    shown = f"{path}.{show_key(name)}" if path else show_key(name)
    here = _allowed_here(path, claimed)
    foreign = foreign_section(child) if "." not in name else None
    if foreign:
        return config.error(
            shown,
            f"belongs to the {foreign} plugin of fms-acceleration, and foak has no such plugin; remove it "
            f"(allowed here: {', '.join(here)})",
        )
    known = {*SECTIONS, *(f"{section}.{key}" for section, provided in SECTIONS.items() for key in provided.keys)}
    declared: dict[str, set[str]] = {}
    for section, plugins in claimed.items():
        for plugin in plugins:
            for inside in ("", *(f".{key.name}" for key in _keys_under(plugin, section))):
                declared.setdefault(f"{section}{inside}", set()).add(plugin.name)
    near = nearest(child, sorted(known | set(declared)))
    hints = ["is not a known key"]
    if "." in name:
        hints.append("sections are nested, not joined by dots")
    if near:
        dist = provider_of(near)
        by = f"the package {dist} (pip install {dist})" if dist else f"the plugin {', '.join(sorted(declared[near]))}"
        hints.append(f"the nearest known key is {config.full_key(near)}, provided by {by}")
    if here:
        hints.append(f"allowed here: {', '.join(here)}")
    return config.error(shown, "; ".join(hints))


def _allowed_here(path: str, claimed: Mapping[str, Sequence[type[AccelerationPlugin]]]) -> list[str]:
    prefix = f"{path}." if path else ""
    names = {known[len(prefix) :].split(".")[0] for known in (*claimed, *SECTIONS) if known.startswith(prefix)}
    names.update(key.name for plugin in claimed.get(path, ()) for key in _keys_under(plugin, path))
    return sorted(names)


def _keys_under(plugin: type[AccelerationPlugin], path: str) -> list[Key]:
    return [key for key in plugin.keys if not key.under or path in key.under]


def _is_prefix(path: str, known: Mapping[str, Any]) -> bool:
    return any(candidate.startswith(f"{path}.") for candidate in known)


def _same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)
