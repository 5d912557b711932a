from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headrace.service.convert import seconds
from headrace.v1.control_pb2 import (
    DrainRequest,
    FlushCacheRequest,
    GetLoadRequest,
    SetLatencyBudgetRequest,
    StepRow,
    WatchStepsRequest,
    WatchStepsResponse,
)
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    generate,
    generate_ids,
    ids_of,
    make_start,
    reason_of,
    running_service,
    status_of,
    until,
    violated_fields,
)
from tests.support.step_gate import StepGate


async def test_the_load_counts_what_runs_and_what_waits() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate), make_config(max_num_seqs=2)) as service:
        session = RawSession(service.generation)
        await session.start(*(make_start(f"r{i}") for i in range(3)))
        await until(lambda: service.engine.load().num_waiting == 2)
        busy = await service.control.GetLoad(GetLoadRequest())
        gate.open()
        assert await session.half_close() is grpc.StatusCode.OK
        idle = await service.control.GetLoad(GetLoadRequest())
    assert (busy.num_running, busy.num_waiting, busy.max_num_seqs, busy.batching) == (1, 2, 2, "continuous")
    assert busy.blocks.live > 0
    assert (idle.num_running, idle.num_waiting, idle.blocks.live) == (0, 0, 0)
    assert idle.blocks.free + idle.blocks.cached == idle.blocks.total == 64
    assert idle.totals.steps > 0
    assert idle.totals.decode_tokens == 3 * 7


async def test_steps_are_told_as_they_happen() -> None:
    async with running_service() as service:
        watch = service.control.WatchSteps(WatchStepsRequest())
        # They prove that the watch is on, though no step has been made.
        await watch.initial_metadata()
        await generate_ids(service, make_start("watched", max_tokens=4))
        rows: list[StepRow] = []
        starts_s: list[float] = []
        while not (rows and rows[-1].finished):
            step = await watch.read()
            assert isinstance(step, WatchStepsResponse)
            rows += [row for row in step.rows if row.request.endswith(":watched")]
            starts_s.append(seconds(step.start_time))
        watch.cancel()
    assert [row.prefill_tokens for row in rows] == [4, 0, 0, 0]
    assert [row.decode_tokens for row in rows] == [0, 1, 1, 1]
    assert all(0 <= earlier < later for earlier, later in pairwise(starts_s))


async def test_the_load_names_the_model_and_how_long_it_has_been_served() -> None:
    async with running_service() as service:
        first = await service.control.GetLoad(GetLoadRequest())
        second = await service.control.GetLoad(GetLoadRequest())
    assert first.model == "fake"
    assert 0 <= seconds(first.uptime) < seconds(second.uptime)


async def until_not_serving(service: RunningService) -> None:
    """Wait until health says that new requests should go elsewhere."""
    async for response in service.health_stub.Watch(HealthCheckRequest()):  # type: ignore[attr-defined]
        if response.status == HealthCheckResponse.NOT_SERVING:
            return


async def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate)) as service:
        running = asyncio.create_task(generate_ids(service, make_start(max_tokens=20)))
        session = RawSession(service.generation)
        await session.start(make_start("in session", max_tokens=20))
        await until(lambda: service.engine.load().num_running == 1)
        draining = service.control.Drain(DrainRequest())
        await until_not_serving(service)
        await session.start(make_start("late"))
        await session.until_end_of("late")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(service, make_start())
        gate.open()
        assert (await draining).num_unfinished == 0
        assert await running == expected_output(PROMPT, 20)
        assert await session.half_close() is grpc.StatusCode.OK
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(status_of(refusal.value)) == "DRAINING"
    assert session.events["late"][-1].error.code == code_pb2.UNAVAILABLE
    assert ids_of(session.events["in session"]) == expected_output(PROMPT, 20)


async def test_what_is_unfinished_at_the_end_of_the_grace_is_told_and_counted() -> None:
    gate = StepGate()
    async with running_service(make_fake_model(before_step=gate)) as service:
        running = asyncio.create_task(generate_ids(service, make_start()))
        await until(lambda: service.engine.load().num_running == 1)
        response = await service.control.Drain(DrainRequest(grace=Duration()))
        gate.open()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await running
    assert response.num_unfinished == 1
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "grace", [Duration(seconds=-1), Duration(seconds=-1, nanos=2_000_000_000), Duration(seconds=2, nanos=-1)]
)
async def test_a_grace_that_is_no_span_of_time_is_refused_and_nothing_is_drained(grace: Duration) -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.control.Drain(DrainRequest(grace=grace))
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
    assert violated_fields(status_of(refusal.value)) == ["grace"]


def span(seconds: float) -> Duration:
    """A Duration, in whole nanoseconds."""
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


