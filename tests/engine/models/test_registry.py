"""Which config.json files are taken, and what those that are not are told."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.registry import SUPPORTED_ARCHITECTURES, spec_of
from headrace.engine.models.rope import RopeKind
from headrace.engine.models.spec import DecoderSpec
from tests.support.tiny_models import FAMILIES, tiny_family, tiny_llama


def spec_with(**changes: Any) -> DecoderSpec:
    """The spec of the tiny model's config.json after changes; a change to None removes the field."""
    config = {**tiny_llama().config.to_dict(), "architectures": ["LlamaForCausalLM"], **changes}
    return spec_of(
        JsonFields({key: value for key, value in config.items() if value is not None}, "config.json")
    )


def test_the_tiny_model_is_described_as_it_was_built() -> None:
    spec = spec_with()
    assert (spec.family, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("llama", 2, 4, 2)
    assert (spec.hidden_size, spec.head_dim, spec.intermediate_size, spec.vocab_size) == (64, 16, 160, 512)
    assert (spec.tied_head, spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias) == (False,) * 4


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForSequenceClassification", "DeepseekV3ForCausalLM"]
)
def test_another_architecture_is_refused_with_the_list_of_what_is_supported(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec_with(architectures=[name])
    assert name in str(caught.value)
    for supported in SUPPORTED_ARCHITECTURES:
        assert supported in str(caught.value)


def test_a_config_that_names_no_architecture_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"architectures is missing.*LlamaForCausalLM"):
        spec_with(architectures=[])


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_size_is_named(field: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} is missing"):
        spec_with(**{field: None})


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, [64]])
def test_a_size_that_is_no_positive_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"hidden_size is .*whole number of 1 or more"):
        spec_with(hidden_size=value)


def test_old_configs_without_newer_fields_take_the_references_defaults() -> None:
    spec = spec_with(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, rope_parameters=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm.eps) == (4, 16, 1e-6)
    assert [rope.theta for rope in spec.ropes] == [10_000.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "the activation 'relu' (hidden_act) is not supported; supported: silu"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"sliding_window": 128}, "sliding_window is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads can't share 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes': it must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': it must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_would_have_to_be_ignored_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec_with(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "short_factor has 1 entries: it needs 8",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "two lists of numbers of equal length"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": ["2"] * 8}, "long_factor[0]"),
        ({"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}, "above 0"),
        (
            {"type": "su"},
            "'su' is not supported; supported: default, linear, llama3, yarn, dynamic, longrope",
        ),
        ({"type": "mrope"}, "'mrope' is not supported"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "disagree"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor >= 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor has no meaning"),
        ({"rope_type": "default", "shape": 3}, "shape has no meaning for rope type default"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor <",
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "default", "rope_theta": 0}, "theta > 0"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_settings_that_are_not_understood_are_refused(
    spelling: str, rope: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec_with(**{"rope_parameters": None, spelling: rope})
    assert words in str(caught.value)


def test_rope_settings_under_both_names_must_agree() -> None:
    settings = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    [rope] = spec_with(rope_scaling=settings, rope_parameters=settings).ropes
    assert rope.kind is RopeKind.LINEAR
    with pytest.raises(ModelLoadError, match="rope_scaling and rope_parameters disagree"):
        spec_with(rope_scaling=settings, rope_parameters={**settings, "factor": 4.0})


# ---- families ---------------------------------------------------------------------------------------

SIZES: dict[str, object] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
SHORT, LONG = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], [float(n) for n in range(1, 9)]
# As published files spell it, older ones among them.
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "mistral, first release": ("mistral", {"sliding_window": 4096, "rope_theta": 10000.0}),
    "mistral, window left out": ("mistral", {}),
    "mistral, no window": ("mistral", {"sliding_window": None, "rope_theta": 1000000.0, "head_dim": 32}),
    "qwen2, window off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 6, "rope_theta": 1e6},
    ),
    "qwen2, window on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 6},
    ),
    "qwen2.5, yarn": (
        "qwen2",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        },
    ),
    "qwen3": ("qwen3", {"rope_theta": 1e6, "use_sliding_window": False, "sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3-moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "sliding_window": None, "rope_theta": 1e6}),
    "mixtral, defaults": ("mixtral", {}),
    "phi3, short": ("phi3", {"sliding_window": 2047, "rope_theta": 10000.0, "rope_scaling": None}),
    "phi3, another name of longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 1024,
            "rope_scaling": {"type": "yarn", "short_factor": SHORT, "long_factor": LONG},
        },
    ),
    "phi4-mini": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT[:6], "long_factor": LONG[:6]},
            "tie_word_embeddings": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0}),
    "gemma, first release": ("gemma", {"head_dim": 24, "hidden_act": "gelu"}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": 4096,
            "rope_theta": 10000.0,
        },
    ),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 24,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "gemma3, defaults": ("gemma3_text", {}),
    "olmo2": ("olmo2", {"rope_theta": 500000, "num_key_value_heads": None}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
            "rope_theta": 10000000.0,
        },
    ),
    "smollm3": ("smollm3", {"rope_theta": 5000000.0, "no_rope_layer_interval": 4}),
    "smollm3, layers named": ("smollm3", {"no_rope_layers": [1, 0] * 6, "num_hidden_layers": 12}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "rope_theta": 10000, "partial_rotary_factor": 0.5}),
    "stablelm, defaults": ("stablelm", {}),
    "llama, yarn without lengths": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}


@pytest.mark.parametrize("published", PUBLISHED)
def test_a_published_config_means_what_the_reference_makes_of_it(published: str) -> None:
    model_type, fields = PUBLISHED[published]
    written = {**SIZES, **fields, "architectures": [ARCHITECTURES[model_type]]}
    read_by_reference = AutoConfig.for_model(model_type, **deepcopy(written)).to_dict()
    ours = spec_of(JsonFields(written, "config.json"))
    assert ours == spec_of(JsonFields(read_by_reference, "config.json"))


def test_the_first_name_of_longrope_means_longrope() -> None:
    def spec(name: str) -> DecoderSpec:
        scaling = {"type": name, "short_factor": SHORT, "long_factor": LONG}
        fields = {**SIZES, "architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling}
        return spec_of(JsonFields(fields, "config.json"))

    assert spec("su") == spec("longrope")
    assert [rope.kind for rope in spec("su").ropes] == [RopeKind.LONGROPE]


def test_every_supported_architecture_has_variants_that_are_compared_with_the_reference() -> None:
    compared = {f"{stem}ForCausalLM" for stem, _ in FAMILIES.values()}
    assert compared == set(SUPPORTED_ARCHITECTURES) == set(ARCHITECTURES.values())


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "full_attention and sliding_attention"),
        ("gemma2", {"sliding_window": None}, "sliding_window is null"),
        ("gemma2", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ("gemma2", {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "chunked_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 5 layers"),
        ("olmo2", {"sliding_window": 64}, "sliding_window is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "not one of this family"),
        ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "3 of a head's 16 coordinates"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("mixtral", {"num_experts_per_tok": 7}, "can't go through 7 of 6 experts"),
    ],
)
def test_what_a_family_would_have_to_ignore_is_refused(
    variant: str, changes: dict[str, object], words: str
) -> None:
    model = tiny_family(variant)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], **changes}
    with pytest.raises(ModelLoadError) as caught:
        spec_of(JsonFields(config, "config.json"))
    assert words in str(caught.value)
