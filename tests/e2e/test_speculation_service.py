"""Speculation as callers of a running service see it: what they may ask for, are told, and leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch

from headrace.engine import (
    BatchingPolicy,
    CacheConfig,
    DraftSampling,
    EngineConfig,
    LoadedModel,
    ModelConfig,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
    load_model,
)
from headrace.engine.runner.protocol import Runner
from headrace.engine.scheduling.plan import StepPlan, StepResult
from headrace.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    GenerateRequest,
    SamplingOptions,
    SpeculationOptions,
    StartGeneration,
    Usage,
)
from tests.support.blocking import Blocking
from tests.support.requests import make_request
from tests.support.service import (
    RawSession,
    RunningService,
    generate,
    ids_of,
    make_start,
    running_service,
    status_of,
    violated_fields,
)
from tests.support.speculation import CoreLoop
from tests.support.step_gate import StepGate
from tests.support.tiny_models import write_tiny_llama

PROMPT = tuple(range(20, 33))
NUM_TOKENS = 24


@dataclass
class WatchedRunner(Blocking):
    """A runner that others use, too: it keeps the plans, and holds the steps that it is told to.

    Args:
        is_held: whether a step has to wait at the gate.
    """

    runner: Runner
    is_held: Callable[[StepPlan], bool] = lambda plan: False
    gate: StepGate = field(default_factory=StepGate)
    plans: list[StepPlan] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if self.is_held(plan):
            self.gate(plan)
        return self.runner.execute(plan)

    def close(self) -> None:
        """Nothing: others use it, too."""

    @property
    def most_drafts(self) -> int:
        """The most that one row was given."""
        return max((row.draft.num_drafts for plan in self.plans for row in plan.rows if row.draft), default=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, EngineConfig]:
    """A model whose draft model has half its layers."""
    root: Path = tmp_path_factory.mktemp("service")
    target = write_tiny_llama(root / "target")
    draft = write_tiny_llama(root / "draft", num_hidden_layers=1)
    config = EngineConfig(
        model=ModelConfig(target, dtype="float32"),
        cache=CacheConfig(block_size=4, num_blocks=300),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        num_threads=torch.get_num_threads(),
        speculation=SpeculationConfig(
            Speculation.DRAFT_MODEL, draft, 4, 6, draft_sampling=DraftSampling.COUPLED
        ),
    )
    return load_model(config), config


@pytest.fixture(scope="module")
def expected(base: tuple[LoadedModel, EngineConfig]) -> list[int]:
    """What the model says without anybody's help."""
    model, config = base
    (answer,) = CoreLoop(model, replace(config, speculation=SpeculationConfig())).answers(
        [make_request(prompt=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)]
    )
    return answer.token_ids


def start(
    speculation: SpeculationOptions | None = None, *, max_tokens: int = NUM_TOKENS, label: str = ""
) -> StartGeneration:
    made = make_start(label, prompt=PROMPT, max_tokens=max_tokens, speculation=speculation)
    made.stop.ignore_eos = True
    return made


async def ask(service: RunningService, speculation: SpeculationOptions | None) -> tuple[list[int], Usage]:
    events = await generate(service, start(speculation))
    return ids_of(events), events[-1].finished.usage


