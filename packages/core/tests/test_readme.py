"""The README's example plugin runs as it is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from foak.core import UnsupportedError

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_example_plugin_patches_a_model(tiny_llama: Callable[[], LlamaForCausalLM]) -> None:
    _, plugin, use = BLOCKS
    model, plain = tiny_llama(), tiny_llama()
    names: dict[str, Any] = {"model": model}
    exec(compile(plugin, "README.md", "exec"), names)
    exec(compile(use, "README.md", "exec"), names)
    report = names["report"]
    assert len(report.patched) == 5
    assert {record.rule for record in report.records} == {"my_norm"}
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    names["framework"].restore()
    assert "forward" not in model.model.norm.__dict__
    with pytest.raises(UnsupportedError, match=r"plugins\.training\.my_norm\.fast_norm"):
        names["framework"].apply(_without_norms(plain))


def _without_norms(model: Any) -> Any:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(module, name, torch.nn.Identity())
    return model


def test_the_first_example_uses_what_there_is() -> None:
    import foak.core

    first = BLOCKS[0]
    framework = foak.core.AccelerationFramework
    for method in re.findall(r"framework\.(\w+)\(", first):
        assert callable(getattr(framework, method))


def test_the_entry_point_group_is_the_one_that_is_searched() -> None:
    from foak.core.discovery import GROUP

    assert f'[project.entry-points."{GROUP}"]' in README


def test_the_modules_that_the_readme_lists_are_those_that_exist() -> None:
    import foak.core

    table = README.partition("## Modules")[2]
    listed = set(re.findall(r"`(\w+)`", table))
    (folder,) = foak.core.__path__
    public = {p.stem for p in Path(folder).iterdir() if not p.stem.startswith("_") and p.suffix in ("", ".py")}
    assert listed == public - {"py", "errors"}
