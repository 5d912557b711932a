"""Which config.json files are taken, and what those that are not are told."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.registry import SUPPORTED_ARCHITECTURES, spec_of
from headrace.engine.models.rope import RopeKind
from headrace.engine.models.spec import DecoderSpec
from tests.support.tiny_models import tiny_llama


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
    assert (spec.tied_head, spec.attention_bias, spec.mlp_bias) == (False, False, False)


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
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.rope.theta) == (4, 16, 1e-6, 10_000.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
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
            "'longrope' is not supported",
        ),
        ({"type": "su"}, "'su' is not supported; supported: default, linear, llama3, yarn, dynamic"),
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
    assert spec_with(rope_scaling=settings, rope_parameters=settings).rope.kind is RopeKind.LINEAR
    with pytest.raises(ModelLoadError, match="rope_scaling and rope_parameters disagree"):
        spec_with(rope_scaling=settings, rope_parameters={**settings, "factor": 4.0})
