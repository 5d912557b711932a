"""Constrained output through the engine and a real model: the form holds whatever else a request wants."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    Constraint,
    ConstraintKind,
    EngineConfig,
    FailureEvent,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    LoadedModel,
    ModelConfig,
    Request,
    RequestFailed,
    SamplingParams,
    SchedulerConfig,
    TokenEvent,
    load_model,
)
from headrace.engine.outputs import TokenLogprobs
from headrace.engine.scheduling.plan import StepPlan, StepResult
from tests.support.blocking import Blocking
from tests.support.default_model import default_model_path
from tests.support.requests import make_request
from tests.support.schemas import SCHEMAS
from tests.support.tiny_models import IM_END_ID, write_tiny_llama

WARM = SamplingParams(temperature=1.0, seed=7)
LETTERS = Constraint(ConstraintKind.REGEX, "[a-z]{3}-[0-9]{4}(-[a-z]{2})?")


@dataclass
class Answer:
    """One sequence of a request, whole."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: FinishEvent | None = None
    failure: Exception | None = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("constraints") / "tiny")


def make_engine(
    folder: Path,
    *,
    num_blocks: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    wrapped: Callable[[LoadedModel], LoadedModel] = lambda model: model,
) -> AsyncEngine:
    config = EngineConfig(
        ModelConfig(folder, dtype="float32"),
        CacheConfig(block_size=4, num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs, max_num_batched_tokens),
    )
    return AsyncEngine(wrapped(load_model(config)), config)


def schema_of(name: str) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMAS[name], ensure_ascii=False))


async def answers(engine: AsyncEngine, constraint: Constraint | None, request: Request) -> list[Answer]:
    """Let the engine answer `request` within `constraint`."""
    compiled = None if constraint is None else await engine.constraints.compile(constraint)
    whole = [Answer() for _ in range(request.n)]
    async for event in engine.submit(replace(request, constraint=compiled)):
        match event:
            case TokenEvent():
                answer = whole[event.index]
                answer.text += event.text
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs
            case FinishEvent():
                whole[event.index].end = event
            case FailureEvent():
                for answer in whole:
                    answer.failure = event.error
    return whole


async def answer_of(engine: AsyncEngine, constraint: Constraint | None, request: Request) -> Answer:
    [answer] = await answers(engine, constraint, request)
    return answer


def reason_of(answer: Answer) -> FinishReason:
    assert answer.end is not None, answer.failure
    return answer.end.reason


def assert_valid(text: str, name: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", SCHEMAS)
async def test_four_sequences_of_a_request_are_valid_each_in_its_own_way(folder: Path, name: str) -> None:
    async with make_engine(folder) as engine:
        request = make_request(max_tokens=200, sampling=WARM, n=4)
        whole = await answers(engine, schema_of(name), request)
        for answer in whole:
            assert reason_of(answer) is FinishReason.STOP
            assert answer.token_ids[-1] == IM_END_ID
            assert_valid(answer.text, name)
        assert len({answer.text for answer in whole}) > 1 or name == "const"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (LETTERS, LETTERS.text),
        (Constraint(ConstraintKind.CHOICE, choices=("yes", "yes please", "no")), "yes|yes please|no"),
        (Constraint(ConstraintKind.GRAMMAR, 'root ::= "<" root ">" | [a-c] [a-c]?\n'), "<*[a-c]{1,2}>*"),
    ],
)
async def test_other_kinds_hold_greedily_and_drawn(
    folder: Path, constraint: Constraint, pattern: str
) -> None:
    async with make_engine(folder) as engine:
        for sampling in (SamplingParams(temperature=0.0), WARM):
            answer = await answer_of(engine, constraint, make_request(max_tokens=100, sampling=sampling))
            if reason_of(answer) is FinishReason.STOP:
                assert re.fullmatch(pattern, answer.text), answer.text
                assert answer.text.count("<") == answer.text.count(">")
            else:
                assert constraint.kind is ConstraintKind.GRAMMAR


async def test_max_tokens_cuts_a_text_that_would_fit(folder: Path) -> None:
    async with make_engine(folder) as engine:
        whole = await answer_of(engine, LETTERS, make_request(prompt=(5, 6), max_tokens=50, sampling=WARM))
        cut = await answer_of(engine, LETTERS, make_request(prompt=(5, 6), max_tokens=3, sampling=WARM))
        assert reason_of(cut) is FinishReason.LENGTH
        assert cut.token_ids == whole.token_ids[:3]


