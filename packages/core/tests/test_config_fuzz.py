"""Whatever a configuration holds, the only errors are the two that users are promised, each one sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from foak.core import AccelerationFramework, AccelerationPlugin, ConfigError, Key, UnsupportedError


class Fuzzed(AccelerationPlugin):
    name = "fuzzed"
    any_of = ("training.fused_ops_and_kernels", "peft.quantization.fused_ops_and_kernels")
    all_of = ("training.attention.padding_free", "training.dataloader.multipack")
    keys = (
        Key("fast_loss", (True, False, "auto", "fused_linear")),
        Key("count", (int,), default=1),
        Key("scale", (float, None)),
        Key("names", (list, str)),
        Key("more", (dict,)),
    )


WORDS = (
    "plugins",
    "acceleration",
    "training",
    "peft",
    "quantization",
    "attention",
    "dataloader",
    "padding_free",
    "multipack",
    "fused_ops_and_kernels",
    "fast_loss",
    "count",
    "scale",
    "names",
    "more",
    "moe",
    "auto_gptq",
    "auto",
)
keys = st.one_of(st.sampled_from(WORDS), st.text(max_size=8), st.none(), st.booleans(), st.integers(), st.floats())
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(st.integers(), max_size=2),
    ),
    max_leaves=12,
)
# Paths that exist, with anything at their end: what random keys would hardly ever reach.
sections = st.fixed_dictionaries(
    {},
    optional={
        "fast_loss": values,
        "count": values,
        "scale": values,
        "names": values,
        "more": values,
        "typo": scalars,
    },
)
trees = st.fixed_dictionaries(
    {},
    optional={
        "training": st.one_of(
            scalars,
            st.fixed_dictionaries(
                {},
                optional={
                    "fused_ops_and_kernels": st.one_of(values, sections),
                    "attention": st.one_of(values, st.fixed_dictionaries({"padding_free": sections})),
                    "dataloader": st.one_of(values, st.fixed_dictionaries({"multipack": sections})),
                },
            ),
        ),
        "peft": st.one_of(
            values, st.fixed_dictionaries({"quantization": st.fixed_dictionaries({"fused_ops_and_kernels": sections})})
        ),
    },
)


def build(config: Any) -> str | None:
    """Makes a framework; gives the message of the error that is allowed."""
    try:
        AccelerationFramework(config, plugins=[Fuzzed])
    except (ConfigError, UnsupportedError) as error:
        message = str(error)
        assert message
        assert "\n" not in message
        return message
    return None


@settings(max_examples=300, deadline=None)
@given(st.one_of(values, values.map(lambda tree: {"plugins": tree}), trees.map(lambda tree: {"plugins": tree})))
def test_any_mapping(config: Any) -> None:
    if config is not None and not isinstance(config, str):  # those would name files
        build(config)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_known_section(tree: dict[str, Any]) -> None:
    message = build({"plugins": tree})
    assert message is None or message.startswith("configuration: plugins")


yaml_text = st.one_of(
    st.text(alphabet="plugins:{}[]&*!<>|#%@`\"'\n\t -?,.0123456789abtrueyn~=_", max_size=60),
    st.text(max_size=40),
    st.tuples(st.sampled_from(WORDS), st.text(max_size=20)).map(lambda pair: f"plugins:\n  {pair[0]}: {pair[1]}"),
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(yaml_text.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=40)))
def test_any_file(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "foak.yaml")
        path.write_bytes(content)
        message = build(path)
        assert message is None or message.startswith(f"{path}: ")


def test_the_fuzzed_trees_reach_both_ends() -> None:
    """What the two tests above could miss: that a valid tree is accepted and every section is really checked."""
    assert build({"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": True, "more": {"x": 1}}}}}) is None
    assert build({"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": 1}}}}) is not None