async def test_a_latency_budget_is_told_changed_and_removed() -> None:
    async with running_service() as service:
        before = (await service.control.GetLoad(GetLoadRequest())).latency
        answer = await service.control.SetLatencyBudget(
            SetLatencyBudgetRequest(time_per_output_token=span(0.05), time_to_first_token=span(0.5))
        )
        of_class = await service.control.SetLatencyBudget(
            SetLatencyBudgetRequest(time_per_output_token=span(0.02), priority=7)
        )
        await generate_ids(service, make_start(max_tokens=3))
        told = (await service.control.GetLoad(GetLoadRequest())).latency
        cleared = (await service.control.SetLatencyBudget(SetLatencyBudgetRequest())).latency
    assert [each.HasField("time_per_output_token") for each in before.classes] == [False]
    assert answer.latency.classes[0].time_per_output_token == span(0.05)
    assert answer.latency.classes[0].time_to_first_token == span(0.5)
    assert not answer.latency.classes[0].HasField("priority")
    assert [each.priority for each in of_class.latency.classes[1:]] == [7]
    assert not of_class.latency.classes[1].HasField("time_to_first_token")
    assert [each.sequences for each in told.classes] == [1, 0]
    assert told.classes[0].HasField("attained_time_to_first_token_p95")
    assert not told.classes[1].HasField("attained_time_to_first_token_p95")
    # For all classes: those with targets of their own included.
    assert [each.HasField("time_per_output_token") for each in cleared.classes] == [False]


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (SetLatencyBudgetRequest(time_per_output_token=Duration()), ["time_per_output_token"]),
        (SetLatencyBudgetRequest(time_to_first_token=Duration(seconds=-1)), ["time_to_first_token"]),
        (SetLatencyBudgetRequest(time_to_first_token=Duration(nanos=-1)), ["time_to_first_token"]),
        (SetLatencyBudgetRequest(time_to_first_token=Duration(nanos=2**31 - 1)), ["time_to_first_token"]),
        (SetLatencyBudgetRequest(time_to_first_token=Duration(seconds=1, nanos=-5)), ["time_to_first_token"]),
        (SetLatencyBudgetRequest(time_per_output_token=Duration(nanos=1000)), ["time_per_output_token"]),
        (SetLatencyBudgetRequest(time_per_output_token=Duration(seconds=2**62)), ["time_per_output_token"]),
        (SetLatencyBudgetRequest(time_per_output_token=span(0.05), priority=101), ["priority"]),
        (
            SetLatencyBudgetRequest(
                time_per_output_token=Duration(), time_to_first_token=Duration(), priority=-(2**31)
            ),
            ["time_per_output_token", "time_to_first_token", "priority"],
        ),
    ],
)
async def test_a_latency_that_cannot_be_promised_is_refused_by_name_and_changes_nothing(
    request_: SetLatencyBudgetRequest, fields: list[str]
) -> None:
    async with running_service() as service:
        await service.control.SetLatencyBudget(SetLatencyBudgetRequest(time_per_output_token=span(0.25)))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.control.SetLatencyBudget(request_)
        told = (await service.control.GetLoad(GetLoadRequest())).latency
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_fields(status_of(refusal.value)) == fields
    assert [each.time_per_output_token for each in told.classes] == [span(0.25)]


async def test_a_field_that_the_budget_does_not_know_is_refused() -> None:
    request = SetLatencyBudgetRequest.FromString(b"\x48\x01")  # field 9, varint 1
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.control.SetLatencyBudget(request)
    assert violated_fields(status_of(refusal.value)) == ["#9"]


async def test_too_many_classes_with_targets_are_refused() -> None:
    async with running_service() as service:
        for priority in range(64):
            request = SetLatencyBudgetRequest(time_per_output_token=span(0.1), priority=priority)
            await service.control.SetLatencyBudget(request)
        again = SetLatencyBudgetRequest(time_per_output_token=span(0.2), priority=3)
        await service.control.SetLatencyBudget(again)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.control.SetLatencyBudget(SetLatencyBudgetRequest(priority=-1))
    assert violated_fields(status_of(refusal.value)) == ["priority"]


async def test_a_flush_forgets_what_the_prefix_cache_holds() -> None:
    async with running_service() as service:
        await generate_ids(service, make_start(prompt=range(1, 13), max_tokens=1))
        cached = (await service.control.GetLoad(GetLoadRequest())).blocks.cached
        flushed = (await service.control.FlushCache(FlushCacheRequest())).num_blocks_flushed
        again = (await service.control.GetLoad(GetLoadRequest())).blocks
    assert cached == flushed == 3
    assert (again.cached, again.free) == (0, again.total)


async def test_while_loading_there_is_no_load_to_tell() -> None:
    async with running_service(opens=False) as service:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.control.GetLoad(GetLoadRequest())
    assert reason_of(status_of(refusal.value)) == "LOADING"
