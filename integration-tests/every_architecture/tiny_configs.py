"""Every type that transformers maps to a causal language model, as a configuration small enough for one step on a CPU.

`SIZES` gives one tiny value to every field of that name, in whatever configuration it occurs, sub-configurations
included. That builds most types. What a type needs beyond it stands in `SPECIAL`, one row for each such type; what
cannot be built on a CPU stands in `UNTESTABLE` with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCAB_SIZE = 101

_FIELDS_BY_SIZE: dict[int, str] = {
    VOCAB_SIZE: """
        vocab_size decoder_vocab_size output_vocab_size text_vocab_size unpadded_vocab_size vocab_size_per_layer_input
        shape_vocab_size pronunciation_vocab_size
    """,
    # widths
    64: """
        hidden_size d_model n_embd embed_dim embedding_dim emb_dim attention_hidden_size backbone_hidden_size
        cross_attention_hidden_size input_embedding_size output_embedding_size embedding_size word_embed_proj_dim
        lru_width dim_model_base hidden_size_global pronunciation_embed_dim shape_embed_dim out_hidden_size
    """,
    96: """
        intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size n_inner d_inner dff dim_ff
        feed_forward_size mlp_dim intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size
    """,
    48: """
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size
    """,
    # depths
    2: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_decoder_layers
        num_encoder_layers num_blocks conf_num_hidden_layers
        num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads linear_num_heads
        num_experts_per_tok top_k_experts moe_top_k
    """,
    # heads, experts
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
        num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads indexer_n_heads
        linear_num_value_heads mamba_n_heads n_mamba_heads mamba_num_heads conf_num_attention_heads
        num_experts num_local_experts n_routed_experts moe_num_experts
    """,
    1: """
        n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts
        mamba_n_groups mamba_ngroups n_groups
    """,
    # of a head, ranks, states
    16: """
        head_dim dim_head d_head swa_head_dim index_head_dim indexer_head_dim attention_head_size qk_rope_head_dim
        qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank linear_head_dim
    """,
    8: """
        rotary_dim mamba_d_state state_size ssm_state_size laurel_rank hidden_size_per_layer_input linear_key_head_dim
        linear_value_head_dim sliding_window sliding_window_size window_size attention_window_size chunk_size
        mamba_chunk_size patch_size
    """,
    32: "mamba_d_head mamba_head_dim image_size",
    128: """
        max_position_embeddings n_positions max_seq_len n_ctx max_target_positions max_source_positions context_length
    """,
}

SIZES: dict[str, int] = {name: size for size, names in _FIELDS_BY_SIZE.items() for name in names.split()}
"""The value of every field of that name."""

_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True}

BatchKind = Literal["text", "image", "codebooks", "assistant"]


@dataclass(frozen=True)
class TinyType:
    """One type of the mapping.

    Attributes:
        model_type: its name in transformers.
        fields: fields of its configuration, beyond `SIZES`; a mapping goes into the sub-configuration of that name.
        part: the sub-configuration that its model class takes, where `AutoModelForCausalLM` does not find it by itself.
        batch: what its forward takes; see `tiny_batches`.
    """

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    batch: BatchKind = "text"

    def config(self) -> PreTrainedConfig:
        """The tiny configuration, as `AutoModelForCausalLM.from_config` takes it (or `part` of it)."""
        config_class = CONFIG_MAPPING[self.model_type]
        config = config_class(**_merged(_sized(config_class), self.fields))
        return getattr(config, self.part) if self.part else config


def _sized(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Tiny values for the fields that a configuration class has, without dropout, sub-configurations included."""
    values: dict[str, Any] = {}
    for declared in dataclasses.fields(config_class):
        name, default = declared.name, declared.default
        if name in SIZES or name in _TOKENS:
            values[name] = SIZES.get(name, _TOKENS.get(name))
        elif "drop" in name and isinstance(default, int | float) and not isinstance(default, bool):
            values[name] = type(default)(0)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention has no groups of heads
    for name, part in _parts(config_class).items():
        values[name] = {**_sized(part), "model_type": part.model_type}
    return values


