"""Short runs of the soak and of drains under load; the long ones are commands of `tests.benchmarks`."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.generation_pb2 import GenerateRequest
from tests.benchmarks.drain import drain_often
from tests.benchmarks.growth import Growth, Look
from tests.benchmarks.soak import soak
from tests.support.fake_runner import expected_output
from tests.support.server_process import server_process
from tests.support.service import PROMPT, ids_of, make_start, rest_of


@pytest.mark.slow
async def test_no_token_is_lost_or_doubled_among_clients_of_every_kind(tmp_path: Path) -> None:
    result = await soak(tmp_path, num_clients=60, seconds=20)
    assert result.faults == []
    assert result.wrong == 0
    assert result.right > 0
    assert result.num_unwell == 0
    assert set(result.done) >= {"stream", "session", "own_connection", "cancel", "vanish", "garbage"}


@pytest.mark.parametrize(
    ("growth_by_minute", "is_flat"),
    [((50, 20, 9, 4, 1, 0, 1, 0, 1, 0), True), ((2,) * 10, False), ((0,) * 4, None)],
    ids=["levels off", "grows on", "too short"],
)
def test_memory_that_levels_off_is_told_from_memory_that_grows(
    growth_by_minute: tuple[int, ...], is_flat: bool | None
) -> None:
    sizes = [300 + sum(growth_by_minute[:i]) for i in range(1, len(growth_by_minute) + 1)]
    growth = Growth([Look(60.0 * i, 1000 * i, size * 2**20) for i, size in enumerate(sizes)])
    assert growth.is_flat is is_flat
    assert growth.by_the_minute() == sizes
    if is_flat is False:
        assert growth.bytes_per_s * 60 == pytest.approx(2 * 2**20)
        assert growth.bytes_per_action * 1000 == pytest.approx(2 * 2**20)


@pytest.mark.slow
async def test_no_stream_is_cut_by_a_drain_under_load() -> None:
    drains = await drain_often(2)
    assert drains.cut == 0
    assert drains.whole == 2 * 20
    assert drains.exits == {0: 2}
    assert set(drains.late) <= {"UNAVAILABLE", "OK"}


@pytest.mark.slow
async def test_whoever_was_served_by_a_killed_server_is_told_and_the_next_one_serves(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = make_start(max_tokens=4000)
    async with server_process("fine", tmp_path / "first.json", "--port", port) as server:
        await server.until_health(HealthCheckResponse.SERVING)
        calls = [server.generation.Generate(GenerateRequest(start=start)) for _ in range(8)]
        for call in calls:
            await call.read()
        server.send(signal.SIGKILL)
        assert await server.exit_code() == -signal.SIGKILL
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in rest_of(call):
                    pass
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        async with server_process("fine", tmp_path / "second.json", "--port", port) as second:
            await second.until_health(HealthCheckResponse.SERVING)
            # The same channel finds the next server by itself.
            again = server.generation.Generate(
                GenerateRequest(start=make_start(max_tokens=8)), wait_for_ready=True, timeout=60
            )
            assert ids_of([response.event async for response in again]) == expected_output(PROMPT, 8)
