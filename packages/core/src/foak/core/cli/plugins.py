"""`foak plugins`: which plugins are installed, and what activates each."""

from __future__ import annotations

from pathlib import Path

from foak.core.activation import activate
from foak.core.cli.output import print_json, print_line, print_table
from foak.core.config import read_config
from foak.core.discovery import InstalledPlugin, installed_plugins

__all__ = ["plugins_command"]


def plugins_command(config_file: Path | None, as_json: bool) -> None:
    """Prints the installed plugins.

    Args:
        config_file: a configuration, to say which plugins it activates; None to leave that out.
        as_json: print a list of mappings instead of a table.

    Raises:
        ConfigError: a plugin is broken, or the configuration is wrong.
    """
    # Not through the framework: nothing here needs torch, which takes longer to import than all the rest.
    config = read_config(config_file) if config_file is not None else None
    found = installed_plugins()
    active: set[str] | None = None
    if config is not None:
        active = {plugin.name for plugin in activate(config, [installed.plugin for installed in found])}
    if as_json:
        print_json([_to_dict(installed, active) for installed in found])
        return
    if not found:
        print_line("No plugin is installed; start with: pip install foak-fast-kernels")
        return
    header = ("plugin", "package", "version", "activated by", *(("active",) if active is not None else ()))
    rows = []
    for installed in found:
        row = [installed.plugin.name, installed.dist or "", installed.version or "", _activated_by(installed)]
        if active is not None:
            row.append("yes" if installed.plugin.name in active else "no")
        rows.append(row)
    print_table("Installed plugins", header, rows)


def _to_dict(installed: InstalledPlugin, active: set[str] | None) -> dict[str, object]:
    plugin = installed.plugin
    return {
        "name": plugin.name,
        "package": installed.dist,
        "version": installed.version,
        "all_of": list(plugin.all_of),
        "any_of": list(plugin.any_of),
        "requires": list(plugin.requires),
        "order": plugin.order,
        "loads": plugin.loads,
        "keys": [
            {
                "name": key.name,
                "allowed": key.describe_allowed(),
                "help": key.help,
                "default": key.default,
                "under": list(key.under or dict.fromkeys((*plugin.all_of, *plugin.any_of))),
            }
            for key in plugin.keys
        ],
        "active": None if active is None else plugin.name in active,
    }


def _activated_by(installed: InstalledPlugin) -> str:
    plugin = installed.plugin
    lines = list(plugin.any_of)
    if plugin.all_of:
        lines.append("all of: " + ", ".join(plugin.all_of))
    return "\n".join(lines)
