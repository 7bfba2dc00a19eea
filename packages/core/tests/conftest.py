"""What the tests of several files use: a tiny model, and a plugin that is installed as pip would install it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = """
import torch
from foak.core import AccelerationPlugin, Key, Rule

def norm(self, hidden_states):
    return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

class Demo(AccelerationPlugin):
    name = "demo"
    any_of = ("training.demo",)
    keys = (Key("fast_norm", (True, False, "auto"), "RMSNorm in one call", default=False),)

    def augment(self, model, train_args, peft_config):
        if self.section["fast_norm"]:
            self.patcher.add(Rule(
                name="demo_norm",
                target="forward",
                match=lambda m: "an RMSNorm" if hasattr(m, "variance_epsilon") else None,
                sample=lambda m: ((torch.randn(4, len(m.weight), dtype=m.weight.dtype, requires_grad=True),), {}),
                build=lambda m: norm,
                key=self.section.key("fast_norm") if self.section["fast_norm"] is True else None,
            ))

    @classmethod
    def diagnose(cls):
        return [("demo", "works here")]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU a test marked `gpu` is skipped; the session `gpu` is the one that fails where none is."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def demo_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the plugin `demo` of the package `demo-plugin` for this process; gives its site folder."""
    site = tmp_path / "site"
    info = site / "demo_plugin-3.4.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-plugin\nVersion: 3.4\n")
    (info / "entry_points.txt").write_text("[foak.plugins]\ndemo = demo_plugin_module:Demo\n")
    (site / "demo_plugin_module.py").write_text(DEMO)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "demo_plugin_module", raising=False)
    return site


@pytest.fixture
def tiny_llama() -> Callable[[], LlamaForCausalLM]:
    """Makes a llama of two layers, the same one each time."""

    def make() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
            )
        )

    return make
