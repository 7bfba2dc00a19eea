"""Entry points: what is installed is found, and what is broken is named with its package."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from foak.core import ConfigError
from foak.core.catalog import SECTIONS
from foak.core.discovery import GROUP, installed_plugins

PLUGIN = """
from foak.core import AccelerationPlugin

class Found(AccelerationPlugin):
    name = "{name}"
    any_of = ("training.{name}",)
    order = {order}

class Other:
    pass
"""


def install(folder: Path, dist: str, module: str, content: str, value: str) -> metadata.EntryPoint:
    """Lays out a distribution with one plugin as pip would, and returns its entry point."""
    info = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfound = {value}\n")
    (folder / f"{module}.py").write_text(content)
    (entry_point,) = metadata.Distribution.at(info).entry_points
    return entry_point


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("first_plugin", "second_plugin"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_an_installed_plugin_is_found_with_its_package(site: Path) -> None:
    late = install(site, "my-late", "first_plugin", PLUGIN.format(name="late", order=5), "first_plugin:Found")
    early = install(site, "my-early", "second_plugin", PLUGIN.format(name="early", order=1), "second_plugin:Found")
    found = installed_plugins([late, early, late])
    assert [(item.plugin.name, item.dist, item.version) for item in found] == [
        ("early", "my-early", "1.2"),
        ("late", "my-late", "1.2"),
    ]
    assert {"early", "late"} <= {item.plugin.name for item in installed_plugins()}  # found without being told, too


@pytest.mark.parametrize(
    ("content", "value", "reason"),
    [
        ("import no_such_module", "first_plugin:Found", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "first_plugin:Found", "AttributeError"),
        ("x = = 1", "first_plugin:Found", "SyntaxError"),
        ("raise RuntimeError('needs\\na GPU')", "first_plugin:Found", "RuntimeError: needs a GPU"),
        (PLUGIN.format(name="x", order=1), "first_plugin:Other", "not a subclass of foak.core.AccelerationPlugin"),
        (PLUGIN.format(name="", order=1), "first_plugin:Found", "has no name"),
    ],
)
def test_a_broken_plugin_is_named_with_its_package(site: Path, content: str, value: str, reason: str) -> None:
    entry_point = install(site, "my-broken", "first_plugin", content, value)
    with pytest.raises(ConfigError) as caught:
        installed_plugins([entry_point])
    message = str(caught.value)
    assert "my-broken" in message
    assert reason in message
    assert "\n" not in message


def test_two_plugins_of_one_name_are_both_named(site: Path) -> None:
    content = PLUGIN.format(name="same", order=1)
    entry_points = [
        install(site, "my-first", "first_plugin", content, "first_plugin:Found"),
        install(site, "my-second", "second_plugin", content, "second_plugin:Found"),
    ]
    with pytest.raises(ConfigError, match=r"'same': my-first and my-second; uninstall"):
        installed_plugins(entry_points)


def test_the_catalog_is_what_the_installed_plugins_declare() -> None:
    """The table for messages must not drift from the plugins; those of other projects are no part of it."""
    compared = 0
    for installed in installed_plugins():
        if installed.dist is None or not installed.dist.startswith("foak-"):
            continue
        plugin = installed.plugin
        paths = {*plugin.all_of, *plugin.any_of}
        assert paths == {path for path, provided in SECTIONS.items() if provided.dist == installed.dist}
        for path in paths:
            declared = {key.name for key in plugin.keys if not key.under or path in key.under}
            assert declared == set(SECTIONS[path].keys), path
            compared += 1
    # Where the packages are installed (foak-core can be tested alone), none may have slipped through.
    names = {dist.name for dist in metadata.distributions()}
    assert compared == sum(provided.dist in names for provided in SECTIONS.values())
