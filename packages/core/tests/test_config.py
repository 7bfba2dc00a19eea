"""Reading a configuration: every way in which a file or mapping can be wrong is one sentence that names it."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from foak.core import ConfigError
from foak.core.config import Config, read_config

VALID = "plugins:\n  training:\n    fused_ops_and_kernels: {fast_loss: true}\n"
TREE = {"training": {"fused_ops_and_kernels": {"fast_loss": True}}}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOAK_CONFIG", raising=False)
    monkeypatch.delenv("ACCELERATION_FRAMEWORK_CONFIG_FILE", raising=False)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "foak.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def message_for(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- where it comes from ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False])
def test_reads_a_file(tmp_path: Path, as_text: bool) -> None:
    path = write(tmp_path, VALID)
    config = read_config(str(path) if as_text else path)
    assert config == Config(TREE, "plugins", str(path))


def test_reads_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, b"\xef\xbb\xbf" + VALID.encode())).plugins == TREE


def test_reads_any_mapping_and_copies_it() -> None:
    given: dict[str, Any] = {"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": True, "list": [1]}}}}
    config = read_config(MappingProxyType(given))
    given["plugins"]["training"]["fused_ops_and_kernels"]["fast_loss"] = "changed"
    given["plugins"]["training"]["fused_ops_and_kernels"]["list"].append(2)
    assert config.plugins == {"training": {"fused_ops_and_kernels": {"fast_loss": True, "list": [1]}}}


def test_the_first_environment_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = tmp_path / "older.yaml"
    older.write_text("plugins: {older: {}}")
    monkeypatch.setenv("ACCELERATION_FRAMEWORK_CONFIG_FILE", str(older))
    assert read_config().plugins == {"older": {}}
    monkeypatch.setenv("FOAK_CONFIG", str(write(tmp_path, VALID)))
    assert read_config().plugins == TREE
    monkeypatch.setenv("FOAK_CONFIG", "")  # empty is as good as unset
    assert read_config().plugins == {"older": {}}


def test_reads_the_section_of_a_run_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {name_or_path: x}\nacceleration:\n  plugins: {training: 3}\n")
    config = read_config(path)
    assert config.plugins == {"training": 3}
    assert config.full_key("training") == "acceleration.plugins.training"
    given = read_config({"acceleration": {"plugins": {}}}, source="RUN.yaml")
    assert str(given.error("training", "is wrong")) == "RUN.yaml: acceleration.plugins.training is wrong"


def test_no_plugins_at_all_is_allowed() -> None:
    assert read_config({"plugins": {}}).plugins == {}


# -- what is wrong with the file --------------------------------------------------------------------------------------


def test_no_file_and_no_variable_names_both_variables() -> None:
    message = message_for(None)
    assert "FOAK_CONFIG" in message
    assert "ACCELERATION_FRAMEWORK_CONFIG_FILE" in message


@pytest.mark.parametrize("variable", ["FOAK_CONFIG", "ACCELERATION_FRAMEWORK_CONFIG_FILE"])
def test_a_missing_file_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "/nowhere/foak.yaml")
    assert message_for(None) == f"/nowhere/foak.yaml (named by ${variable}): there is no such file"


def test_a_folder_is_named(tmp_path: Path) -> None:
    assert message_for(tmp_path) == f"{tmp_path}: this is a folder; name the YAML file inside it"


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, VALID)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # a test that runs as root could not be refused otherwise
    assert message_for(path) == f"{path}: the file cannot be read (Permission denied)"


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~no-such-user/foak.yaml", "foak.yaml/inner"])
def test_an_impossible_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, VALID)
    assert name in message_for(name)


def test_an_empty_name_is_an_error() -> None:
    assert "empty" in message_for("")


@pytest.mark.parametrize("content", ["", "\n\n", "# only a comment\n", "---\n", "null"])
def test_an_empty_file_is_named(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert message_for(path) == f"{path}: the file is empty; a configuration starts with the key `plugins`"


@pytest.mark.parametrize("content", [VALID.encode("utf-16"), b"plugins: {a: '\xff'}"])
def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    assert message_for(path).startswith(f"{path}: the file is not UTF-8 text")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("plugins:\n  a: [1, 2\n", "line 3, column 1"),
        ("plugins:\n\ta: 1\n", "line 2, column 1"),
        ("plugins: {a: 1}\n--- \nplugins: {}\n", "line 2, column 1"),
        ("plugins: &a {b: *c}\n", "line 1, column 17"),
        ("plugins: !!python/object:os.system {}\n", "line 1, column 10"),
        ("plugins:\n  a: \x07\n", "line 2, column 6"),
        ("plugins:\n  ? [a]\n  : 1\n", "line 2, column 5"),
    ],
)
def test_what_is_not_yaml_is_located(tmp_path: Path, content: str, place: str) -> None:
    path = write(tmp_path, content)
    assert message_for(path).startswith(f"{path}: not YAML in {place}: ")


@pytest.mark.parametrize("value", ["2001-99-99", "!!bool maybe", "!!int x", "!!timestamp x", "!!float x", "!!int ''"])
def test_a_value_that_yaml_cannot_convert_is_an_error(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"plugins: {{a: {value}}}")
    assert message_for(path).startswith(f"{path}: not YAML: a value cannot be read")


def test_a_key_written_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "plugins:\n  training: {}\n  peft: {}\n  training: {}\n")
    assert message_for(path) == f"{path}: not YAML in line 4, column 3: the key 'training' is already set in line 2"


def test_merge_keys_are_no_double_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "plugins:\n  a: &a {x: 1, y: 2}\n  b: {<<: *a, y: 3}\n")
    assert read_config(path).plugins["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("content", ["[" * 10_000, "plugins: " + "{a: " * 3000 + "1" + "}" * 3000])
def test_values_nested_too_deeply_are_an_error(tmp_path: Path, content: str) -> None:
    assert "nested too deeply" in message_for(write(tmp_path, content))


def test_a_mapping_nested_too_deeply_is_an_error() -> None:
    tree: dict[str, Any] = {}
    for _ in range(10_000):
        tree = {"a": tree}
    assert "nested too deeply" in message_for({"plugins": tree})


def test_a_structure_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    assert "plugins.a.b.c contains itself" in message_for(write(tmp_path, "plugins:\n  a: &a {b: {c: *a}}\n"))


def test_aliases_do_not_grow_the_configuration(tmp_path: Path) -> None:
    lines = ["plugins:", "  a0: &a0 {x: 1}"]
    lines += [f"  a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 60)]  # 2 ** 59 leaves when unfolded
    assert len(read_config(write(tmp_path, "\n".join(lines))).plugins) == 60


# -- what is wrong with its outer form --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("- plugins", "the top must be a mapping with the key `plugins`, but is a list"),
        ("plugins", "the top must be a mapping with the key `plugins`, but is the text 'plugins'"),
        ("3", "the top must be a mapping with the key `plugins`, but is the number 3"),
        ("{}", "the key `plugins` is missing; it holds the sections of the plugins"),
        (
            "model: {}\nacceleration: {}",
            "the key `acceleration.plugins` is missing; it holds the sections of the plugins",
        ),
        ("plugins:", "plugins must be a mapping, but is null (write {} for no plugin)"),
        ("plugins: []", "plugins must be a mapping, but is a list (write {} for no plugin)"),
        ("plugins: yes", "plugins must be a mapping, but is true (write {} for no plugin)"),
        ("acceleration:", "acceleration must be a mapping with the key `plugins`, but is null"),
        (
            "acceleration: {plugins: 1.5}",
            "acceleration.plugins must be a mapping, but is the number 1.5 (write {} for no plugin)",
        ),
        ("plugin: {}", "plugin is not a known key; the nearest known key is plugins; allowed here: plugins"),
        ("plugins: {}\nversion: 1", "version is not a known key; allowed here: plugins"),
        (
            "acceleration: {plugins: {}}\nmodels: {}",
            "models is not a known key; the nearest known key is model; "
            "allowed here: model, data, peft, training, acceleration",
        ),
        (
            "acceleration: {plugins: {}, on_: 1}",
            "acceleration.on_ is not a known key; allowed here: plugins",
        ),
    ],
)
def test_the_outer_form(tmp_path: Path, document: str, message: str) -> None:
    path = write(tmp_path, document)
    assert message_for(path) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ("plugins: {1: x}", "plugins has a key that is the number 1;"),
        ("plugins: {a: {on: x}}", "plugins.a has a key that is true;"),
        ("null: {}", "the top has a key that is null;"),
        ("plugins: {a: [{2020-01-01: x}]}", "plugins.a[0] has a key that is of type date;"),
    ],
)
def test_a_key_that_is_no_text_is_named(tmp_path: Path, document: str, named: str) -> None:
    assert named in message_for(write(tmp_path, document))


@pytest.mark.parametrize("config", [3, ["plugins"], object(), True, b"foak.yaml"])
def test_what_is_no_configuration_is_named(config: Any) -> None:
    assert message_for(config).startswith("A configuration is a path, a mapping or None, but not ")


def test_a_mapping_holds_plain_values_only() -> None:
    assert "plugins.a is of type object" in message_for({"plugins": {"a": object()}})
    assert "plugins.a is of type set" in message_for({"plugins": {"a": {1}}})


def test_reading_leaves_the_environment_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    read_config(write(tmp_path, VALID))
    assert dict(os.environ) == before
