"""A draft model that proposes few of the target's tokens: the answers are the target's all the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine import (
    CacheConfig,
    ConfigError,
    DraftSampling,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    ModelLoadError,
    Request,
    SamplingParams,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    load_model,
)
from headrace.engine.models.loader import load_decoder
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE, ReducedHead
from headrace.engine.runner.protocol import Runner
from headrace.engine.scheduling.plan import DraftWork, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId
from tests.support.blocking import Blocking
from tests.support.paged_step import logits_of
from tests.support.requests import make_request
from tests.support.speculation import Answer, CoreLoop
from tests.support.tiny_models import write_tiny_llama

KNOWN = tuple(range(3, 512, 3))
WORDS = (17, 18, 40, 99, 301)
"""Of them the draft model knows 18, 99."""
NUM_SEQUENCES = 3000
# What chance exceeds once in ten million times, with four degrees of freedom.
LARGEST_CHI_SQUARE = 39.0
SAMPLED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias=((18, 3.0), (17, 1.0))),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(temperature=0.7, top_k=8, seed=3, banned_token_ids=frozenset(range(0, 512, 6))),
    SamplingParams(temperature=0.0, allowed_token_ids=frozenset(range(10, 60))),
    SamplingParams(temperature=1.0, min_p=0.02, typical_p=0.95, seed=4, bad_words=((40,), (60, 61))),
)


def write_reduced(folder: Path, token_ids: tuple[int, ...], *, noise: float = 0.0) -> Path:
    """The tests' target once more, its weights off by some noise, with a reduced head for these tokens."""
    write_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    head = noisy.get("lm_head.weight", noisy["model.embed_tokens.weight"])
    ids = torch.tensor(token_ids)
    ReducedHead(ids, head[ids].contiguous()).save(folder)
    return folder


def config_of(target: Path, draft: Path, draft_sampling: DraftSampling) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=4000),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_num_waiting=4096),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, draft, 3, draft_sampling=draft_sampling),
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reduced(tmp_path_factory.mktemp("draft"), KNOWN, noise=0.01)


@pytest.fixture(scope="module")
def coupled(target: Path, draft: Path) -> tuple[LoadedModel, EngineConfig]:
    config = config_of(target, draft, DraftSampling.COUPLED)
    return load_model(config), config


@pytest.fixture(scope="module")
def rejecting(target: Path, draft: Path) -> tuple[LoadedModel, EngineConfig]:
    config = config_of(target, draft, DraftSampling.REJECTION)
    return load_model(config), config


class Watched(Blocking):
    """A runner that keeps the results of its steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.results: list[StepResult] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Runner.execute`."""
        self.results.append(self._runner.execute(plan))
        return self.results[-1]

    def close(self) -> None:
        """See `Runner.close`."""
        self._runner.close()


def plain(model: LoadedModel, config: EngineConfig) -> CoreLoop:
    return CoreLoop(model, replace(config, speculation=SpeculationConfig()))


def ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def requests(samplings: tuple[SamplingParams, ...], max_tokens: int = 30) -> list[Request]:
    return [
        make_request(
            prompt=tuple(3 + (7 * i + 11 * j * j) % 500 for j in range(3 + 5 * i % 23)),
            max_tokens=max_tokens,
            sampling=sampling,
            ignore_eos=True,
        )
        for i, sampling in enumerate(samplings)
    ]


def test_rows_of_every_kind_answer_as_without_drafts(coupled: tuple[LoadedModel, EngineConfig]) -> None:
    asked = requests(SAMPLED * 2)
    loop = CoreLoop(*coupled)
    assert ids(loop.answers(asked)) == ids(plain(*coupled).answers(asked))
    totals = loop.core.load.totals.speculation
    assert totals.num_accepted_tokens > 20
    assert 0.05 < totals.acceptance_rate < 0.95


def test_no_other_token_is_ever_proposed(target: Path, tmp_path: Path) -> None:
    """One that knows the target's every number, and a third of its tokens: drafts are kept where they are
    what the target says, and each that is kept is a known one."""
    config = config_of(target, write_reduced(tmp_path, KNOWN), DraftSampling.COUPLED)
    model = load_model(config)
    watched = Watched(model.runner)
    loop = CoreLoop(replace(model, runner=watched), config)
    answers = loop.answers(requests((SamplingParams(temperature=0.0),) * 8))
    kept = [
        token_id
        for result in watched.results
        for row in result.rows
        for token_id in row.token_ids[: row.num_accepted_tokens]
    ]
    assert kept
    assert set(kept) <= set(KNOWN)
    assert any(set(answer.token_ids) - set(KNOWN) for answer in answers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_controls_that_leave_it_no_token_leave_the_row_without_drafts(
    coupled: tuple[LoadedModel, EngineConfig],
    rejecting: tuple[LoadedModel, EngineConfig],
    temperature: float,
) -> None:
    unknown = frozenset(range(512)) - frozenset(KNOWN)
    for server in (coupled, rejecting):
        held = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=unknown)
        free = SamplingParams(temperature=0.0)
        asked = requests((held, free))
        loop = CoreLoop(*server)
        told = loop.answers(asked)
        usages = [answer.last.usage for answer in told]
        assert usages[0].num_draft_tokens == 0 < usages[1].num_draft_tokens
        # Nothing has failed: it has nothing to say.
        assert loop.core.load.totals.speculation.num_draft_failures == 0
        assert set(told[0].token_ids) <= unknown
        assert ids(told) == ids(plain(*server).answers(asked))


