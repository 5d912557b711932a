"""The default model with drafts says what it says without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.engine import (
    CacheConfig,
    EngineConfig,
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


@pytest.mark.model
@pytest.mark.parametrize("proposer", [Speculation.PROMPT_LOOKUP, Speculation.DRAFT_MODEL])
def test_greedy_answers_in_float32_are_those_of_plain_decoding(proposer: Speculation) -> None:
    path = default_model_path()
    base = EngineConfig(
        model=ModelConfig(path, dtype="float32", max_model_len=512),
        cache=CacheConfig(block_size=4, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        num_threads=torch.get_num_threads(),
    )
    draft = path if proposer is Speculation.DRAFT_MODEL else None
    config = replace(base, speculation=SpeculationConfig(proposer, draft, 4))
    model = load_model(config)
    requests = [
        make_request(prompt=tuple(model.tokenizer.encode(text)), max_tokens=16, ignore_eos=True)
        for text in TEXTS
    ]
    fast = CoreLoop(model, config)

    told = [answer.token_ids for answer in fast.answers(requests)]

    assert told == [answer.token_ids for answer in CoreLoop(model, base).answers(requests)]
    # The model as its own draft is always right; these texts repeat themselves.
    totals = fast.core.load.totals.speculation
    assert totals.acceptance_rate > (0.99 if draft is not None else 0.3)
