"""A model that falls ill wherever one token stands."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.engine.attention.backend import AttentionStep
from headrace.engine.models.decoder import Decoder


class PoisonedDecoder:
    """Turns the hidden states of one token id into NaN, as a fault in a layer would."""

    def __init__(self, decoder: Decoder, token_id: int) -> None:
        self._decoder, self._token_id = decoder, token_id

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        is_sick = input_ids == self._token_id
        hidden = self._decoder.hidden(input_ids, positions, _PoisonedStep(attention, is_sick), rows)
        return hidden.masked_fill(is_sick[rows][:, None], math.nan)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class _PoisonedStep:
    def __init__(self, inner: AttentionStep, is_sick: Tensor) -> None:
        self._inner, self._is_sick = inner, is_sick[:, None, None]

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._inner.write_kv(
            layer, key.masked_fill(self._is_sick, math.nan), value.masked_fill(self._is_sick, math.nan)
        )

    def attend(self, layer: int, query: Tensor, spec: object) -> Tensor:
        return self._inner.attend(layer, query, spec)  # type: ignore[arg-type]
