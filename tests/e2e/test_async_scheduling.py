"""Steps planned and launched ahead change nothing of what anybody is told: the real runner, a tiny model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine import (
    AsyncEngine,
    AsyncScheduling,
    CacheConfig,
    CacheLayout,
    EngineConfig,
    FailureEvent,
    FinishEvent,
    FinishReason,
    LoadedModel,
    ModelConfig,
    Request,
    RequestFailed,
    RequestId,
    SamplingParams,
    SchedulerConfig,
    StepTotals,
    TokenEvent,
    TokenLogprobs,
    load_model,
)
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.loader import load_decoder
from headrace.engine.runner.model_runner import ModelRunner
from tests.support.contract_backend import ContractCheckingBackend
from tests.support.faults import POISON, Fault, FaultKind, faulty_config, faulty_model
from tests.support.paged_step import storage_for
from tests.support.requests import GREEDY, make_request
from tests.support.staged_runner import FETCH, LAUNCH, StagedRunner
from tests.support.tiny_models import write_tiny_llama

ON, OFF = AsyncScheduling.ON, AsyncScheduling.OFF


@dataclass
class Told:
    """What was told of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishEvent | None = None

    @property
    def kept(self) -> tuple[Any, ...]:
        """What may not hang on when steps were planned."""
        assert self.end is not None
        usage = self.end.usage
        counts = usage.num_prompt_tokens, usage.num_completion_tokens
        return tuple(self.token_ids), self.text, self.end.reason, self.end.matched_stop, counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_config(
    folder: Path, *, num_blocks: int = 200, prefix_caching: bool = True, **options: Any
) -> EngineConfig:
    return EngineConfig(
        ModelConfig(folder, dtype="float32"),
        CacheConfig(4, num_blocks, prefix_caching=prefix_caching),
        SchedulerConfig(**({"max_num_seqs": 6, "max_num_batched_tokens": 64} | options)),
        num_threads=1,
    )


@asynccontextmanager
async def running(
    model: LoadedModel, config: EngineConfig, scheduling: AsyncScheduling
) -> AsyncIterator[tuple[AsyncEngine, StagedRunner]]:
    """An engine that must be left as if nobody had been there."""
    runner = StagedRunner(model.runner)
    scheduler = replace(config.scheduler, async_scheduling=scheduling)
    async with AsyncEngine(replace(model, runner=runner), replace(config, scheduler=scheduler)) as engine:
        yield engine, runner
        if not engine.is_dead:
            await engine.wait_idle()
            load = engine.load()
            assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
            engine.flush_cache()
            assert engine.load().blocks.free == load.blocks.total


async def read(engine: AsyncEngine, request: Request, cancel_after: int | None = None) -> list[Told]:
    """What a request is told, sequence by sequence; it is cancelled once it has so many tokens."""
    told = [Told() for _ in range(request.n)]
    num_tokens = 0
    async for event in engine.submit(request):
        assert not isinstance(event, FailureEvent), event
        mine = told[event.index]
        assert mine.end is None, "an event after the last"
        if isinstance(event, TokenEvent):
            mine.token_ids += event.token_ids
            mine.text += event.text
            mine.logprobs += event.logprobs
            num_tokens += len(event.token_ids)
            if cancel_after is not None and num_tokens >= cancel_after:
                engine.abort(request.request_id)
        else:
            assert isinstance(event, FinishEvent)
            mine.end = event
    return told