def test_words_come_as_often_as_the_model_says_and_drafts_are_kept_as_often_as_they_overlap(
    rejecting: tuple[LoadedModel, EngineConfig], target: Path, draft: Path
) -> None:
    model, config = rejecting
    prompt = (7, 8, 9, 18)
    sampling = SamplingParams(temperature=1.2, allowed_token_ids=frozenset(WORDS))
    loop = CoreLoop(model, replace(config, speculation=replace(config.speculation, num_speculative_tokens=1)))
    asked = [
        make_request(
            prompt=prompt, max_tokens=3, sampling=replace(sampling, seed=seed), ignore_eos=True, n=10
        )
        for seed in range(NUM_SEQUENCES // 10)
    ]
    counts, kept = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(5, 2)
    for told in loop.answer(asked):
        for answer in told.values():
            first, second = (WORDS.index(token_id) for token_id in answer.token_ids[:2])
            counts[first, second] += 1
            usage = answer.last.usage
            # The first token comes with the prompt; the one draft stands in the second one's place.
            kept[first] += torch.tensor([usage.num_accepted_draft_tokens, usage.num_draft_tokens])

    def probs(folder: Path, words: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
        decoder = load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder
        logits = logits_of(decoder, torch.tensor(text))[-1, list(words)]
        return (logits.double() / 1.2).softmax(dim=-1)

    expected = probs(target, WORDS, prompt) * counts.sum()
    assert float(((counts.sum(1) - expected) ** 2 / expected).sum()) < LARGEST_CHI_SQUARE
    known = [WORDS.index(word) for word in (18, 99)]
    for i, first in enumerate(WORDS):
        ours, theirs = probs(target, WORDS, (*prompt, first)), probs(draft, (18, 99), (*prompt, first))
        expected = ours * counts[i].sum()
        assert float(((counts[i] - expected) ** 2 / expected).sum()) < LARGEST_CHI_SQUARE
        chance = float(torch.minimum(ours[known], theirs).sum())
        num_kept, num_drafts = kept[i].tolist()
        assert num_drafts == counts[i].sum()
        assert abs(num_kept / num_drafts - chance) <= 3 * math.sqrt(chance * (1 - chance) / num_drafts)


def test_a_damaged_head_stops_the_start_with_the_fault(target: Path, tmp_path: Path) -> None:
    write_reduced(tmp_path, KNOWN)
    ReducedHead(torch.tensor([4, 4]), torch.ones(2, 64)).save(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"{REDUCED_HEAD_FILE}: token_ids must ascend"):
        load_model(config_of(target, tmp_path, DraftSampling.AUTO))


def test_the_token_tables_are_compared_as_ever(target: Path, tmp_path: Path) -> None:
    write_reduced(tmp_path, KNOWN)
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    swapped = text.replace('"a":', '"\0":', 1).replace('"b":', '"a":', 1).replace('"\0":', '"b":', 1)
    (tmp_path / "tokenizer.json").write_text(swapped, encoding="utf-8")
    with pytest.raises(ConfigError, match="has another vocabulary"):
        load_model(config_of(target, tmp_path, DraftSampling.AUTO))


def test_a_draft_model_stops_where_it_doubts_its_own_drafts(
    coupled: tuple[LoadedModel, EngineConfig], draft: Path
) -> None:
    """Of a greedy row; each draft but the last is one that it holds likely enough, with all before it."""
    model, _ = coupled
    blocks = tuple(range(1, 20))
    text = (7, 8, 9, 18)
    decoder = load_decoder(ModelConfig(draft, dtype="float32"), torch.device("cpu")).decoder

    def num_drafts(least_chance: float) -> int:
        row = ScheduledSequence(
            SequenceId(1),
            0,
            text,
            0,
            blocks,
            True,
            SamplingParams(temperature=0.0),
            draft=DraftWork(0, text, 6, least_chance=least_chance),
        )
        (result,) = model.runner.execute(StepPlan(0, (row,))).rows
        return result.num_draft_tokens

    chances, known = [], list(text)
    for _ in range(6):
        probs = logits_of(decoder, torch.tensor(known))[-1, list(KNOWN)].softmax(-1)
        chances.append(float(probs.max()) * (chances[-1] if chances else 1.0))
        known.append(KNOWN[int(probs.argmax())])
    assert num_drafts(0.0) == 6
    for place, chance in enumerate(chances[:-1], 1):
        assert num_drafts(chance * 1.01) == place
        assert num_drafts(chance * 0.99) == place + 1
    assert num_drafts(1.0) == 1
