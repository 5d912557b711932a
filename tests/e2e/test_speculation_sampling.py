"""Texts that are drawn with drafts, and judged by rejection sampling, come as often as the model says."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine import (
    CacheConfig,
    DraftSampling,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    load_model,
)
from headrace.engine.models.loader import load_decoder
from tests.support.paged_step import logits_of
from tests.support.requests import make_request
from tests.support.speculation import CoreLoop
from tests.support.tiny_models import write_tiny_llama

PROMPT = (7, 8, 9)
WORDS = (17, 40, 99, 301)
NUM_SEQUENCES, NUM_REQUESTS = 128, 12
TEMPERATURES = (0.4, 1.2)
# What chance exceeds once in ten million times, with fifteen degrees of freedom.
LARGEST_CHI_SQUARE = 62.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, EngineConfig]:
    """A model, and one that has little in common with it as its draft model."""
    root: Path = tmp_path_factory.mktemp("sampling")
    target = write_tiny_llama(root / "target")
    draft = write_tiny_llama(root / "draft", seed=9, num_hidden_layers=1)
    config = EngineConfig(
        model=ModelConfig(target, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=1000),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=1024, max_num_waiting=4096),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(
            Speculation.DRAFT_MODEL, draft, 2, draft_sampling=DraftSampling.REJECTION
        ),
    )
    return load_model(config), config


def triples_probs(folder: Path, temperature: float) -> Tensor:
    """(4, 4, 4): how likely the model makes each three words behind the prompt."""
    decoder = load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder
    probs = torch.ones(4, 4, 4, dtype=torch.float64)
    for i, j in product(range(4), repeat=2):
        logits = logits_of(decoder, torch.tensor([*PROMPT, WORDS[i], WORDS[j]]))[-3:, WORDS]
        first, second, third = (logits.double() / temperature).softmax(dim=-1)
        probs[i, j] = first[i] * second[j] * third
    return probs


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Pearson's statistic; what is too rare to be counted by itself is counted together."""
    expected = probs.flatten() * counts.sum()
    is_rare = expected < 5
    expected, counts = (
        torch.cat((each[~is_rare], each[is_rare].sum()[None])) for each in (expected, counts.flatten())
    )
    return float(((counts - expected) ** 2 / expected.clamp(min=1.0)).sum())


def test_pairs_of_words_come_as_often_as_the_model_says_in_a_batch_of_mixed_temperatures(
    server: tuple[LoadedModel, EngineConfig],
) -> None:
    model, config = server
    loop = CoreLoop(model, config)
    asked = [
        make_request(
            prompt=PROMPT,
            max_tokens=4,
            n=NUM_SEQUENCES,
            sampling=SamplingParams(temperature=temperature, allowed_token_ids=frozenset(WORDS), seed=seed),
            ignore_eos=True,
        )
        for seed in range(NUM_REQUESTS)
        for temperature in TEMPERATURES
    ]
    greedy = make_request(prompt=PROMPT, max_tokens=4, ignore_eos=True)
    told = loop.answer([*asked, greedy])

    assert 0.2 < loop.core.load.totals.speculation.acceptance_rate < 0.9
    folder = config.model.path
    for i, temperature in enumerate(TEMPERATURES):
        counts = torch.zeros(4, 4, 4, dtype=torch.float64)
        for answers in told[i:-1:2]:
            for answer in answers.values():
                counts[tuple(WORDS.index(token_id) for token_id in answer.token_ids[:3])] += 1
        assert counts.sum() == NUM_SEQUENCES * NUM_REQUESTS
        for dim in (2, 0, 1):
            ours = triples_probs(folder, temperature).sum(dim=dim)
            others = triples_probs(folder, TEMPERATURES[1 - i]).sum(dim=dim)
            assert chi_square(counts.sum(dim=dim), ours) < LARGEST_CHI_SQUARE
            # So many draws tell one distribution from another that is not far.
            assert chi_square(counts.sum(dim=dim), others) > 3 * LARGEST_CHI_SQUARE