def random_requests(seed: int, number: int) -> list[Request]:
    """Requests of all kinds. Some begin alike; some end where nobody can foresee it."""
    pick = random.Random(seed)
    beginnings = [tuple(pick.randrange(3, 500) for _ in range(pick.randint(1, 30))) for _ in range(4)]

    def sampling() -> SamplingParams:
        return SamplingParams(
            temperature=pick.choice([0.0, 0.8, 1.2]),
            top_p=pick.choice([1.0, 0.9]),
            top_k=pick.choice([0, 40]),
            seed=pick.randrange(2**64),
            num_logprobs=pick.choice([None, None, 0, 2]),
            repetition_penalty=pick.choice([1.0] * 12 + [1.1]),
            banned_token_ids=frozenset(pick.choice([(), (), (9, 11)])),
        )

    return [
        make_request(
            request_id=f"q{i}",
            prompt=pick.choice(beginnings) + tuple(pick.randrange(3, 500) for _ in range(pick.randint(0, 9))),
            max_tokens=pick.randint(1, 24),
            sampling=sampling(),
            stop_strings=pick.choice([(), (), ("e",), ("qu", "t")]),
            stop_token_ids=frozenset(pick.sample(range(3, 500), pick.choice([0, 60]))),
            min_tokens=pick.choice([0, 0, 0, 1]),
            n=pick.choice([1, 1, 1, 2, 3]),
            priority=pick.choice([0, 0, 2]),
            uses_prefix_cache=pick.random() < 0.8,
        )
        for i in range(number)
    ]


async def serve(
    engine: AsyncEngine, requests: Sequence[Request], seed: int, *, num_cancelled: int = 0, at_once: int = 8
) -> dict[RequestId, list[Told]]:
    """Send requests as others end; some are cancelled."""
    pick = random.Random(seed)
    cancelled = {r.request_id: pick.randint(1, 12) for r in pick.sample(list(requests), num_cancelled)}
    waiting = iter(requests)
    told: dict[RequestId, list[Told]] = {}

    async def client() -> None:
        for request in waiting:
            told[request.request_id] = await read(engine, request, cancelled.get(request.request_id))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return told


def num_ahead(runner: StagedRunner) -> int:
    """How many steps were launched before the ones before them were fetched."""
    return sum(
        runner.log.index((LAUNCH, step)) < runner.log.index((FETCH, step - 1))
        for stage, step in runner.log
        if stage == FETCH and (FETCH, step - 1) in runner.log
    )


def assert_same(on: dict[RequestId, list[Told]], off: dict[RequestId, list[Told]]) -> None:
    """All that ended by itself is the same; of what was cancelled, one begins as the other does."""
    assert on.keys() == off.keys()
    for request_id, mine in on.items():
        for one, other in zip(mine, off[request_id], strict=True):
            assert one.end is not None
            assert other.end is not None
            num = min(len(one.token_ids), len(other.token_ids))
            assert one.token_ids[:num] == other.token_ids[:num]
            if FinishReason.CANCELLED not in {one.end.reason, other.end.reason}:
                assert one.kept == other.kept
            for entry, expected in zip(one.logprobs[:num], other.logprobs[:num], strict=True):
                assert entry.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-4)
                assert [top.token_id for top in entry.top] == [top.token_id for top in expected.top]


POOLS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "a tiny pool": {"num_blocks": 18},
    "no prefix cache": {"prefix_caching": False},
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("seed", [0, 1])
async def test_whatever_is_asked_the_answers_are_the_same(folder: Path, pool: str, seed: int) -> None:
    config = make_config(folder, **POOLS[pool])
    told: dict[AsyncScheduling, dict[RequestId, list[Told]]] = {}
    for scheduling in (OFF, ON):
        async with running(load_model(config), config, scheduling) as (engine, runner):
            requests = random_requests(seed, 50)
            told[scheduling] = await serve(engine, requests, seed, num_cancelled=10)
            assert (num_ahead(runner) > 20) == (scheduling is ON)
            num_preempted = engine.load().totals.num_preemptions
            assert (num_preempted > 0) == (pool == "a tiny pool")
    assert_same(told[ON], told[OFF])


def counted(totals: StepTotals) -> tuple[int, ...]:
    return totals.num_prefill_tokens, totals.num_decode_tokens, totals.speculation.num_output_tokens


