"""The command `foak`: what it prints, its exit codes, and that an error is one sentence without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from foak.core.cli import app as cli
from foak.core.cli.doctor import diagnosis

Run = Callable[..., tuple[int, str, str]]
CONFIG = "plugins: {training: {demo: {fast_norm: true}}}\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; gives exit code, stdout and stderr."""

    def call(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(item) for item in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def fails(run: Run, code: int, *argv: str | Path) -> str:
    """Runs a command that must fail in one sentence; gives the sentence."""
    found, out, err = run(*argv)
    assert found == code, err
    assert "Traceback" not in out + err
    assert err.startswith("foak: error: ")
    assert err.count("\n") == 1
    return err.removeprefix("foak: error: ").strip()


# -- usage ------------------------------------------------------------------------------------------------------------


def test_the_commands_and_their_options_are_these(run: Run) -> None:
    """Scripts rely on them; whoever changes one changes this table."""
    options = {
        command: sorted(
            line.split()[0] for line in run(command, "--help")[1].splitlines() if line.strip().startswith("--")
        )
        for command in ("train", "merge", "explain", "plugins", "doctor")
    }
    assert options == {
        "train": ["--help", "--set"],
        "merge": ["--dtype", "--help", "--into"],
        "explain": ["--config", "--help", "--json"],
        "plugins": ["--config", "--help", "--json"],
        "doctor": ["--help", "--json"],
    }
    code, out, _ = run("--help")
    assert code == 0
    assert all(option in out for option in ("--version", "--debug", *options))


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, "foak-core 0.1.0\n", "")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["explain"], "MODEL"),
        (["train"], "RUN.yaml"),
        (["bogus"], "bogus"),
        (["plugins", "--colour"], "--colour"),
        (["doctor", "extra"], "extra"),
        (["plugins", "--config"], "--config"),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, argv: list[str], named: str) -> None:
    code, _, err = run(*argv)
    assert code == 2
    assert named in err
    assert "Traceback" not in err


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["plugins"], ["explain", "llama"]])
def test_a_wrong_configuration_ends_with_2(run: Run, tmp_path: Path, demo_plugin: Path, command: list[str]) -> None:
    missing = tmp_path / "nowhere.yaml"
    assert fails(run, 2, *command, "--config", missing) == f"{missing}: there is no such file"
    assert (
        fails(run, 2, *command, "--config", tmp_path) == f"{tmp_path}: this is a folder; name the YAML file inside it"
    )
    path = tmp_path / "foak.yaml"
    path.write_text("plugins: {training: {demo: {fast_nrm: true}}}")
    sentence = fails(run, 2, *command, "--config", path)
    assert sentence.startswith(f"{path}: plugins.training.demo.fast_nrm is not a known key; the nearest known key is")
    path.write_text("plugins: {training: [")
    assert fails(run, 2, *command, "--config", path).startswith(f"{path}: not YAML in line 1, column 22")


def test_debug_prints_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere.yaml")
    for argv in (["--debug", "plugins", "--config", missing], ["plugins", "--config", missing, "--debug"]):
        result = subprocess.run(
            [sys.executable, "-m", "foak.core", *argv], capture_output=True, text=True, check=False, timeout=120
        )
        assert result.returncode == 1
        assert "Traceback" in result.stderr
        assert result.stderr.rstrip().endswith("there is no such file")


def test_as_a_process_it_ends_with_the_same_code_and_sentence(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "foak"
    for command in ([sys.executable, "-m", "foak.core"], [str(script)]):
        result = subprocess.run(
            [*command, "plugins", "--config", "no-such-file"], capture_output=True, text=True, check=False, timeout=120
        )
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr == "foak: error: no-such-file: there is no such file\n"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            OSError(28, "No space left on device", "model.safetensors"),
            1,
            "[Errno 28] No space left on device: 'model.safetensors'",
        ),
        (RuntimeError("first\n  second"), 1, "first second"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_what_fails_outside_foak_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, sentence: str
) -> None:
    def fail(as_json: bool) -> None:
        raise error

    monkeypatch.setattr("foak.core.cli.doctor.doctor_command", fail)
    assert fails(run, code, "doctor") == sentence


