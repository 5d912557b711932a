"""Whoever proposes, and however badly: a real model says what it says without speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
    TokenLogprobs,
    load_model,
)
from tests.support.requests import make_request
from tests.support.speculation import Answer, CoreLoop
from tests.support.tiny_models import WINDOW, write_tiny_family, write_tiny_llama

NUM_PROMPTS = 32
DRAFTS = ("perfect", "half right", "useless")
SAMPLED = (
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2, frequency_penalty=0.5, presence_penalty=0.2),
    SamplingParams(temperature=0.7, top_k=8, seed=3, repetition_penalty=1.2, logit_bias=((17, 2.0),)),
    SamplingParams(temperature=1.0, min_p=0.02, typical_p=0.95, seed=4, bad_words=((40,), (60, 61))),
)


def with_noise(folder: Path) -> Path:
    """The model there, made to say something else than it did about half the time."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    noisy = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and draft models for it of every worth."""
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(root / "target")
    near = with_noise(write_tiny_llama(root / "near"))
    other = write_tiny_llama(root / "other", seed=99, num_hidden_layers=1)
    return {"target": target, "perfect": target, "half right": near, "useless": other}


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., tuple[LoadedModel, EngineConfig]]:
    """Load the model with a way of speculating; each only once."""

    @cache
    def loaded(draft: str | None, num_blocks: int = 2000) -> tuple[LoadedModel, EngineConfig]:
        kind = Speculation.NONE if draft is None else Speculation.DRAFT_MODEL
        config = EngineConfig(
            model=ModelConfig(folders["target"], dtype="float32"),
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
            num_threads=torch.get_num_threads(),
            speculation=SpeculationConfig(
                kind,
                None if draft is None else folders[draft],
                draft_sampling=DraftSampling.COUPLED,
            ),
        )
        return load_model(config), config

    return loaded


class Servers:
    """Engines over the model, one for each way of speculating."""

    def __init__(self, load: Callable[..., tuple[LoadedModel, EngineConfig]]) -> None:
        self._load = load

    def plain(self) -> CoreLoop:
        return CoreLoop(*self._load(None))

    def make(self, proposer: str, num_tokens: int | None = None, *, num_blocks: int = 2000) -> CoreLoop:
        is_lookup = proposer == "prompt_lookup"
        model, config = self._load(None if is_lookup else proposer, num_blocks)
        kind = Speculation.PROMPT_LOOKUP if is_lookup else Speculation.DRAFT_MODEL
        speculation = replace(config.speculation, kind=kind, num_speculative_tokens=num_tokens)
        return CoreLoop(model, replace(config, speculation=speculation))


@pytest.fixture
def servers(load: Callable[..., tuple[LoadedModel, EngineConfig]]) -> Servers:
    return Servers(load)


