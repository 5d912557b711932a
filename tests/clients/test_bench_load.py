from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import count

import pytest

from headrace.clients.bench_backend import Ask, End, RequestFailedError, Tokens
from headrace.clients.bench_load import (
    EARLIER_TURN_FAILED,
    INTERRUPTED,
    TIMEOUT,
    LoadOptions,
    LoadRun,
    reconcile,
)
from headrace.clients.bench_stats import RequestRecord
from headrace.clients.bench_view import state_line
from headrace.clients.bench_workload import Conversation, Turn, Workload
from tests.support.bench_backends import ScriptedBackend


def workload(*conversations: Conversation) -> Workload:
    """These, over and over; by default of one short prompt each, all different."""
    if not conversations:
        return Workload("many", None, lambda number: Conversation((Turn((number + 1,), 3),)))
    return Workload("given", len(conversations), conversations.__getitem__)


async def refuse(ask: Ask) -> AsyncGenerator[Tokens | End]:
    if ask.output_len:
        raise RequestFailedError("RESOURCE_EXHAUSTED", "the queue is full")
    yield End()


async def hang(ask: Ask) -> AsyncGenerator[Tokens | End]:
    yield Tokens(1, (1,))
    await asyncio.Event().wait()


async def test_a_closed_loop_keeps_its_concurrency_and_sends_everything_once() -> None:
    backend = ScriptedBackend()
    run = LoadRun(backend, workload(), LoadOptions(concurrency=3, num_conversations=10))
    await run.run()
    assert backend.most_open == 3
    assert sorted(ask.prompt for ask in backend.asked) == [(number,) for number in range(1, 11)]
    assert all(record.is_complete and record.num_tokens == 3 for record in run.records)
    assert (run.counts.num_over, run.counts.num_tokens, run.counts.num_failed) == (10, 30, 0)


async def test_in_a_closed_loop_a_request_is_due_when_its_place_is_free() -> None:
    ticks = count(1000)  # a clock's zero is anywhere
    run = LoadRun(
        ScriptedBackend(),
        workload(),
        LoadOptions(concurrency=1, num_conversations=3),
        lambda: float(next(ticks)),
    )
    await run.run()
    first, second, third = run.records
    assert first.end_s is not None
    assert second.end_s is not None
    assert first.due_s == 0.0
    assert first.end_s < 1000
    assert first.end_s < second.due_s < second.end_s < third.due_s


