"""Numbers of a config.json that no model has: refused by name, before anything is made in them."""

from __future__ import annotations

import pytest

from headrace.engine.errors import ModelLoadError
from tests.engine.models.test_registry import spec_with


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**6),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("num_attention_heads", 10**9),
        ("num_key_value_heads", 10**9),
        ("head_dim", 10**9),
        ("vocab_size", 10**9),
        ("max_position_embeddings", 10**12),
        ("max_position_embeddings", 10**30),
    ],
)
def test_a_size_beyond_every_model_is_refused_before_anything_is_counted_up(field: str, value: int) -> None:
    with pytest.raises(
        ModelLoadError, match=f"{field} is {value}: it must be a whole number of [0-9]+ or less"
    ):
        spec_with(**{field: value})


def test_layers_times_experts_are_bounded_too() -> None:
    with pytest.raises(ModelLoadError, match=r"num_hidden_layers and num_experts make 16777216 experts"):
        spec_with(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4096, num_experts=4096)


def test_layers_times_heads_with_own_gains_are_bounded_too() -> None:
    sizes = {"num_hidden_layers": 4096, "num_attention_heads": 128, "num_key_value_heads": 128}
    with pytest.raises(ModelLoadError, match=r"num_hidden_layers and num_attention_heads make 524288 heads"):
        spec_with(architectures=["StableLmForCausalLM"], qk_layernorm=True, **sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ({"hidden_size": 33, "head_dim": None}, "hidden_size is 33: without head_dim it must be a multiple"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ],
)
def test_sizes_that_do_not_fit_together_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec_with(**changes)
    assert words in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({**YARN, "rope_theta": 1.0}, "rope_theta above 1, not 1.0"),
        ({**YARN, "rope_theta": 0.5}, "rope_theta above 1, not 0.5"),
        ({**YARN, "beta_fast": -5}, "beta_fast -5.0"),
        ({**YARN, "beta_slow": -1}, "beta_slow -1.0"),
        ({**YARN, "beta_slow": 40}, "beta_slow 40.0 and beta_fast 32.0"),
        ({**YARN, "beta_fast": 1e308}, "beta_fast 1e+308"),
        ({**YARN, "beta_slow": 5e-324}, "beta_slow 5e-324"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": -14.4}, "mscale_all_dim of 0 or more"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor must be above 0"),
        ({**YARN, "factor": 1e308}, "factor >= 1, at most"),
        ({**YARN, "factor": 0.5}, "factor >= 1"),
        ({**LINEAR, "factor": float("inf")}, "factor is inf"),
        ({**LINEAR, "factor": 10**400}, "factor is 1000"),
        ({**LINEAR, "rope_theta": 1e300}, "rope_theta 1e+300"),
        ({**LINEAR, "rope_theta": float("nan")}, "rope_theta is nan"),
        ({**LINEAR, "original_max_position_embeddings": 10**30}, "original_max_position_embeddings is 1000"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings of 2 or more",
        ),
    ],
)
def test_rotary_numbers_that_the_formulas_cannot_take_are_refused(
    rope: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        spec_with(rope_parameters=rope)
    assert words in str(caught.value)


def test_a_part_of_the_head_beyond_the_head_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"partial_rotary_factor is 1e\+308: it must be above 0"):
        spec_with(architectures=["StableLmForCausalLM"], partial_rotary_factor=1e308)
