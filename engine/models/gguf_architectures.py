"""What llama.cpp's names in a GGUF file mean: its metadata as a config.json, its tensors' names.

Only architectures whose names are certain are here. Some of llama.cpp's knowledge stands in its code and not
in the file: where it does, it stands here, too, with the architecture that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from headrace.engine.models.gguf_rope import ROPE_KEYS, ConfigFields, RopeFactors, rope_fields, shortest
from headrace.engine.models.json_file import JsonFields

Shapes = Mapping[str, tuple[int, ...]]

_GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GEMMA2_TENSORS = {
    **_LLAMA_TENSORS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_COMMON_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    *ROPE_KEYS,
}
_GEMMA_LOCAL_THETA = 10_000.0


def _no_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    return {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How one architecture is kept.

    Args:
        model_class, model_type: what the reference library calls it.
        tensors: for each part of a layer the reference's name; with ``{}`` where the file keeps the experts'
            tensors as one and the reference each by itself.
        has_paired_rows: query and key heads' rows are kept so that neighbours are turned together.
        norm_offset: what the file's norm gains have been raised by.
        has_partial_rope: a part of each head may be turned, the first coordinates.
        further_keys: metadata that only this architecture has.
        fields: further fields of the config.json.
    """

    model_class: str
    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: _LLAMA_TENSORS)
    has_paired_rows: bool = False
    norm_offset: float = 0.0
    has_partial_rope: bool = False
    further_keys: Set[str] = frozenset()
    fields: Callable[[JsonFields, Shapes], ConfigFields] = _no_fields

    def target_name(self, name: str) -> str | None:
        """What the reference library calls a tensor; None for one that it doesn't have."""
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            return None
        if stem in _GLOBAL_TENSORS:
            return f"{_GLOBAL_TENSORS[stem]}.{suffix}"
        match stem.split("."):
            case ["blk", index, part] if index.isdecimal() and part in self.tensors:
                return f"model.layers.{int(index)}.{self.tensors[part]}.{suffix}"
            case _:
                return None


def _llama_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }


def _qwen3moe_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    return {
        "num_experts": metadata.integer("qwen3moe.expert_count"),
        "num_experts_per_tok": metadata.integer("qwen3moe.expert_used_count"),
        "moe_intermediate_size": metadata.integer("qwen3moe.expert_feed_forward_length"),
        # llama.cpp always divides by the sum for this architecture.
        "norm_topk_prob": True,
    }


def _phi3_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    context, num_layers = metadata.integer("phi3.context_length"), metadata.integer("phi3.block_count")
    # Files made before the window was written down: llama.cpp knows the releases that have one.
    default = 2047 if context == 4096 and num_layers in (32, 40) else 0
    window = metadata.integer("phi3.attention.sliding_window", default, at_least=0)
    width = head_dim(metadata, "phi3")
    return {
        "hidden_act": "silu",
        "sliding_window": window or None,
        "partial_rotary_factor": metadata.integer("phi3.rope.dimension_count", width) / width,
    }


