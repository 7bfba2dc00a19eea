"""Reads a configuration: a file, a mapping, or the file that an environment variable names."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from foak.core.catalog import nearest
from foak.core.errors import ConfigError

__all__ = ["ENVIRONMENT_VARIABLES", "RUN_SECTIONS", "Config", "describe_kind", "read_config", "read_yaml", "show_key"]

ENVIRONMENT_VARIABLES = ("FOAK_CONFIG", "ACCELERATION_FRAMEWORK_CONFIG_FILE")
"""Where the configuration is looked for when none is given; the second is the name that fms-acceleration uses."""

RUN_SECTIONS = ("model", "data", "peft", "training", "acceleration")
"""The sections of a run file (`foak train RUN.yaml`), whose section `acceleration` holds `plugins:`."""

_Scalar = str | int | float | bool | datetime.date | None
_KINDS = {dict: "a mapping", list: "a list", tuple: "a list", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Config:
    """A configuration that has been read, and that shares nothing with what it was read from.

    Attributes:
        plugins: the mapping below `plugins:`; every key in it is a text, at every depth.
        root: what stands before a dotted path in messages: `plugins`, or `acceleration.plugins` in a run file.
        source: the file it was read from, as the user named it; None for a mapping given in Python.
    """

    plugins: dict[str, Any] = field(default_factory=dict)
    root: str = "plugins"
    source: str | None = None

    def error(self, path: str, message: str) -> ConfigError:
        """A `ConfigError` about the dotted `path` (below `plugins:`), which names the file and the full key."""
        return _error(self.source, f"{self.root}.{path} {message}" if path else f"{self.root} {message}")

    def full_key(self, path: str) -> str:
        """The full dotted key of `path`."""
        return f"{self.root}.{path}"

    def lookup(self, path: str) -> Any:
        """The value at a dotted path below `plugins:`; None where a key is absent or null.

        Raises:
            ConfigError: the path leads through something that is not a mapping.
        """
        node: Any = self.plugins
        walked: list[str] = []
        for part in path.split("."):
            if not isinstance(node, dict):
                raise self.error(".".join(walked), f"must be a mapping, but is {describe_kind(node)}")
            if part not in node:
                return None
            node = node[part]
            walked.append(part)
        return node


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None, *, source: str | None = None
) -> Config:
    """Reads a configuration.

    Args:
        config: the path of a YAML file; or a mapping as such a file would give (it is copied); or None for the file
            named by `$FOAK_CONFIG`, or else by `$ACCELERATION_FRAMEWORK_CONFIG_FILE`; or a `Config`, taken as it is.
            A file or mapping has `plugins:` at its top, or is a run file, whose section `acceleration` has it.
        source: for a mapping, the name of the file that it comes from; used in messages only.

    Raises:
        ConfigError: there is nothing to read, it cannot be read, or its outer form is wrong. Whether the keys below
            `plugins:` mean anything is for the plugins to say.
    """
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return _from_document(_copy(config, source, "", {}), source)
    if config is None:
        path, origin = _path_from_environment()
    elif isinstance(config, (str, os.PathLike)):
        path, origin = os.fspath(config), ""
    else:
        raise ConfigError(f"A configuration is a path, a mapping or None, but not {describe_kind(config)}")
    return _from_document(read_yaml(path, origin, expected="a configuration starts with the key `plugins`"), str(path))


def read_yaml(path: str | os.PathLike[str], origin: str = "", *, expected: str = "") -> Any:
    """Reads one YAML document (UTF-8, safe types only) from a file.

    Args:
        path: the file.
        origin: why this file is read, appended to its name in messages, such as ` (named by $FOAK_CONFIG)`.
        expected: what the file should hold, appended to the message that it is empty.

    Returns:
        The document: nested dictionaries with text keys, lists and scalars.

    Raises:
        ConfigError: the file is missing, a folder, unreadable, empty, not UTF-8 or not YAML, or has a key twice.
    """
    name = os.fspath(path)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"The path of a configuration file is empty or not a text{origin}; name a YAML file")
    label = f"{name}{origin}"
    try:
        content = Path(name).expanduser().read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{label}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{label}: this is a folder; name the YAML file inside it") from None
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL character; RuntimeError: `~unknown-user`
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{label}: the file cannot be read ({reason})") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: the file is not UTF-8 text (byte {error.start})") from None
    document = _parse(text, label)
    if document is None:
        raise ConfigError(f"{label}: the file is empty" + (f"; {expected}" if expected else ""))
    return _copy(document, label, "", {})


def describe_kind(value: Any) -> str:
    """What a value is, for a message: `null`, `a list`, `the text 'yes'`, `the number 4`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    if isinstance(value, (int, float)):
        return f"the number {_short(value)}"
    if isinstance(value, Mapping):
        return "a mapping"
    return _KINDS.get(type(value), f"of type {type(value).__name__}")