async def test_what_is_counted_is_the_same(folder: Path) -> None:
    """Rows that are void count as nothing: no token that nobody got, none that was computed in vain."""
    config = make_config(folder, prefix_caching=False)
    totals: dict[AsyncScheduling, StepTotals] = {}
    for scheduling in (OFF, ON):
        async with running(load_model(config), config, scheduling) as (engine, _):
            told = await serve(engine, random_requests(5, 40), 5)
            totals[scheduling] = engine.load().totals
            num_told = sum(len(each.token_ids) for sequences in told.values() for each in sequences)
            assert totals[scheduling].speculation.num_output_tokens == num_told
    assert counted(totals[ON]) == counted(totals[OFF])


async def test_the_kernels_contract_holds(folder: Path) -> None:
    config = make_config(folder)
    loaded = load_model(config)
    layout = CacheLayout(201, 4)
    told: dict[AsyncScheduling, dict[RequestId, list[Told]]] = {}
    for scheduling in (OFF, ON):
        decoder = decoder_of(folder)
        backend = ContractCheckingBackend(storage_for(decoder.spec, layout.num_blocks, 4))
        model = replace(loaded, layout=layout, runner=ModelRunner(decoder, backend, layout))
        async with running(model, config, scheduling) as (engine, runner):
            told[scheduling] = await serve(engine, random_requests(7, 16), 7)
            assert (num_ahead(runner) > 5) == (scheduling is ON)
    assert_same(told[ON], told[OFF])


def decoder_of(folder: Path) -> Decoder:
    return load_decoder(ModelConfig(folder, dtype="float32"), torch.device("cpu")).decoder


@pytest.mark.parametrize(
    "kind", [FaultKind.RAISE, FaultKind.PANIC, FaultKind.OUT_OF_MEMORY, FaultKind.WRONG_LENGTH]
)
@pytest.mark.parametrize("step", [3, 4, 5])
async def test_a_step_that_goes_wrong_once_changes_no_answer(
    folder: Path, kind: FaultKind, step: int
) -> None:
    """What was launched behind it is thrown away, and run anew with the tokens that were drawn in the end."""
    config = faulty_config(folder)
    told: dict[AsyncScheduling, dict[RequestId, list[Told]]] = {}
    for scheduling in (OFF, ON):
        fault = Fault(kind, step)
        async with running(faulty_model(folder, fault), config, scheduling) as (engine, runner):
            told[scheduling] = await serve(engine, plain_requests(), 1)
            assert fault.num_struck == 1
            assert (num_ahead(runner) > 5) == (scheduling is ON)
    assert_same(told[ON], told[OFF])


def plain_requests() -> list[Request]:
    return [
        make_request(
            request_id=f"p{i}",
            prompt=(3 + i, 40, 50),
            max_tokens=14,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.9, seed=i) if i % 2 else GREEDY,
        )
        for i in range(4)
    ]


async def test_a_row_that_is_ill_ends_alone(folder: Path) -> None:
    config, told = faulty_config(folder), {}
    for scheduling in (OFF, ON):
        async with running(faulty_model(folder, Fault(FaultKind.NAN_ROW)), config, scheduling) as (engine, _):
            ill = engine.submit(make_request(prompt=(5, POISON), max_tokens=9))
            told[scheduling] = await serve(engine, plain_requests(), 1)
            (failure,) = [event async for event in ill]
            assert isinstance(failure, FailureEvent)
            assert isinstance(failure.error, RequestFailed)
            assert "not finite" in str(failure.error)
    assert_same(told[ON], told[OFF])


async def test_a_runner_that_is_broken_for_good_is_found_out(folder: Path) -> None:
    fault = Fault(FaultKind.RAISE, 4, lasts=True)
    config = faulty_config(folder)
    async with running(faulty_model(folder, fault), config, ON) as (engine, _):
        streams = [engine.submit(request) for request in plain_requests()]
        for stream in streams:
            assert isinstance([event async for event in stream][-1], FailureEvent)
        # Each time that a step fails for all rows its requests are over.
        while not engine.is_dead:
            [_ async for _ in engine.submit(make_request(prompt=(5,)))]