@pytest.mark.small_blocks
async def test_neighbours_preemption_and_the_prefix_cache_change_no_answer(folder: Path) -> None:
    names = ["nested objects", "pattern and format", "number ranges", "unicode"]
    requests = [
        make_request(prompt=tuple(range(40 + i, 49 + i)), max_tokens=None, sampling=SamplingParams(seed=i))
        for i in range(len(names))
    ]
    async with make_engine(folder) as engine:
        alone = [
            await answer_of(engine, schema_of(name), request)
            for name, request in zip(names, requests, strict=True)
        ]
        again = await answer_of(engine, schema_of(names[0]), requests[0])
        assert again.end is not None
        assert again.end.usage.num_cached_tokens > 0
        assert again.token_ids == alone[0].token_ids
    # All of them can begin, and the longest can end.
    num_blocks = max(9 + len(answer.token_ids) for answer in alone) // 4 + 4
    async with make_engine(folder, num_blocks=num_blocks) as engine:
        free = make_request(prompt=(5, 6, 7, 8, 9), max_tokens=40, sampling=WARM)
        together = await asyncio.gather(
            *(
                answer_of(engine, schema_of(name), request)
                for name, request in zip(names, requests, strict=True)
            ),
            answer_of(engine, None, free),
        )
        ends = [answer.end for answer in together if answer.end is not None]
        assert sum(end.num_preemptions for end in ends) > 0
        for name, answer, solo in zip(names, together, alone, strict=False):
            assert answer.token_ids == solo.token_ids
            assert_valid(answer.text, name)


@dataclass
class Stuttering(Blocking):
    """A runner that runs every plan twice, the second time in reverse order, and answers with the first."""

    inner: LoadedModel

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.runner.execute(plan)
        backwards = self.inner.runner.execute(StepPlan(plan.step, plan.rows[::-1]))
        assert [row.token_ids for row in backwards.rows[::-1]] == [row.token_ids for row in result.rows]
        return result

    def close(self) -> None:
        self.inner.runner.close()


async def test_a_step_that_is_run_twice_draws_the_same(folder: Path) -> None:
    def request() -> Request:
        return make_request(prompt=(8, 9, 10), max_tokens=120, sampling=WARM, n=3)

    async with make_engine(folder) as engine:
        once = await answers(engine, schema_of("optional fields"), request())
    async with make_engine(folder, wrapped=lambda model: replace(model, runner=Stuttering(model))) as engine:
        twice = await answers(engine, schema_of("optional fields"), request())
    assert [answer.token_ids for answer in twice] == [answer.token_ids for answer in once]


async def test_a_complete_text_ends_before_min_tokens_and_one_that_can_go_on_does_not(folder: Path) -> None:
    async with make_engine(folder) as engine:
        short = Constraint(ConstraintKind.CHOICE, choices=("a", "b"))
        answer = await answer_of(engine, short, make_request(max_tokens=20, min_tokens=10, sampling=WARM))
        assert (answer.text in ("a", "b"), reason_of(answer)) == (True, FinishReason.STOP)
        letters = Constraint(ConstraintKind.REGEX, "[ab]*")
        answer = await answer_of(engine, letters, make_request(max_tokens=20, min_tokens=10, sampling=WARM))
        assert len(answer.token_ids) >= 10
        assert re.fullmatch("[ab]*", answer.text)


async def test_a_stop_id_ends_complete_texts_only(folder: Path) -> None:
    async with make_engine(folder) as engine:
        [letter] = engine.tokenizer.encode("b", add_special_tokens=False)
        constraint = Constraint(ConstraintKind.REGEX, "[abc]{2}")
        for seed in range(8):
            answer = await answer_of(
                engine,
                constraint,
                make_request(
                    max_tokens=20, sampling=SamplingParams(seed=seed), stop_token_ids=frozenset({letter})
                ),
            )
            assert reason_of(answer) is FinishReason.STOP
            assert re.fullmatch("[ac]{2}|[abc]{2}", answer.text)
            assert letter not in answer.token_ids[:-1]


async def test_a_stop_string_cuts_wherever_it_comes(folder: Path) -> None:
    async with make_engine(folder) as engine:
        answer = await answer_of(
            engine, LETTERS, make_request(max_tokens=40, sampling=WARM, stop_strings=("-",))
        )
        assert re.fullmatch("[a-z]{3}", answer.text)
        assert answer.end is not None
        assert (answer.end.reason, answer.end.matched_stop) == (FinishReason.STOP, "-")