def _gemma2_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    return {
        **_gemma_fields(metadata, "gemma2", num_layers_of_largest=46),
        "attn_logit_softcapping": metadata.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3_fields(metadata: JsonFields, shapes: Shapes) -> ConfigFields:
    return {
        **_gemma_fields(metadata, "gemma3", num_layers_of_largest=62),
        "rope_local_base_freq": _GEMMA_LOCAL_THETA,
        "sliding_window_pattern": 6,
    }


def _gemma_fields(metadata: JsonFields, name: str, *, num_layers_of_largest: int) -> ConfigFields:
    heads, hidden_size = head_count(metadata, name), metadata.integer(f"{name}.embedding_length")
    is_largest = metadata.integer(f"{name}.block_count") == num_layers_of_largest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.integer(f"{name}.attention.sliding_window"),
        # The largest one scales by the share of a head in the width, the others by the head's width.
        "query_pre_attn_scalar": hidden_size // heads if is_largest else head_dim(metadata, name),
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", has_paired_rows=True, fields=_llama_fields),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", {**_LLAMA_TENSORS, **_HEAD_NORMS}),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_LLAMA_TENSORS, **_HEAD_NORMS, **_EXPERTS},
        further_keys={"expert_count", "expert_used_count", "expert_feed_forward_length"},
        fields=_qwen3moe_fields,
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        "phi3",
        _PHI3_TENSORS,
        has_partial_rope=True,
        further_keys={"attention.sliding_window"},
        fields=_phi3_fields,
    ),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA2_TENSORS,
        norm_offset=1.0,
        further_keys={"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"},
        fields=_gemma2_fields,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_GEMMA2_TENSORS, **_HEAD_NORMS},
        norm_offset=1.0,
        further_keys={"attention.sliding_window"},
        fields=_gemma3_fields,
    ),
}


def architecture_of(metadata: JsonFields) -> tuple[str, GgufArchitecture]:
    """llama.cpp's name of the architecture, and what is known about it.

    Raises:
        ModelLoadError: nothing is, or the file says something of it that would be left out.
    """
    name = metadata.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise metadata.error(f"the architecture {name!r} is not supported as GGUF; supported: {known}")
    known_keys = {f"{name}.{key}" for key in _COMMON_KEYS | architecture.further_keys}
    unknown = {
        key for key in metadata.keys - known_keys if key.startswith(f"{name}.") and metadata.raw(key) != 0
    }
    if unknown:
        raise metadata.error(f"{', '.join(sorted(unknown))} can't be converted")
    return name, architecture


def config_of(metadata: JsonFields, shapes: Shapes, rope_factors: RopeFactors) -> ConfigFields:
    """The config.json that the reference library would use for this file.

    Args:
        metadata: of the GGUF file.
        shapes: of its tensors.
        rope_factors: what those of its tensors hold that stretch rotary positions.

    Raises:
        ModelLoadError: something is missing, or would be left out.
    """
    name, architecture = architecture_of(metadata)
    width = head_dim(metadata, name)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        is_partial = architecture.has_partial_rope and key.endswith("dimension_count")
        if metadata.integer(key, width) != width and not is_partial:
            raise metadata.error(f"{key} differs from the head width {width}, which is not supported")
    if "token_embd.weight" not in shapes:
        raise metadata.error("the tensor token_embd.weight is missing")
    config: ConfigFields = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": metadata.integer(f"{name}.embedding_length"),
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{name}.block_count"),
        "num_attention_heads": head_count(metadata, name),
        "num_key_value_heads": metadata.integer(
            f"{name}.attention.head_count_kv", head_count(metadata, name)
        ),
        "head_dim": width,
        "max_position_embeddings": metadata.integer(f"{name}.context_length"),
        "rms_norm_eps": shortest(metadata.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(metadata.number(f"{name}.rope.freq_base", 10_000.0)),
        **rope_fields(metadata, name, rope_factors),
        # A file without a head computes it from the embedding.
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": _eos_token_ids(metadata),
        **architecture.fields(metadata, shapes),
    }
    for token, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if metadata.raw(f"tokenizer.ggml.{key}") is not None:
            config[token] = metadata.integer(f"tokenizer.ggml.{key}", at_least=0)
    return config


def head_count(metadata: JsonFields, name: str) -> int:
    """Query heads of a layer."""
    return metadata.integer(f"{name}.attention.head_count")


def head_dim(metadata: JsonFields, name: str) -> int:
    """Width of a head."""
    share = metadata.integer(f"{name}.embedding_length") // head_count(metadata, name)
    return metadata.integer(f"{name}.attention.key_length", share)


def _eos_token_ids(metadata: JsonFields) -> list[int]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return sorted({token_id for key in keys for token_id in metadata.integers(key)})
