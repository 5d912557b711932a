"""Sampling and logprobs through the whole engine over a tiny model: alone, in company, preempted, cached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    EngineConfig,
    FailureEvent,
    FinishEvent,
    FinishReason,
    ModelConfig,
    Request,
    RequestFailed,
    SamplingParams,
    SchedulerConfig,
    TokenEvent,
    Usage,
    load_model,
)
from headrace.engine.outputs import TokenLogprobs
from tests.support.requests import make_request
from tests.support.tiny_models import IM_END_ID, MAX_POSITIONS, VOCAB_SIZE, tiny_llama, write_tiny_llama

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def engine_over(
    folder: Path,
    *,
    num_blocks: int = 2000,
    max_num_seqs: int = 8,
    chunk: int | None = None,
    prefix_caching: bool = True,
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        model=ModelConfig(folder, dtype="float32"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_prefill_chunk=chunk),
    )
    async with AsyncEngine(await asyncio.to_thread(load_model, config), config) as engine:
        yield engine
        await engine.wait_idle()
        assert engine.load().blocks.live == 0


@dataclass
class Output:
    """What one sequence told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishEvent | FailureEvent | None = None


async def run(engine: AsyncEngine, request: Request) -> list[Output]:
    """The request's sequences, by their index."""
    outputs = [Output() for _ in range(request.n)]
    async for event in engine.submit(request):
        if isinstance(event, FailureEvent):
            outputs[0].end = event
            continue
        output = outputs[event.index]
        assert output.end is None
        if isinstance(event, TokenEvent):
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs
            output.prompt_logprobs += event.prompt_logprobs
        else:
            output.end = event
    return outputs


async def run_all(engine: AsyncEngine, requests: Sequence[Request]) -> list[Output]:
    """First sequences of requests that are sent at once."""
    return [outputs[0] for outputs in await asyncio.gather(*(run(engine, request) for request in requests))]


def asking(prompt: Sequence[int], max_tokens: int = 12, **controls: Any) -> Request:
    return make_request(
        prompt=tuple(prompt), max_tokens=max_tokens, ignore_eos=True, sampling=SamplingParams(**controls)
    )


def reference(token_ids: Sequence[int]) -> Tensor:
    """(tokens, V): log-probabilities of what follows each, by transformers."""
    with torch.no_grad():
        logits: Tensor = tiny_llama()(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits, dim=-1)


def assert_logprobs(entries: Sequence[TokenLogprobs], expected: Tensor, token_ids: Sequence[int]) -> None:
    """One entry per token, equal to the rows of transformers."""
    assert [entry.chosen.token_id for entry in entries] == list(token_ids)
    for entry, row in zip(entries, expected, strict=True):
        for told in (entry.chosen, *entry.top):
            assert told.logprob == pytest.approx(row[told.token_id].item(), abs=1e-4)


async def test_sequences_of_one_prompt_tell_their_own_logprobs(folder: Path) -> None:
    prompt = range(10, 31)
    async with engine_over(folder) as engine:
        request = replace(asking(prompt, seed=3, num_logprobs=4, num_prompt_logprobs=2), n=3, best_of=3)
        outputs = await run(engine, request)

    assert len({tuple(output.token_ids) for output in outputs}) == 3
    expected = [reference([*prompt, *output.token_ids]) for output in outputs]
    for output, rows in zip(outputs, expected, strict=True):
        assert_logprobs(output.logprobs, rows[len(prompt) - 1 : -1], output.token_ids)
        assert all(len(entry.top) == 4 for entry in output.logprobs)
    # The prompt is the same for all of them: it is told once.
    assert_logprobs(outputs[0].prompt_logprobs, expected[0][: len(prompt) - 1], list(prompt)[1:])
    assert [output.prompt_logprobs for output in outputs[1:]] == [[], []]


@pytest.mark.small_blocks
@pytest.mark.parametrize("chunk", [None, 3, 7])
async def test_prompt_logprobs_are_told_though_the_prompt_is_cached(folder: Path, chunk: int | None) -> None:
    prompt = list(range(40, 75))
    async with engine_over(folder, chunk=chunk) as engine:
        plain = (await run_all(engine, [asking(prompt, temperature=0.0)]))[0]
        telling = asking(prompt, temperature=0.0, num_prompt_logprobs=3, num_logprobs=0)
        told = (await run_all(engine, [telling]))[0]
        again = (await run_all(engine, [asking(prompt, temperature=0.0)]))[0]

    assert told.token_ids == plain.token_ids == again.token_ids
    expected = reference([*prompt, *told.token_ids])
    assert_logprobs(told.prompt_logprobs, expected[: len(prompt) - 1], prompt[1:])
    assert_logprobs(told.logprobs, expected[len(prompt) - 1 : -1], told.token_ids)
    assert isinstance(told.end, FinishEvent)
    assert isinstance(again.end, FinishEvent)
    assert told.end.usage.num_cached_tokens == 0
    assert again.end.usage.num_cached_tokens >= len(prompt) - BLOCK_SIZE


