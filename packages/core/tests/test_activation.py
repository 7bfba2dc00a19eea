"""Which plugins a configuration activates, with what, and every key or value that is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from foak.core import AccelerationFramework, AccelerationPlugin, ConfigError, Key, UnsupportedError
from foak.core.activation import everything_auto

SWITCH = (True, False, "auto")


class Either(AccelerationPlugin):
    name = "either"
    any_of = ("training.one", "peft.two")
    order = 20
    keys = (
        Key("fast", SWITCH, "a switch", default=False),
        Key("count", (int,), "a number", default=4),
        Key("base", ("nf4", "fp4"), "a code", under=("peft.two",)),
    )


class Both(AccelerationPlugin):
    name = "both"
    all_of = ("training.one", "training.three")
    order = 10
    keys = (Key("fast", SWITCH), Key("depth", (int, "full"), default="full", under=("training.three",)))


class Mixed(AccelerationPlugin):
    name = "mixed"
    all_of = ("training.three", "training.four")
    any_of = ("training.five",)
    order = 20
    keys = (Key("fast", SWITCH),)


class Never(AccelerationPlugin):
    name = "never"


PLUGINS: tuple[type[AccelerationPlugin], ...] = (Either, Both, Mixed, Never)


def build(tree: dict[str, Any], plugins: Sequence[type[AccelerationPlugin]] = PLUGINS) -> AccelerationFramework:
    return AccelerationFramework({"plugins": tree}, plugins=plugins)


def names(tree: dict[str, Any], plugins: Sequence[type[AccelerationPlugin]] = PLUGINS) -> list[str]:
    return [plugin.name for plugin in build(tree, plugins).active_plugins]


# -- activation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "active"),
    [
        ({}, []),
        ({"training": {}}, []),
        ({"training": {"one": {}}}, ["either"]),
        ({"peft": {"two": {}}}, ["either"]),
        ({"training": {"one": {}}, "peft": {"two": {}}}, ["either"]),
        ({"training": {"three": {}}}, []),
        ({"training": {"one": {}, "three": {}}}, ["both", "either"]),
        ({"training": {"one": None, "three": {}}}, []),
        ({"training": {"three": {}, "four": {}}}, ["mixed"]),
        ({"training": {"four": {}}}, []),
        ({"training": {"five": {}}}, ["mixed"]),
        ({"training": {"one": {}, "three": {}, "four": {}}, "peft": {"two": None}}, ["both", "either", "mixed"]),
    ],
)
def test_all_of_and_any_of(tree: dict[str, Any], active: list[str]) -> None:
    assert names(tree) == active


def test_the_order_is_declared_and_not_that_of_installation() -> None:
    tree = {"training": {"one": {}, "three": {}, "five": {}}}
    for plugins in itertools.permutations(PLUGINS):
        assert names(tree, plugins) == ["both", "either", "mixed"]


def test_a_plugin_learns_which_paths_matched_and_gets_their_union() -> None:
    (plugin,) = build(
        {"training": {"one": {"fast": True}}, "peft": {"two": {"base": "nf4", "fast": True}}}
    ).active_plugins
    assert plugin.section.paths == ("training.one", "peft.two")
    assert dict(plugin.section) == {"fast": True, "base": "nf4", "count": 4}
    assert plugin.section.key("base") == "plugins.peft.two.base"
    assert plugin.section.key("count") == "plugins.training.one.count"


def test_an_incomplete_all_of_gives_nothing_to_the_union() -> None:
    (plugin,) = build({"training": {"three": {"fast": True}, "five": {"fast": False}}}, [Mixed, Both]).active_plugins
    assert plugin.section.paths == ("training.five",)
    assert plugin.section["fast"] is False


def test_defaults_stand_where_a_key_is_absent_or_null() -> None:
    (plugin,) = build({"training": {"one": {"fast": None}}}).active_plugins
    assert dict(plugin.section) == {"fast": False, "count": 4}
    assert plugin.section.written == {}


def test_a_plugin_sees_only_its_own_keys() -> None:
    both, either = build({"training": {"one": {"count": 2}, "three": {"depth": 3}}}).active_plugins
    assert dict(both.section) == {"fast": None, "depth": 3}
    assert dict(either.section) == {"fast": False, "count": 2}


def test_two_stanzas_that_contradict_each_other_are_both_named() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"training": {"one": {"fast": True}}, "peft": {"two": {"fast": "auto"}}})
    assert str(caught.value) == (
        "configuration: plugins.peft.two.fast is the text 'auto', but plugins.training.one.fast is true; "
        "give both the same value or remove one"
    )


def test_stanzas_that_agree_are_no_conflict() -> None:
    (plugin,) = build({"training": {"one": {"count": 3}}, "peft": {"two": {"count": 3}}}).active_plugins
    assert plugin.section["count"] == 3


def test_a_section_inside_another_belongs_to_its_own_plugin() -> None:
    class Inner(AccelerationPlugin):
        name = "inner"
        any_of = ("training.one.inner",)
        keys = (Key("x", (int,)),)

    either, inner = build({"training": {"one": {"fast": True, "inner": {"x": 1}}}}, [Inner, Either]).active_plugins
    assert dict(either.section) == {"fast": True, "count": 4}
    assert dict(inner.section) == {"x": 1}
    with pytest.raises(ConfigError, match=r"plugins\.training\.one\.inner\.y is not a known key"):
        build({"training": {"one": {"inner": {"y": 1}}}}, [Inner, Either])
    with pytest.raises(ConfigError, match=r"plugins\.training\.one\.inner must be a mapping, but is true"):
        build({"training": {"one": {"inner": True}}}, [Inner, Either])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"training": None}, "plugins.training must be a mapping, but is null"),
        ({"training": []}, "plugins.training must be a mapping, but is a list"),
        ({"training": "one"}, "plugins.training must be a mapping, but is the text 'one'"),
        ({"training": {"one": [1]}}, "plugins.training.one must be a mapping, but is a list"),
        ({"training": {"one": True}}, "plugins.training.one must be a mapping, but is true"),
        ({"training": {"attention": 2}}, "plugins.training.attention must be a mapping, but is the number 2"),
        (
            {"training": {"one": {"fast": "yes"}}},
            "plugins.training.one.fast is the text 'yes'; allowed: true, false or auto",
        ),
        ({"training": {"one": {"fast": 1}}}, "plugins.training.one.fast is the number 1; allowed: true, false or auto"),
        ({"training": {"one": {"fast": {}}}}, "plugins.training.one.fast is a mapping; allowed: true, false or auto"),
        ({"training": {"one": {"count": True}}}, "plugins.training.one.count is true; allowed: a whole number"),
        (
            {"training": {"one": {"count": 2.0}}},
            "plugins.training.one.count is the number 2.0; allowed: a whole number",
        ),
        (
            {"training": {"three": {"depth": "half"}}},
            "plugins.training.three.depth is the text 'half'; allowed: a whole number or full",
        ),
        ({"peft": {"two": {"base": "int4"}}}, "plugins.peft.two.base is the text 'int4'; allowed: nf4 or fp4"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(tree)


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        # misspelt, at each level; near one that is installed, and near one that is not
        (
            {"training": {"one": {"fats": True}}},
            ["plugins.training.one.fats is not", "plugins.training.one.fast", "plugin both, either", "count, fast"],
        ),
        ({"traning": {"one": {}}}, ["plugins.traning is not", "allowed here: peft, training"]),
        (
            {"training": {"fused_op_and_kernels": {}}},
            ["plugins.training.fused_ops_and_kernels", "package foak-fast-kernels (pip install foak-fast-kernels)"],
        ),
        # right key, wrong place
        ({"training": {"one": {"base": "nf4"}}}, ["plugins.training.one.base is not", "plugins.peft.two.base"]),
        (
            {"training": {"fast_loss": True}},
            ["plugins.training.fused_ops_and_kernels.fast_loss", "pip install foak-fast-kernels"],
        ),
        ({"peft": {"bitsandbytes": {}}}, ["plugins.peft.quantization.bitsandbytes", "pip install foak-quantized-peft"]),
        (
            {"training.one": {}},
            ["plugins.'training.one' is not a known key; sections are nested", "plugins.training.one,"],
        ),
        ({"training": {"one": {"a.b": 1}}}, ["plugins.training.one.'a.b' is not a known key; sections are nested"]),
        ({"": {}}, ["plugins.'' is not a known key"]),
        ({"training": {"a\nb": {}}}, [r"plugins.training.'a\nb' is not a known key"]),
        # nothing near: what is allowed
        ({"zzz": {}}, ["plugins.zzz is not a known key; allowed here: peft, training"]),
        # known, but its package is not among the plugins
        (
            {"training": {"attention": {"padding_free": {"method": "huggingface"}}}},
            [
                "plugins.training.attention.padding_free needs the package foak-padding-free",
                "not installed: pip install foak-padding-free",
            ],
        ),
        # plugins of fms-acceleration that foak has no counterpart of
        (
            {"training": {"moe": {"scattermoe": {"ep_degree": 1}}}},
            ["plugins.training.moe belongs to the mixture-of-experts", "no such plugin"],
        ),
        (
            {"training": {"odm": {"odm": {}}}},
            ["plugins.training.odm belongs to the online data mixing", "no such plugin"],
        ),
        ({"training": {"mamba": {"cp": {}}}}, ["plugins.training.mamba belongs to the mamba", "no such plugin"]),
    ],
)
def test_an_unknown_key_names_the_nearest_and_who_provides_it(tree: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tree)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_section_of_a_missing_package_may_be_null() -> None:
    assert names({"training": {"attention": {"padding_free": None}}}) == []


def test_keys_are_checked_for_plugins_that_are_not_active_too() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.training\.three\.typo"):
        build({"training": {"three": {"typo": 1}}})


def test_a_missing_package_is_named_with_its_install_line() -> None:
    class Needy(AccelerationPlugin):
        name = "needy"
        any_of = ("training.one",)
        requires = ("json", "no_such_package")

    with pytest.raises(ConfigError) as caught:
        build({"training": {"one": {}}}, [Needy])
    message = str(caught.value)
    assert "needy" in message
    assert "plugins.training.one" in message
    assert message.endswith("pip install no-such-package")
    assert names({}, [Needy]) == []  # not needed while it is not active


def test_a_missing_parent_of_a_required_package_is_missing_too() -> None:
    class Needy(AccelerationPlugin):
        name = "needy"
        any_of = ("training.one",)
        requires = ("no_such_package.inner",)

    with pytest.raises(ConfigError, match="pip install"):
        build({"training": {"one": {}}}, [Needy])


def test_two_plugins_that_load_are_both_named() -> None:
    class First(AccelerationPlugin):
        name = "first"
        any_of = ("training.one",)
        loads = True

    class Second(First):
        name = "second"
        any_of = ("training.two",)

    with pytest.raises(UnsupportedError) as caught:
        build({"training": {"one": {}, "two": {}}}, [Second, First])
    assert "first (plugins.training.one) and second (plugins.training.two) both load" in str(caught.value)
    assert names({"training": {"two": {}}}, [First, Second]) == ["second"]


def test_an_error_names_the_file_and_the_root_of_a_run_file(tmp_path: Any) -> None:
    path = tmp_path / "RUN.yaml"
    path.write_text("model: {}\nacceleration: {plugins: {training: {one: {fast: 2}}}}")
    with pytest.raises(ConfigError) as caught:
        AccelerationFramework(path, plugins=PLUGINS)
    assert str(caught.value).startswith(f"{path}: acceleration.plugins.training.one.fast is the number 2; ")


def test_everything_auto_is_made_of_what_plugins_declare() -> None:
    class Loader(Either):
        name = "loader"
        any_of = ("training.loader",)
        keys = (Key("fast", SWITCH),)
        loads = True

    assert everything_auto([Either, Loader, Never]) == {"training": {"one": {"fast": "auto"}}}
    assert everything_auto([Never]) == {}
    tree = everything_auto(PLUGINS)
    assert "either" in names(tree)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": ""}, "has no name"),
        ({"any_of": "training.one"}, "`any_of` as a tuple"),
        ({"requires": ["x"]}, "`requires` as a tuple"),
        ({"keys": (Key("a.b", (bool,)),)}, "without dots"),
        ({"keys": (Key("a", ()),)}, "allowed"),
        ({"keys": (Key("a", (bool,), under=("x.y",)),)}, "paths it does not have"),
    ],
)
def test_a_wrong_declaration_is_an_error_of_the_plugin(attributes: dict[str, Any], message: str) -> None:
    wrong = type("Wrong", (Either,), attributes)
    with pytest.raises(ConfigError, match=message):
        build({}, [wrong])
