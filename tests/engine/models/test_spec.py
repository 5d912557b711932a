"""The tensors that a spec asks for are those that the reference library saves."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.registry import spec_of
from headrace.engine.models.spec import HEAD
from tests.support.tiny_models import tiny_llama


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 24, "num_key_value_heads": 1},
        {"num_hidden_layers": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_equal_the_references(overrides: dict[str, Any], tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied, **overrides)
    fields = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    spec = spec_of(JsonFields(fields, "config.json"))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected[HEAD]
    assert spec.tensors() == expected