async def test_an_open_loop_sends_whatever_the_server_does() -> None:
    backend = ScriptedBackend(hang)
    run = LoadRun(backend, workload(), LoadOptions(arrivals=iter([0.0] * 99), num_conversations=20))
    running = asyncio.create_task(run.run())
    await backend.until_open(20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [record.error for record in run.records] == [INTERRUPTED] * 20
    assert all(record.end_s is not None for record in run.records)


async def test_latency_counts_from_the_moment_of_the_schedule_though_the_client_was_late() -> None:
    # The clock of this run jumps: whatever is due at 0.01 s can only be sent long after.
    times = count(step=5)
    run = LoadRun(
        ScriptedBackend(),
        workload(),
        LoadOptions(arrivals=iter([0.0, 0.01]), num_conversations=2),
        lambda: float(next(times)),
    )
    await run.run()
    late = run.records[1]
    assert late.due_s == 0.01
    assert late.sent_s is not None
    assert late.ttft_s is not None
    assert late.lateness_s == late.sent_s - 0.01
    assert late.ttft_s > late.lateness_s > 4


async def test_with_a_cap_the_wait_for_a_place_is_part_of_the_latency() -> None:
    backend = ScriptedBackend()
    options = LoadOptions(arrivals=iter([0.0] * 9), concurrency=2, num_conversations=8)
    run = LoadRun(backend, workload(), options)
    await run.run()
    assert backend.most_open == 2
    assert all(record.due_s == 0.0 for record in run.records)
    first, *_, last = run.records
    assert first.end_s is not None
    assert last.sent_s is not None
    assert last.sent_s >= first.end_s


async def test_what_is_held_back_is_not_called_running() -> None:
    all_due = asyncio.Event()
    told = []

    def arrivals() -> Iterator[float]:
        yield from [0.0] * 5
        all_due.set()
        yield 0.0

    async def tell(ask: Ask) -> AsyncGenerator[Tokens | End]:
        await all_due.wait()
        told.append(state_line(run))
        yield Tokens(ask.output_len, (1,) * ask.output_len)
        yield End()

    options = LoadOptions(arrivals=arrivals(), concurrency=2, num_conversations=5)
    run = LoadRun(ScriptedBackend(tell), workload(), options)
    await run.run()
    assert told[0].startswith("2 running, 3 held back, 0 tokens")
    assert told[-1].startswith("1 running, 12 tokens") or told[-1].startswith("2 running, 9 tokens")
    assert run.counts.num_held == 0


async def test_a_time_ends_the_sending_and_what_runs_is_finished() -> None:
    arrivals = iter([0.0, 0.001, 0.002, 5.0, 6.0])
    run = LoadRun(ScriptedBackend(), workload(), LoadOptions(arrivals=arrivals, duration_s=1.0))
    await run.run()
    assert [record.due_s for record in run.records] == [0.0, 0.001, 0.002]
    assert all(record.is_complete for record in run.records)


async def test_a_refusal_is_a_result() -> None:
    run = LoadRun(ScriptedBackend(refuse), workload(), LoadOptions(concurrency=2, num_conversations=4))
    await run.run()
    assert [record.error for record in run.records] == ["RESOURCE_EXHAUSTED"] * 4
    assert run.records[0].message == "the queue is full"
    assert run.counts.num_failed == 4


async def test_a_request_that_takes_too_long_is_given_up_with_what_it_had() -> None:
    backend = ScriptedBackend(hang)
    run = LoadRun(backend, workload(), LoadOptions(concurrency=1, num_conversations=1, timeout_s=0.01))
    await run.run()
    assert (run.records[0].error, run.records[0].num_tokens) == (TIMEOUT, 1)
    assert backend.num_open == 0


async def test_a_turn_repeats_what_was_said_before() -> None:
    backend = ScriptedBackend()
    talk = Conversation((Turn((1, 2), 2), Turn((9,), 1), Turn((8,), 1)))
    run = LoadRun(backend, workload(talk), LoadOptions(concurrency=1, num_conversations=1))
    await run.run()
    assert [ask.prompt for ask in backend.asked] == [(1, 2), (1, 2, 3, 4, 9), (1, 2, 3, 4, 9, 10, 8)]
    assert (run.counts.num_conversations_over, run.counts.num_over) == (1, 3)


async def test_a_turn_of_text_repeats_the_text() -> None:
    backend = ScriptedBackend()
    talk = Conversation((Turn("Hello", 2), Turn("More", 1)))
    await LoadRun(backend, workload(talk), LoadOptions(concurrency=1, num_conversations=1)).run()
    assert backend.asked[1].prompt == "Hello  1 2 More"


async def test_behind_a_failed_turn_the_others_are_told_as_failed_too() -> None:
    backend = ScriptedBackend(refuse)
    talk = Conversation((Turn((1,), 1), Turn((2,), 1), Turn((3,), 1)))
    run = LoadRun(backend, workload(talk), LoadOptions(concurrency=1, num_conversations=1))
    await run.run()
    assert [record.error for record in run.records] == ["RESOURCE_EXHAUSTED"] + [EARLIER_TURN_FAILED] * 2
    assert len(backend.asked) == 1


async def test_what_the_server_tells_at_the_end_is_kept() -> None:
    run = LoadRun(ScriptedBackend(), workload(), LoadOptions(concurrency=1, num_conversations=1))
    await run.run()
    (record,) = run.records
    assert (record.num_prompt_tokens, record.queued_s) == (1, 0.25)


@pytest.mark.parametrize(
    ("num_told", "arrivals"),
    [
        (3, [(1.0, 1), (2.0, 2)]),
        (5, [(1.0, 1), (2.0, 4)]),
        (2, [(1.0, 1), (2.0, 1)]),
        (1, [(1.0, 1)]),
        (0, []),
    ],
)
def test_counted_chunks_are_made_to_agree_with_the_servers_count(
    num_told: int, arrivals: list[tuple[float, int]]
) -> None:
    record = RequestRecord(0, 3, 0.0, arrivals=[(1.0, 1), (2.0, 2)])
    reconcile(record, num_told)
    assert record.arrivals == arrivals


@pytest.mark.parametrize("options", [LoadOptions(num_conversations=1), LoadOptions(concurrency=1)])
def test_a_run_without_an_end_or_without_a_load_is_a_mistake(options: LoadOptions) -> None:
    with pytest.raises(ValueError, match="needs"):
        LoadRun(ScriptedBackend(), workload(), options)
