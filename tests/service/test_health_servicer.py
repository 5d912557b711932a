"""Health as watchers see it, the hostile ones included."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.service.health_servicer import HealthServicer
from tests.support import http2
from tests.support.service import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def watch_without_a_window() -> bytes:
    """A watcher whose flow control lets no byte of an answer through."""
    return (
        http2.PREFACE
        + http2.settings(initial_window_size=0)
        + http2.call_headers(1, b"/grpc.health.v1.Health/Watch")
        + http2.message(1, b"")
    )


class CountedServicer(HealthServicer):
    """Counts who has begun to watch."""

    num_watchers = 0

    async def Watch(self, request, context):
        self.num_watchers += 1
        async for response in super().Watch(request, context):
            yield response


async def test_a_watcher_who_takes_nothing_holds_up_nobody() -> None:
    servicer, server = CountedServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set(("", "liveness"), "SERVING")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        _, deaf = await asyncio.open_connection("127.0.0.1", port)
        deaf.write(watch_without_a_window())
        await until(lambda: servicer.num_watchers == 1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
            assert (await watch.read()).status == SERVING
            for status in (NOT_SERVING, SERVING, NOT_SERVING):
                servicer.set([""], health_pb2.HealthCheckResponse.ServingStatus.Name(status))
                assert (await watch.read()).status == status
                checked = await stub.Check(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
                assert checked.status == status
            unknown = stub.Watch(health_pb2.HealthCheckRequest(service="later"))  # type: ignore[attr-defined]
            assert (await unknown.read()).status == UNKNOWN
            servicer.set(["later"], "SERVING")
            assert (await unknown.read()).status == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))  # type: ignore[attr-defined]
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
            watch.cancel()
            unknown.cancel()
        deaf.close()
    finally:
        await server.stop(None)


async def test_all_names_are_listed_with_what_each_of_them_is_now() -> None:
    servicer, server = HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.set(("", "liveness"), "SERVING")
    servicer.set([""], "NOT_SERVING")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            listed = await stub.List(health_pb2.HealthListRequest())  # type: ignore[attr-defined]
        assert {name: told.status for name, told in listed.statuses.items()} == {
            "": NOT_SERVING,
            "liveness": SERVING,
        }
    finally:
        await server.stop(None)
