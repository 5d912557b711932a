"""A layer is put together of what its family says, and kept as the server was told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.engine.models import decoder_layer
from headrace.engine.models.decoder_layer import DecoderLayer
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.layers import DenseLinear
from headrace.engine.models.registry import spec_of
from headrace.engine.native.quantised import WeightKind
from tests.support.tiny_models import tiny_family


class RandomWeights:
    """Every tensor there is, of the right shape."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def read(self, name: str) -> Tensor:
        return torch.ones(self._shapes[name])


@pytest.mark.parametrize("variant", ["llama", "phi3", "qwen2", "mixtral", "qwen3-moe"])
def test_every_linear_of_a_layer_is_kept_in_the_kind_that_was_asked_for(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[WeightKind] = []

    def noted(weight: Tensor, bias: Tensor | None = None, kind: WeightKind = WeightKind.SAME) -> DenseLinear:
        kinds.append(kind)
        return DenseLinear(weight, bias)

    monkeypatch.setattr(decoder_layer, "make_linear", noted)
    config = tiny_family(variant).config
    fields = {
        **config.to_dict(),
        "architectures": [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"],
    }
    spec = spec_of(JsonFields(fields, "config.json"))
    DecoderLayer(spec, RandomWeights(dict(spec.tensors())), 0, WeightKind.INT8)
    num_mlps = 1 if spec.layers[0].experts is None else spec.layers[0].experts.count
    assert kinds == [WeightKind.INT8] * (2 + 2 * num_mlps)
