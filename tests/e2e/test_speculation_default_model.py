"""The default model with drafts says what it says without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.engine import (
    CacheConfig,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    load_model,
)
from tests.support.default_model import default_model_path
from tests.support.requests import make_request
from tests.support.speculation import CoreLoop

TEXTS = (
    "Repeat word for word: The wheel turns as long as the channel is full.\n\nThe wheel",
    "def turn(wheel):\n    wheel.step()\n    return wheel\n\ndef turn_twice(wheel):\n",
    "one two three four one two three four one two",
)


@pytest.fixture(scope="module")
def loaded() -> tuple[LoadedModel, EngineConfig]:
    """The default model, which is its own draft model."""
    path = default_model_path()
    config = EngineConfig(
        model=ModelConfig(path, dtype="float32", max_model_len=128),
        cache=CacheConfig(block_size=4, num_blocks=100),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, path, 4),
    )
    return load_model(config), config


@pytest.fixture(scope="module")
def plain_answers(loaded: tuple[LoadedModel, EngineConfig]) -> list[list[int]]:
    model, config = loaded
    return answers(CoreLoop(model, replace(config, speculation=SpeculationConfig())))


def answers(server: CoreLoop) -> list[list[int]]:
    encode = server.model.tokenizer.encode
    asked = [make_request(prompt=tuple(encode(text)), max_tokens=12, ignore_eos=True) for text in TEXTS]
    return [answer.token_ids for answer in server.answers(asked)]


@pytest.mark.model
@pytest.mark.parametrize("proposer", [Speculation.PROMPT_LOOKUP, Speculation.DRAFT_MODEL])
def test_greedy_answers_in_float32_are_those_of_plain_decoding(
    loaded: tuple[LoadedModel, EngineConfig], plain_answers: list[list[int]], proposer: Speculation
) -> None:
    model, config = loaded
    is_drafted = proposer is Speculation.DRAFT_MODEL
    speculation = config.speculation if is_drafted else SpeculationConfig(proposer, None, 4)
    server = CoreLoop(model, replace(config, speculation=speculation))

    assert answers(server) == plain_answers

    # The model as its own draft is always right; these texts repeat themselves.
    assert server.core.load.totals.speculation.acceptance_rate > (0.99 if is_drafted else 0.3)