def _parts(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """The sub-configurations that a configuration always has."""
    defaults = config_class.sub_configs_defaults
    if not defaults:
        return dict(config_class.sub_configs or {})
    return {
        name: CONFIG_MAPPING[part.model_type] if part.config_class is AutoConfig else part.config_class
        for name, part in defaults.items()
        if not part.optional
    }


def _merged(values: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in fields.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


_SLIDING_AND_FULL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_AND_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_AND_SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_GEMMA4: dict[str, Any] = {**_SLIDING_AND_FULL, "global_head_dim": 16}
_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_DOTS3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention"],
    "head_dim": 32,
    "index_topk": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_QWEN4: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_kv_heads": 1,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}

# Two layers of a default pattern are often of one kind: these get one of each.
_ONE_OF_EACH: dict[str, tuple[dict[str, Any], str]] = {
    "sliding and full attention": (
        _SLIDING_AND_FULL,
        "afmoe cohere2 cohere2_moe exaone4 exaone_moe gemma3_text kolibri1 ministral olmo3",
    ),
    "linear and full attention": (
        _LINEAR_AND_FULL,
        "granitemoehybrid kimi_linear qwen3_5_moe_text qwen3_5_text qwen3_next",
    ),
    "hybrid attention, sliding and full": (
        {"layer_types": ["hybrid_sliding", "hybrid"]},
        "inkling2_loop_text inkling2_text inkling_text",
    ),
    "convolution and attention": ({"layer_types": ["conv", "full_attention"]}, "lfm3"),
    "dense and sparse": (_DENSE_AND_SPARSE, "beam deepseek_v32 glm_moe_dsa"),
}

_OWN: tuple[TinyType, ...] = (
    TinyType("bailing_hybrid", {**_LINEAR_AND_FULL, **_DENSE_AND_SPARSE}),
    TinyType("bamba", {"attn_layer_indices": [1]}),
    TinyType("blt", {"patch_size": 4, "encoder_hash_byte_group_vocab": 64, "use_cache": False}),
    TinyType(
        "cohere_compass_text", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    ),
    TinyType("dbrx", {"attn_config": {"clip_qkv": 8.0, "rope_theta": 1e4}}),
    TinyType("deepseek_v3", {"first_k_dense_replace": 1}),
    TinyType(
        "deepseek_v4",
        {
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        },
    ),
    TinyType("doge", {"is_moe": True}),
    TinyType("dory", {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "use_cache": False}),
    TinyType(
        "dots3_note",
        {
            "text_config": _DOTS3,
            "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, 4]},
            "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        },
    ),
    TinyType("dots3_note_text", _DOTS3),
    TinyType("ernie4_5_moe", {"moe_k": 2}),
    TinyType("falcon_h1", {"mamba_d_ssm": 128}),
    TinyType("flint", {"mlp_only_layers": [0]}),
    TinyType("gemma3", {"text_config": _SLIDING_AND_FULL}),
    TinyType("gemma3n", {"text_config": _GEMMA3N}),
    TinyType("gemma3n_text", _GEMMA3N),
    TinyType("gemma4", {"text_config": _GEMMA4}),
    TinyType("gemma4_text", {**_GEMMA4, "enable_moe_block": True}),
    TinyType(
        "gemma4_assistant",
        {
            "text_config": {
                **_GEMMA4,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "num_kv_shared_layers": 2,
            }
        },
        batch="assistant",
    ),
    TinyType("gemma4_unified", {"text_config": _GEMMA4}),
    TinyType("gemma4_unified_text", _GEMMA4),
    TinyType("gemma4_unified_assistant", {"text_config": {**_GEMMA4, "num_kv_shared_layers": 2}}, batch="assistant"),
    TinyType("git", batch="image"),
    TinyType("gpt_neo", {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]}),
    TinyType("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0}),
    TinyType("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    TinyType(
        "llama4", {"text_config": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}}
    ),
    TinyType(
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": [1]},
    ),
    TinyType("mamba2", {"num_heads": 4, "head_dim": 32}),
    TinyType("musicgen", part="decoder", batch="codebooks"),
    TinyType("musicgen_melody", part="decoder", batch="codebooks"),
    TinyType("qwen3_5", {"text_config": _LINEAR_AND_FULL}),
    TinyType("qwen3_5_moe", {"text_config": _LINEAR_AND_FULL}),
    TinyType("qwen4_exp", {"text_config": _QWEN4}),
    TinyType("qwen4_exp_text", _QWEN4),
    TinyType("recurrent_gemma", {"block_types": ["recurrent", "attention"]}),
    # A fixed seed for its hashing, which otherwise differs from call to call.
    TinyType("reformer", {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "hash_seed": 0, "num_buckets": 2}),
    TinyType("xlstm", {"qk_dim_factor": 1.0, "chunk_size": 11, "mode": "train", "use_cache": False}),
    TinyType("xmod", {"default_language": "en_XX"}),
    TinyType(
        "zamba",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "num_key_value_heads": 4,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
        },
    ),
    TinyType("zaya", {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid_sliding", "hybrid"]}),
    TinyType("zamba2", {"layers_block_type": ["linear_attention", "hybrid"]}),
)

SPECIAL: tuple[TinyType, ...] = (
    *(TinyType(name, fields) for fields, names in _ONE_OF_EACH.values() for name in names.split()),
    *_OWN,
)
"""The types that need more than `SIZES`."""


@dataclass(frozen=True)
class Untestable:
    """A type that cannot be built here.

    Attributes:
        model_type: its name in transformers.
        reason: why, in a few words for the table of counts.
        package: the package without which it cannot be built; where that is installed, the row does not count.
    """

    model_type: str
    reason: str
    package: str


UNTESTABLE: tuple[Untestable, ...] = (
    Untestable("gemma3n", "its vision tower comes from the package timm (gemma3n_text is walked)", "timm"),
)
"""The types that are not walked; a test fails where one of them can be built after all."""

_SPECIAL = {row.model_type: row for row in SPECIAL}


def tiny_type(model_type: str) -> TinyType:
    """The row of a type: its own, or the generic one."""
    return _SPECIAL.get(model_type, TinyType(model_type))