def test_a_fault_of_foak_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(as_json: bool) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr("foak.core.cli.doctor.doctor_command", fail)
    with pytest.raises(KeyError):
        run("doctor")


# -- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "model_class", "norms"),
    [
        ("llama", "LlamaForCausalLM", 65),
        ("mistral", "MistralForCausalLM", 65),
        ("gpt_bigcode", "GPTBigCodeForCausalLM", 0),
    ],
)
def test_explain_a_model_type_on_the_meta_device(
    run: Run, tmp_path: Path, demo_plugin: Path, model: str, model_class: str, norms: int
) -> None:
    path = tmp_path / "foak.yaml"
    path.write_text(CONFIG)
    code, out, _ = run("explain", model, "--config", path, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["model_class"] == model_class
    assert found["patched"] == norms
    assert found["config"] == {"plugins": {"training": {"demo": {"fast_norm": True}}}}
    assert all(record["outcome"] == "patched" and record["reason"] for record in found["records"])
    code, out, _ = run("explain", model, "--config", path)
    assert code == 0
    assert model_class in out
    assert ("demo_norm" in out) is (norms > 0)
    if norms:
        assert "model.layers.*.input_layernorm" in out


def test_explain_without_configuration_shows_what_could_be(run: Run, demo_plugin: Path, saved: Path) -> None:
    code, out, _ = run("explain", saved, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["config"]["plugins"]["training"]["demo"] == {"fast_norm": "auto"}
    assert sum(record["rule"] == "demo_norm" for record in found["records"]) == 5


@pytest.fixture
def saved(tiny_llama: Callable[[], LlamaForCausalLM], tmp_path: Path) -> Path:
    """A folder with the configuration of a tiny llama, and no weights."""
    folder = tmp_path / "saved"
    tiny_llama().config.save_pretrained(folder)
    return folder


def test_explain_reads_a_folder_and_a_config_file(run: Run, tmp_path: Path, demo_plugin: Path, saved: Path) -> None:
    path = tmp_path / "foak.yaml"
    path.write_text(CONFIG)
    for model in (saved, saved / "config.json"):
        code, out, _ = run("explain", model, "--config", path, "--json")
        assert code == 0
        assert json.loads(out)["patched"] == 5


def test_explain_takes_a_run_file(run: Run, tmp_path: Path, demo_plugin: Path, saved: Path) -> None:
    path = tmp_path / "RUN.yaml"
    path.write_text(f"model: {{name_or_path: x}}\nacceleration: {{{CONFIG.strip()}}}")
    code, out, _ = run("explain", saved, "--config", path, "--json")
    assert code == 0
    assert json.loads(out)["patched"] == 5


def test_explain_says_what_a_model_may_be(run: Run, tmp_path: Path, demo_plugin: Path) -> None:
    allowed = ("config.json", ".gguf", "hub id", "llama")
    empty = tmp_path / "empty"
    empty.mkdir()
    for model in ("no-such-model", "", empty, tmp_path / "a" / "b", demo_plugin / "demo_plugin_module.py"):
        sentence = fails(run, 1, "explain", model)
        assert all(part in sentence for part in allowed), sentence
    assert "hf download" in fails(run, 1, "explain", "no-such-org/no-such-model")


def test_explain_refuses_what_it_cannot_read_or_build(run: Run, tmp_path: Path, demo_plugin: Path) -> None:
    assert "no causal language model for the model type t5" in fails(run, 1, "explain", "t5")
    assert "of type reformer" in fails(run, 1, "explain", "reformer")  # transformers asserts that is_decoder is set
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{not json")
    assert str(broken) in fails(run, 1, "explain", broken)
    (broken / "config.json").write_text('{"model_type": "no-such-type"}')
    assert "no-such-type" in fails(run, 1, "explain", broken)
    for wrong in ('"num_attention_heads": 0', '"hidden_size": "wide"', '"hidden_size": -4', '"rope_parameters": []'):
        (broken / "config.json").write_text(f'{{"model_type": "llama", {wrong}}}')
        fails(run, 1, "explain", broken)


def test_explain_uses_no_network(run: Run, monkeypatch: pytest.MonkeyPatch, demo_plugin: Path) -> None:
    import socket

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("explain opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    fails(run, 1, "explain", "no-such-org/no-such-model")


# -- plugins and doctor -----------------------------------------------------------------------------------------------


def test_plugins_lists_what_is_installed(run: Run, tmp_path: Path, demo_plugin: Path) -> None:
    code, out, _ = run("plugins", "--json")
    assert code == 0
    (demo,) = [plugin for plugin in json.loads(out) if plugin["name"] == "demo"]
    assert demo["package"] == "demo-plugin"
    assert demo["version"] == "3.4"
    assert demo["any_of"] == ["training.demo"]
    assert demo["active"] is None
    assert demo["keys"] == [
        {
            "name": "fast_norm",
            "allowed": "true, false or auto",
            "help": "RMSNorm in one call",
            "default": False,
            "under": ["training.demo"],
        }
    ]
    code, out, _ = run("plugins")
    assert code == 0
    assert all(part in out for part in ("demo-plugin", "3.4", "training.demo"))


def test_plugins_says_which_are_active(run: Run, tmp_path: Path, demo_plugin: Path) -> None:
    path = tmp_path / "foak.yaml"
    for content, active in ((CONFIG, True), ("plugins: {}", False)):
        path.write_text(content)
        code, out, _ = run("plugins", "--config", path, "--json")
        assert code == 0
        assert {plugin["name"]: plugin["active"] for plugin in json.loads(out)}["demo"] is active
    assert " no " in run("plugins", "--config", path)[1]


def test_doctor_shows_versions_devices_and_plugins(run: Run, demo_plugin: Path) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    versions = {row["name"]: row for row in found["versions"]}
    assert versions["foak-core"]["found"] == "0.1.0"
    for name in ("torch", "transformers", "accelerate"):
        assert versions[name]["state"] == "ok"
        assert ">=" in versions[name]["required"]
    assert {"triton", "peft", "trl", "bitsandbytes"} <= set(versions)
    devices = dict(found["devices"])
    assert f"{os.cpu_count()} cores" in devices["cpu"]
    assert {"weights in", "mixed precision", "kernels"} <= set(devices)
    assert found["plugins"]["demo"] == [["demo", "works here"]]
    assert ["bfloat16", "bf16", "works", "works", "works"] in found["precision"]
    served = "fp16" if torch.accelerator.is_available() else "fp16 (needs a GPU)"
    assert ["float32", served, "works", "works", "works"] in found["precision"]
    assert code == 0
    code, out, _ = run("doctor")
    assert code == 0
    assert all(part in out for part in ("transformers", "mixed precision", "cannot be unscaled", "works here"))


def test_doctor_ends_with_1_where_a_declared_range_is_not_met(run: Run, demo_plugin: Path) -> None:
    info = demo_plugin / "foak_strict-0.1.dist-info"
    info.mkdir()
    requires = ("torch>=999", "no-such-package>=1", "also-missing>=1; extra == 'more'")
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: foak-strict\nVersion: 0.1\nProvides-Extra: more\n{lines}"
    )
    states = {row["name"]: row["state"] for row in diagnosis()["versions"]}
    assert states["torch"] == "out of range"
    assert states["no-such-package"] == "missing"
    assert states["also-missing"] == "not installed"
    assert run("doctor", "--json")[0] == 1
