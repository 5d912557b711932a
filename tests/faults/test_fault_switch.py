"""Each fault of `tests.support.faults` in a server over a real model: who is hurt, what holds after it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2

from headrace.v1.generation_pb2 import GenerateRequest, SamplingOptions, StartGeneration, TokenIds
from tests.support.aftermath import assert_as_new, canary_ids, tasks_now, until_no_task_but
from tests.support.faults import POISON, POISON_TEXT, SECRET, Fault, FaultKind, faulty_config, faulty_model
from tests.support.service import (
    RawSession,
    RunningService,
    generate_ids,
    ids_of,
    is_ended,
    make_start,
    running_service,
    until,
)
from tests.support.tiny_models import write_tiny_llama

NEIGHBOURS = [tuple(range(20 + 3 * i, 28 + 4 * i)) for i in range(7)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("faults") / "tiny")


def neighbour(i: int, label: str = "") -> StartGeneration:
    """A request that has nothing to do with the poison."""
    without = SamplingOptions(banned_token_ids=TokenIds(ids=[POISON]))
    return make_start(label, prompt=NEIGHBOURS[i], max_tokens=NUM_TOKENS, sampling=without)


def victim(kind: FaultKind, label: str = "") -> StartGeneration:
    """A request that the fault strikes."""
    match kind:
        case FaultKind.TOKENIZER | FaultKind.TOKENIZER_PANIC:
            return StartGeneration(request_id=label, text=f"a text with {POISON_TEXT}")
        case FaultKind.DETOKENIZER | FaultKind.DETOKENIZER_PANIC:
            only = SamplingOptions(allowed_token_ids=TokenIds(ids=[POISON]))
            return make_start(label, prompt=(5, 6, 7), sampling=only)
    return make_start(label, prompt=(5, 6, POISON, 9, 10), max_tokens=4)


async def ending_of(service: RunningService, start: StartGeneration) -> grpc.StatusCode:
    """How a streamed request ends; that it ends is the point."""
    call = service.generation.Generate(GenerateRequest(start=start), timeout=60)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    assert SECRET not in (await call.details() or "")
    return await call.code()


@pytest.fixture(scope="module")
def solo(folder: Path) -> list[list[int]]:
    """What each neighbour is told alone, and at the end the canary."""

    async def asked() -> list[list[int]]:
        async with running_service(faulty_model(folder, Fault()), faulty_config(folder)) as service:
            answers = [await generate_ids(service, neighbour(i)) for i in range(len(NEIGHBOURS))]
            return [*answers, await canary_ids(service.address)]

    return asyncio.run(asked())


INTERNAL, OK = grpc.StatusCode.INTERNAL, grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("slow-step", OK),
        ("raise", INTERNAL),
        ("panic", INTERNAL),
        ("raise@6", OK),
        ("panic@6", OK),
        ("out-of-memory", OK),
        ("out-of-memory@6", OK),
        ("nan-row", INTERNAL),
        ("wrong-length", INTERNAL),
        ("wrong-length@6", OK),
        ("tokenizer", INTERNAL),
        ("tokenizer-panic", INTERNAL),
        ("detokenizer", INTERNAL),
        ("detokenizer-panic", INTERNAL),
    ],
)
async def test_a_fault_hurts_at_most_who_is_struck_and_leaves_nothing_behind(
    folder: Path, solo: list[list[int]], text: str, ending: grpc.StatusCode
) -> None:
    fault = Fault.parse(text)
    async with running_service(faulty_model(folder, fault), faulty_config(folder)) as service:
        await generate_ids(service, make_start(max_tokens=1))  # connections stand, helpers have begun
        before = tasks_now()
        good = [asyncio.create_task(generate_ids(service, neighbour(i))) for i in range(5)]
        session = RawSession(service.generation, timeout_s=60)
        await session.start(neighbour(5, "good"), victim(fault.kind, "bad"), neighbour(6, "late"))
        assert await ending_of(service, victim(fault.kind)) is ending
        assert await asyncio.gather(*good) == solo[:5]
        assert await session.half_close() is OK
        assert fault.num_struck > 0
        await until_no_task_but(before)
        await assert_as_new(service.address, service.control_address, solo[-1])
    assert [ids_of(session.events[label]) for label in ("good", "late")] == solo[5:7]
    events = session.events["bad"]
    assert [is_ended(events[: i + 1]) for i in range(len(events))] == [False] * (len(events) - 1) + [True]
    code = events[-1].error.code if events[-1].HasField("error") else code_pb2.OK
    assert code == ending.value[0]
    assert SECRET not in str(events)


async def test_a_step_that_hangs_delays_and_loses_nothing(folder: Path, solo: list[list[int]]) -> None:
    fault = Fault.parse("hang@6")
    async with running_service(faulty_model(folder, fault), faulty_config(folder)) as service:
        good = [asyncio.create_task(generate_ids(service, neighbour(i))) for i in range(7)]
        await until(lambda: fault.num_struck > 0)
        # While the model hangs, the edge answers: a bad request is refused, another one may be given up.
        assert await ending_of(service, make_start(temperature=-1.0)) is grpc.StatusCode.INVALID_ARGUMENT
        given_up = service.generation.Generate(GenerateRequest(start=make_start()))
        given_up.cancel()
        assert await given_up.code() is grpc.StatusCode.CANCELLED
        fault.released.set()
        assert await asyncio.gather(*good) == solo[:7]
        await assert_as_new(service.address, service.control_address, solo[-1])


@pytest.mark.parametrize("text", ["death@6", "raise@6+", "panic@6+", "wrong-length@6+"])
async def test_when_nothing_can_be_run_any_more_everybody_is_told_and_nobody_waits(
    folder: Path, text: str
) -> None:
    async with running_service(faulty_model(folder, Fault.parse(text)), faulty_config(folder)) as service:
        before = tasks_now()
        session = RawSession(service.generation, timeout_s=60)
        await session.start(neighbour(5, "a"), neighbour(6, "b"))
        endings = [asyncio.create_task(ending_of(service, neighbour(i))) for i in range(5)]
        assert set(await asyncio.gather(*endings)) == {INTERNAL}
        await session.until_end_of("a", "b")
        # A step that fails as a whole is tried three times; whoever comes in between sees one of those.
        later = [await ending_of(service, neighbour(i)) for i in range(4)]
        assert later[-1] is grpc.StatusCode.UNAVAILABLE
        assert set(later) <= {INTERNAL, grpc.StatusCode.UNAVAILABLE}
        assert await session.half_close() is OK
        assert service.engine.is_dead
        await until_no_task_but(before)
    for events in session.events.values():
        assert events[-1].error.code == code_pb2.INTERNAL
        assert SECRET not in str(events)