async def test_logprobs_are_told_of_every_token(folder: Path) -> None:
    async with make_engine(folder) as engine:
        sampling = SamplingParams(seed=7, num_logprobs=3)
        request = make_request(prompt=(5, 6), max_tokens=40, sampling=sampling)
        told = await answer_of(engine, LETTERS, request)
        plain = await answer_of(engine, LETTERS, make_request(prompt=(5, 6), max_tokens=40, sampling=WARM))
        assert told.token_ids == plain.token_ids
        assert [entry.chosen.token_id for entry in told.logprobs] == list(told.token_ids)


async def test_ids_that_may_not_be_drawn_narrow_the_form_further(folder: Path) -> None:
    async with make_engine(folder) as engine:
        [letter] = engine.tokenizer.encode("a", add_special_tokens=False)
        sampling = SamplingParams(seed=3, banned_token_ids=frozenset({letter}))
        constraint = Constraint(ConstraintKind.REGEX, "[ab]{6}")
        answer = await answer_of(engine, constraint, make_request(max_tokens=20, sampling=sampling))
        assert (answer.text, reason_of(answer)) == ("bbbbbb", FinishReason.STOP)


@pytest.mark.parametrize("is_banned", [True, False])
async def test_where_nothing_is_left_to_draw_that_request_alone_fails(folder: Path, is_banned: bool) -> None:
    async with make_engine(folder) as engine:
        sampling = (
            SamplingParams(banned_token_ids=frozenset({IM_END_ID}))
            if is_banned
            else SamplingParams(allowed_token_ids=frozenset({IM_END_ID}))
        )
        yes = Constraint(ConstraintKind.CHOICE, choices=("yes",))
        failed, neighbour = await asyncio.gather(
            answer_of(engine, yes, make_request(max_tokens=20, sampling=sampling)),
            answer_of(engine, yes, make_request(max_tokens=20, sampling=WARM)),
        )
        assert isinstance(failed.failure, RequestFailed)
        assert "constraint, allowed and banned ids" in str(failed.failure)
        assert (neighbour.text, reason_of(neighbour)) == ("yes", FinishReason.STOP)


async def test_an_end_that_does_not_end_is_refused(folder: Path) -> None:
    async with make_engine(folder) as engine:
        with pytest.raises(InvalidRequest, match=r"stop\.ignore_eos: can't be set with a constraint"):
            await answer_of(engine, LETTERS, make_request(ignore_eos=True))
        endless = await engine.constraints.compile(LETTERS)

    def without_end(model: LoadedModel) -> LoadedModel:
        return replace(model, info=replace(model.info, eos_token_ids=frozenset()))

    async with make_engine(folder, wrapped=without_end) as engine:
        with pytest.raises(InvalidRequest, match=r"stop\.token_ids: must name an id that ends"):
            engine.submit(make_request(constraint=endless))


async def test_any_json_object_is_one_or_was_cut(folder: Path) -> None:
    async with make_engine(folder) as engine:
        whole = await answers(
            engine,
            Constraint(ConstraintKind.JSON_OBJECT),
            make_request(max_tokens=150, sampling=WARM, n=8),
        )
        for answer in whole:
            assert answer.text.startswith("{")
            if reason_of(answer) is FinishReason.STOP:
                assert isinstance(json.loads(answer.text), dict)
        assert any(reason_of(answer) is FinishReason.STOP for answer in whole)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_default_model_keeps_ten_schemas_twenty_times_each() -> None:
    config = EngineConfig(ModelConfig(default_model_path()), CacheConfig(num_blocks=512), SchedulerConfig(20))
    async with AsyncEngine(load_model(config), config) as engine:

        async def generate(name: str) -> list[Answer]:
            prompt = f"Write a JSON value, such as a form about '{name}' would hold:\n"
            request = make_request(
                prompt=tuple(engine.tokenizer.encode(prompt)),
                max_tokens=400,
                sampling=SamplingParams(temperature=1.0, seed=len(name)),
                n=20,
            )
            return await answers(engine, schema_of(name), request)

        by_name = dict(zip(SCHEMAS, await asyncio.gather(*map(generate, SCHEMAS)), strict=True))
        assert sum(map(len, by_name.values())) == 200
        for name, whole in by_name.items():
            for answer in whole:
                assert reason_of(answer) is FinishReason.STOP, (name, answer.text)
                assert_valid(answer.text, name)