def prompts(number: int) -> list[tuple[int, ...]]:
    """Some short, some long, some that repeat themselves; lengths of every remainder by the block size."""
    made = []
    for i in range(number):
        length = 3 + 5 * i % 61
        text = [3 + (7 * i + 11 * j * j) % 500 for j in range(length)]
        made.append(tuple(text + text[: length // 2]) if i % 3 == 0 else tuple(text))
    return made


def requests(number: int, max_tokens: int, sampling: SamplingParams | None = None) -> list[Request]:
    return [
        make_request(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        for prompt in prompts(number)
    ]


def ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("proposer", [*DRAFTS, "prompt_lookup"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, None])
def test_greedy_answers_are_those_of_plain_decoding(
    servers: Servers, proposer: str, num_tokens: int | None
) -> None:
    asked = requests(10, 40)
    server = servers.make(proposer, num_tokens)

    assert ids(server.answers(asked)) == ids(servers.plain().answers(asked))

    totals = server.core.load.totals.speculation
    if num_tokens is not None and proposer in DRAFTS:
        low, high = {"perfect": (1.0, 1.0), "half right": (0.1, 0.9), "useless": (0.0, 0.2)}[proposer]
        assert low <= totals.acceptance_rate <= high
        assert len(totals.drafted_by_place) == num_tokens


@pytest.fixture(scope="module")
def long_plain_answers(load: Callable[..., tuple[LoadedModel, EngineConfig]]) -> list[list[int]]:
    return ids(Servers(load).plain().answers(requests(NUM_PROMPTS, 128)))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [*DRAFTS, "prompt_lookup"])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_many_long_greedy_answers_are_those_of_plain_decoding(
    servers: Servers, long_plain_answers: list[list[int]], proposer: str, num_tokens: int
) -> None:
    told = servers.make(proposer, num_tokens).answers(requests(NUM_PROMPTS, 128))

    assert ids(told) == long_plain_answers


@pytest.mark.parametrize("proposer", [*DRAFTS, "prompt_lookup"])
@pytest.mark.parametrize("sampling", SAMPLED, ids=range(len(SAMPLED)))
def test_a_seed_gives_the_same_answer_with_and_without_speculation(
    servers: Servers, proposer: str, sampling: SamplingParams
) -> None:
    asked = requests(8, 24, sampling)

    assert ids(servers.make(proposer, 4).answers(asked)) == ids(servers.plain().answers(asked))


@pytest.mark.small_blocks
def test_a_pool_so_small_that_sequences_are_preempted_changes_nothing(servers: Servers) -> None:
    asked = requests(10, 40)
    server = servers.make("half right", 4, num_blocks=70)

    assert ids(server.answers(asked)) == ids(servers.plain().answers(asked))
    assert server.core.load.totals.num_preemptions > 0


@pytest.mark.small_blocks
def test_what_a_speculating_request_leaves_in_the_cache_is_good(servers: Servers) -> None:
    """Asked again, and longer: blocks that held refused drafts once are shared now."""
    server, plain = servers.make("half right", 5), servers.plain()
    first = server.answers(requests(8, 30))
    longer = [
        make_request(
            prompt=request.prompt_token_ids + tuple(answer.token_ids), max_tokens=20, ignore_eos=True
        )
        for request, answer in zip(requests(8, 30), first, strict=True)
    ]

    again = server.answers(longer)

    assert ids(again) == ids(plain.answers(longer))
    assert all(answer.last.usage.num_cached_tokens >= 28 for answer in again)


@pytest.mark.small_blocks
@pytest.mark.parametrize("variant", ["mistral", "qwen2, upper layers windowed"])
def test_long_texts_of_a_model_with_a_sliding_window_are_those_of_plain_decoding(
    tmp_path: Path, variant: str
) -> None:
    """Twenty windows long; then the same again and on, from what the drafts left in the cache."""
    target = write_tiny_family(tmp_path / "target", variant, max_position_embeddings=1024)
    near = write_tiny_family(tmp_path / "near", variant, max_position_embeddings=1024)
    config = EngineConfig(
        model=ModelConfig(target, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=1000),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, with_noise(near), 3),
    )
    without = replace(config, speculation=SpeculationConfig())
    server, plain = CoreLoop(load_model(config), config), CoreLoop(load_model(without), without)
    asked = requests(3, 20 * WINDOW)

    told = ids(server.answers(asked))

    assert told == ids(plain.answers(asked))
    assert 0.1 < server.core.load.totals.speculation.acceptance_rate < 0.9
    longer = [
        make_request(prompt=request.prompt_token_ids + tuple(text), max_tokens=2 * WINDOW, ignore_eos=True)
        for request, text in zip(asked, told, strict=True)
    ]
    again = server.answers(longer)
    cold = [replace(request, uses_prefix_cache=False) for request in longer]
    assert ids(again) == ids(plain.answers(cold))
    assert all(answer.last.usage.num_cached_tokens >= 19 * WINDOW for answer in again)


def close(one: list[TokenLogprobs], other: list[TokenLogprobs]) -> bool:
    """Whether logprobs are the same but for rounding."""
    return [entry.chosen.token_id for entry in one] == [entry.chosen.token_id for entry in other] and all(
        a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
        and a.chosen.rank == b.chosen.rank
        and [top.token_id for top in a.top] == [top.token_id for top in b.top]
        and [top.logprob for top in a.top] == pytest.approx([top.logprob for top in b.top], abs=1e-4)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("num_tokens", range(1, 6))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_the_target_s_own_one_per_token(
    servers: Servers, num_tokens: int, temperature: float
) -> None:
    sampling = SamplingParams(
        temperature=temperature, seed=3, frequency_penalty=0.4, num_logprobs=5, num_prompt_logprobs=2
    )
    asked = requests(4, 20, sampling)

    for mine, plain in zip(
        servers.make("half right", num_tokens).answers(asked), servers.plain().answers(asked), strict=True
    ):
        assert mine.token_ids == plain.token_ids == [entry.chosen.token_id for entry in mine.logprobs]
        assert close(mine.logprobs, plain.logprobs)
        assert close(mine.prompt_logprobs, plain.prompt_logprobs)


def test_several_sequences_and_the_best_of_many_are_those_of_plain_decoding(servers: Servers) -> None:
    asked = [
        make_request(prompt=prompt, max_tokens=20, n=n, best_of=best_of, sampling=SAMPLED[0], ignore_eos=True)
        for prompt, n, best_of in zip(prompts(4), (1, 3, 2, 1), (1, 3, 4, 3), strict=True)
    ]
    plain = servers.plain().answer(asked)
    for proposer in ("half right", "prompt_lookup"):
        told = servers.make(proposer, 3).answer(asked)
        assert [{i: a.token_ids for i, a in each.items()} for each in told] == [
            {i: a.token_ids for i, a in each.items()} for each in plain
        ]


@pytest.mark.parametrize("vocab_size", [500, 576])
def test_padding_is_no_difference_of_vocabularies(
    servers: Servers, folders: dict[str, Path], tmp_path: Path, vocab_size: int
) -> None:
    draft = write_tiny_llama(tmp_path / "draft", vocab_size=vocab_size)
    config = EngineConfig(
        model=ModelConfig(folders["target"], dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=200),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, draft, 3),
    )
    server = CoreLoop(load_model(config), config)
    # One id that the smaller model has no row for.
    asked = [make_request(prompt=(5, 510, 17, 40), max_tokens=20, ignore_eos=True), *requests(4, 20)]

    assert ids(server.answers(asked)) == ids(servers.plain().answers(asked))


def test_another_vocabulary_is_refused_at_start_with_the_first_difference(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    draft = write_tiny_llama(tmp_path / "foreign")
    tokenizer = (draft / "tokenizer.json").read_text(encoding="utf-8")
    # Two tokens change places: the sizes are the same.
    swapped = (
        tokenizer.replace('"!":3', '"!":0000').replace('"\\"":4', '"!":3').replace('"!":0000', '"\\"":4')
    )
    swapped = swapped.replace('"!": 3', '"!": 0000').replace('"\\"": 4', '"\\"": 3').replace("0000", "4")
    assert swapped != tokenizer
    (draft / "tokenizer.json").write_text(swapped, encoding="utf-8")
    config = EngineConfig(
        model=ModelConfig(folders["target"], dtype="float32"),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, draft),
    )
    with pytest.raises(ConfigError, match="token 3 is '\"' there and '!'"):
        load_model(config)


def test_a_draft_model_without_a_tokenizer_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    draft = write_tiny_llama(tmp_path / "bare")
    for file in draft.glob("*token*"):
        file.unlink()
    config = EngineConfig(
        model=ModelConfig(folders["target"], dtype="float32"),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(Speculation.DRAFT_MODEL, draft),
    )
    with pytest.raises(ModelLoadError, match=r"draft model .* needs a tokenizer"):
        load_model(config)