@pytest.mark.parametrize(
    ("chunk", "num_blocks"), [(None, 2000), (7, 2000), (16, MAX_POSITIONS // BLOCK_SIZE)]
)
async def test_a_prompt_as_long_as_the_context_is_read_for_its_logprobs_alone(
    folder: Path, chunk: int | None, num_blocks: int
) -> None:
    prompt = [(11 * i) % VOCAB_SIZE for i in range(MAX_POSITIONS)]
    request = asking(prompt, 0, temperature=0.0, num_prompt_logprobs=2)
    async with engine_over(folder, chunk=chunk, num_blocks=num_blocks) as engine:
        other = asking(prompt[:20], temperature=0.0)
        told, beside = await run_all(engine, [request, other])
        assert beside.token_ids == (await run_all(engine, [renewed(other)]))[0].token_ids
    assert_logprobs(told.prompt_logprobs, reference(prompt)[:-1], prompt[1:])
    assert told.token_ids == []
    assert told.logprobs == []
    assert isinstance(told.end, FinishEvent)
    assert told.end.reason is FinishReason.LENGTH
    assert told.end.usage == Usage(MAX_POSITIONS, 0, 0)


CONTROLS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 1.1, "num_logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.4},
    {"temperature": 0.0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.9, "num_prompt_logprobs": 1},
    {"temperature": 0.0, "bad_words": tuple((i,) for i in range(3, VOCAB_SIZE, 2))},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05, "logit_bias": ((9, 4.0), (8, 4.0))},
    {"temperature": 0.8, "typical_p": 0.7, "banned_token_ids": frozenset(range(100))},
    {"temperature": 1.0, "allowed_token_ids": frozenset(range(200, 260)), "presence_penalty": 2.0},
    {"temperature": 0.7, "top_p": 0.8, "num_logprobs": 5},
]


def mixed_requests(num_requests: int, max_tokens: int = 16) -> list[Request]:
    """Prompts of unequal length, every kind of control, each with its own seed."""
    return [
        asking(
            [(7 * i + j * j) % VOCAB_SIZE for j in range(1 + (5 * i) % 23)],
            max_tokens + i % 5,
            seed=100 + i,
            **CONTROLS[i % len(CONTROLS)],
        )
        for i in range(num_requests)
    ]


def renewed(request: Request) -> Request:
    """The same under another id."""
    return replace(request, request_id=make_request().request_id)


@pytest.mark.small_blocks
async def test_penalties_after_preemptions_are_those_of_a_request_alone(folder: Path) -> None:
    requests = mixed_requests(10, max_tokens=24)
    async with engine_over(folder, max_num_seqs=1) as engine:
        alone = await run_all(engine, requests)
    async with engine_over(folder, num_blocks=24, chunk=5) as engine:
        crowded = await run_all(engine, requests)
        assert engine.load().totals.num_preemptions > 3

    assert [output.token_ids for output in crowded] == [output.token_ids for output in alone]
    for ours, theirs, request in zip(crowded, alone, requests, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs)
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for a, b in zip(
            ours.logprobs + ours.prompt_logprobs, theirs.logprobs + theirs.prompt_logprobs, strict=True
        ):
            assert a.chosen.token_id == b.chosen.token_id
            assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
        if request.sampling.num_prompt_logprobs is not None:
            assert len(ours.prompt_logprobs) == len(request.prompt_token_ids) - 1


@pytest.mark.parametrize("num_neighbours", [1, 7, 45])
async def test_seeded_requests_draw_the_same_alone_and_in_company(folder: Path, num_neighbours: int) -> None:
    requests = mixed_requests(20)
    async with engine_over(folder, max_num_seqs=46) as engine:
        alone = [(await run_all(engine, [renewed(request)]))[0].token_ids for request in requests]
        neighbours = [
            replace(renewed(r), isolation_key="other") for r in mixed_requests(num_neighbours)[::-1]
        ]
        for first in range(0, 20, 5):
            some = [renewed(request) for request in requests[first : first + 5]]
            outputs = await run_all(engine, [*some[:2], *map(renewed, neighbours), *some[2:]])
            together = [output.token_ids for output in [*outputs[:2], *outputs[2 + num_neighbours :]]]
            assert together == alone[first : first + 5]


async def test_the_best_of_several_are_those_of_highest_mean_logprob(folder: Path) -> None:
    prompt = range(60, 70)
    async with engine_over(folder) as engine:
        every = replace(asking(prompt, seed=9, num_logprobs=0), n=6, best_of=6)
        made = await run(engine, every)
        best = await run(engine, replace(renewed(every), sampling=SamplingParams(seed=9), n=2))

    def mean(output: Output) -> float:
        return sum(entry.chosen.logprob for entry in output.logprobs) / len(output.logprobs)

    ranked = sorted(made, key=mean, reverse=True)
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:2]]
    assert mean(ranked[0]) > mean(ranked[-1])


async def test_no_end_id_is_drawn_before_min_tokens(folder: Path) -> None:
    """An end id that bias makes all but certain comes first when it may, and never before."""
    eager = SamplingParams(temperature=0.0, logit_bias=((IM_END_ID, 100.0),))
    async with engine_over(folder) as engine:
        for min_tokens in (0, 1, 5):
            request = make_request(prompt=(5, 6, 7), max_tokens=20, min_tokens=min_tokens, sampling=eager)
            (output,) = await run(engine, request)
            assert len(output.token_ids) == min_tokens + 1
            assert output.token_ids.index(IM_END_ID) == min_tokens


async def test_a_request_that_leaves_itself_no_token_fails_alone(folder: Path) -> None:
    healthy = mixed_requests(6)
    async with engine_over(folder) as engine:
        alone = [(await run_all(engine, [renewed(request)]))[0].token_ids for request in healthy]
        hopeless = asking([1, 2, 3], temperature=0.5, allowed_token_ids=frozenset({8}), bad_words=((8, 8),))
        *others, failed = await run_all(engine, [*healthy, hopeless])
        assert (await run_all(engine, [renewed(healthy[0])]))[0].token_ids == alone[0]

    assert failed.token_ids == [8]
    assert isinstance(failed.end, FailureEvent)
    assert isinstance(failed.end.error, RequestFailed)
    assert "leaves no token that could be drawn" in str(failed.end.error)
    assert [output.token_ids for output in others] == alone