def show_key(key: str) -> str:
    """A key as it can stand in a one-line message: as it is, or in quotes if it is empty or has unusual characters."""
    return key if re.fullmatch(r"[\w-]+", key) else _short(key)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with more digits than Python prints
        return "too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _error(source: str | None, message: str) -> ConfigError:
    return ConfigError(f"{source or 'configuration'}: {message}")


def _path_from_environment() -> tuple[str, str]:
    for variable in ENVIRONMENT_VARIABLES:
        path = os.environ.get(variable)
        if path:
            return path, f" (named by ${variable})"
    first, second = ENVIRONMENT_VARIABLES
    raise ConfigError(
        f"No configuration: give a file or a mapping, or name a file in the environment variable {first} (or {second})"
    )


def _from_document(document: Any, source: str | None) -> Config:
    if not isinstance(document, dict):
        raise _error(source, f"the top must be a mapping with the key `plugins`, but is {describe_kind(document)}")
    if "acceleration" in document and "plugins" not in document:
        _refuse_unknown(document, RUN_SECTIONS, source)
        section, root = document["acceleration"], "acceleration.plugins"
        if not isinstance(section, dict):
            raise _error(
                source, f"acceleration must be a mapping with the key `plugins`, but is {describe_kind(section)}"
            )
        _refuse_unknown(section, ("plugins",), source, "acceleration.")
    else:
        section, root = document, "plugins"
        _refuse_unknown(section, ("plugins",), source)
    if "plugins" not in section:
        raise _error(source, f"the key `{root}` is missing; it holds the sections of the plugins")
    plugins = section["plugins"]
    if not isinstance(plugins, dict):
        raise _error(source, f"{root} must be a mapping, but is {describe_kind(plugins)} (write {{}} for no plugin)")
    return Config(plugins, root, source)


def _refuse_unknown(mapping: dict[str, Any], known: tuple[str, ...], source: str | None, prefix: str = "") -> None:
    for key in mapping:
        if key not in known:
            near = nearest(key, known)
            hint = f"the nearest known key is {prefix}{near}; " if near else ""
            raise _error(source, f"{prefix}{show_key(key)} is not a known key; {hint}allowed here: {', '.join(known)}")


def _copy(value: Any, source: str | None, path: str, seen: dict[int, Any]) -> Any:
    """A copy of nested mappings, lists and scalars as plain dictionaries, lists and scalars.

    Args:
        value: what to copy; anything that YAML's plain types cannot hold is refused.
        source: for messages.
        path: the dotted path of `value`.
        seen: copies by the id of their original; None while the copy is being made, which is how a structure that
            contains itself (YAML's anchors allow it) is found. Also keeps aliases from being copied again and again.
    """
    if isinstance(value, _Scalar):
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        raise _error(source, f"{path or 'the top'} is {describe_kind(value)}; allowed are mappings, lists and scalars")
    if id(value) in seen:
        if seen[id(value)] is None:
            raise _error(source, f"{path or 'the top'} contains itself")
        return seen[id(value)]
    seen[id(value)] = None
    try:
        if isinstance(value, Mapping):
            copy: Any = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    raise _error(
                        source,
                        f"{path or 'the top'} has a key that is {describe_kind(key)}; every key must be a text "
                        "(YAML reads on, off, yes and no as true and false: put them in quotes)",
                    )
                copy[key] = _copy(item, source, f"{path}.{show_key(key)}" if path else show_key(key), seen)
        else:
            copy = [_copy(item, source, f"{path}[{index}]", seen) for index, item in enumerate(value)]
    except RecursionError:
        raise _error(source, "the values are nested too deeply") from None
    seen[id(value)] = copy
    return copy


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which in addition refuses a key that is written twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            written = (key_node.tag, key_node.value)
            if written in lines:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key_node.value!r} is already set in line {lines[written]}",
                    key_node.start_mark,
                )
            lines[written] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _parse(text: str, label: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{label}: not YAML{place}: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f" in line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
        raise ConfigError(f"{label}: not YAML{place}: {error.reason}") from None
    except RecursionError:
        raise ConfigError(f"{label}: not YAML that can be read: the values are nested too deeply") from None
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
        # PyYAML turns scalars into numbers and dates without checking them first (2001-99-99, `!!bool maybe`), so that
        # a bad scalar shows as whatever that conversion raises.
        raise ConfigError(f"{label}: not YAML: a value cannot be read ({type(error).__name__}: {error})") from None
    finally:
        if loader is not None:
            loader.dispose()