async def refused_fields(service: RunningService, speculation: SpeculationOptions) -> list[str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(service, speculation)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return violated_fields(status_of(refusal.value))


async def test_a_caller_says_how_many_drafts_or_none(
    base: tuple[LoadedModel, EngineConfig], expected: list[int]
) -> None:
    model, config = base
    for speculation, most in (
        (None, 4),
        (SpeculationOptions(), 4),
        (SpeculationOptions(enabled=True), 4),
        (SpeculationOptions(enabled=True, num_speculative_tokens=1), 1),
        (SpeculationOptions(num_speculative_tokens=6), 6),
        (SpeculationOptions(enabled=False), 0),
        (SpeculationOptions(enabled=False, num_speculative_tokens=0), 0),
        (SpeculationOptions(num_speculative_tokens=0), 0),
    ):
        runner = WatchedRunner(model.runner)
        async with running_service(replace(model, runner=runner), config) as service:
            told, usage = await ask(service, speculation)
        assert told == expected
        assert runner.most_drafts == most
        assert (usage.draft_tokens_proposed > 0) == (most > 0)
        assert usage.draft_tokens_accepted <= usage.draft_tokens_proposed


async def test_what_can_not_be_had_is_refused_by_name_and_what_needs_nothing_is_not(
    base: tuple[LoadedModel, EngineConfig], expected: list[int]
) -> None:
    model, config = base
    number, enabled = ["speculation.num_speculative_tokens"], ["speculation.enabled"]
    async with running_service(replace(model, runner=WatchedRunner(model.runner)), config) as service:
        assert await refused_fields(service, SpeculationOptions(num_speculative_tokens=7)) == number
        assert (
            await refused_fields(service, SpeculationOptions(enabled=False, num_speculative_tokens=2))
            == number
        )
        assert (await ask(service, SpeculationOptions(num_speculative_tokens=6)))[0] == expected
    config = replace(config, speculation=SpeculationConfig())
    async with running_service(replace(model, runner=WatchedRunner(model.runner)), config) as service:
        assert await refused_fields(service, SpeculationOptions(enabled=True)) == enabled
        assert await refused_fields(service, SpeculationOptions(num_speculative_tokens=1)) == number
        for harmless in (SpeculationOptions(enabled=False), SpeculationOptions(num_speculative_tokens=0)):
            told, usage = await ask(service, harmless)
            assert (told, usage.draft_tokens_proposed) == (expected, 0)


def is_third_with_drafts() -> Callable[[StepPlan], bool]:
    """Holds the third step that has drafts."""
    seen = 0

    def is_held(plan: StepPlan) -> bool:
        nonlocal seen
        seen += any(row.draft is not None and row.draft.num_drafts > 0 for row in plan.rows)
        return seen == 3

    return is_held


async def test_a_cancel_while_drafts_are_being_judged_leaves_nothing_behind(
    base: tuple[LoadedModel, EngineConfig], expected: list[int]
) -> None:
    model, config = base
    runner = WatchedRunner(model.runner, is_third_with_drafts())
    async with running_service(replace(model, runner=runner), config) as service:
        session = RawSession(service.generation)
        await session.start(start(max_tokens=200, label="doomed"))
        await runner.gate.wait_held()
        await session.cancel("doomed")
        # Messages are taken in their order: once this one is refused the other is cancelled.
        await session.start(make_start("refused", sampling=SamplingOptions(top_p=9.0)))
        await session.until_end_of("refused")
        runner.gate.open()
        await session.until_end_of("doomed")
        await service.engine.wait_idle()

        events = session.events["doomed"]
        end = events[-1].finished
        assert end.reason == FINISH_REASON_CANCELLED
        told = ids_of(events)
        assert told == expected[: len(told)]
        assert end.usage.completion_tokens == len(told) < 200
        assert end.usage.draft_tokens_accepted <= end.usage.draft_tokens_proposed
        load = service.engine.load()
        assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
        assert (await ask(service, None))[0] == expected


async def test_a_deadline_while_drafts_are_being_judged_leaves_nothing_behind(
    base: tuple[LoadedModel, EngineConfig], expected: list[int]
) -> None:
    model, config = base
    runner = WatchedRunner(model.runner, is_third_with_drafts())
    async with running_service(replace(model, runner=runner), config) as service:
        call = service.generation.Generate(GenerateRequest(start=start(max_tokens=200)), timeout=1.5)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in call:
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        runner.gate.open()
        await service.engine.wait_idle()

        load = service.engine.load()
        assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)
        assert load.totals.speculation.num_output_tokens < 200
        assert (await ask(service, None))[0] == expected


def test_fixed_batches_speculate_too_and_nobody_joins_them(base: tuple[LoadedModel, EngineConfig]) -> None:
    model, config = base
    asked = [
        make_request(prompt=tuple(range(5 + i, 11 + 2 * i)), max_tokens=6 + 5 * i, ignore_eos=True)
        for i in range(6)
    ]
    plain = CoreLoop(model, replace(config, speculation=SpeculationConfig())).answers(asked)
    runner = WatchedRunner(model.runner)
    static = replace(
        config, scheduler=replace(config.scheduler, batching=BatchingPolicy.STATIC, max_num_seqs=3)
    )
    server = CoreLoop(replace(model, runner=runner), static)

    told = server.answers(asked)

    assert [answer.token_ids for answer in told] == [answer.token_ids for answer in plain]
    assert server.core.load.totals.speculation.num_draft_tokens > 20
    before: set[int] = set()
    known: set[int] = set()
    for plan in runner.plans:
        now = {int(row.sequence_id) for row in plan.rows}
        # Who is new joins an empty batch, or in the first steps of one that is being filled.
        assert not (now - known) or not before & now or len(known) % 3
        before, known = now, known | now
    assert len(known) == 6
