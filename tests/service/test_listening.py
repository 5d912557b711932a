from __future__ import annotations

import asyncio
import errno
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest

from headrace.engine import AsyncEngine
from headrace.service import door as door_module
from headrace.service import listening
from headrace.service.door import Door
from headrace.service.health import Health
from headrace.service.limits import Limits
from headrace.service.listening import Listener
from headrace.service.server import Endpoint, make_public_server
from headrace.service.serving import ServedModel, Serving
from headrace.service.text import TextWorkers
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support import http2
from tests.support.fake_call import FakeCall
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import PROMPT, ids_of, make_start, until
from tests.support.step_gate import StepGate


def send_path(port: int, path: bytes) -> None:
    """Open a stream whose request path is these bytes."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(http2.opening() + http2.call_headers(1, path))
        connection.settimeout(5)
        connection.recv(1)


async def until_refused(port: int) -> None:
    """Connect again and again until nobody listens: a connection made before that is the fallen server's.

    One that the system had taken for the server when it closed its port is reset, not refused.
    """
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except (ConnectionRefusedError, ConnectionResetError):
            return
        writer.close()


@asynccontextmanager
async def looked_after(listener: Listener) -> AsyncIterator[None]:
    """A port that is watched within the block, and closed after it, however the block ends."""
    await listener.start()
    watching = asyncio.create_task(listener.watch())
    try:
        yield
    finally:
        watching.cancel()
        await listener.stop(1.0)


async def test_a_port_that_fell_is_opened_again_and_running_streams_go_on() -> None:
    limits, serving, health, gate = Limits(), Serving(), await Health.start(), StepGate()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    listener = Listener(
        lambda door: make_public_server(serving, health, limits, has_reflection=False, door=door),
        Endpoint("127.0.0.1", 0),
        "--port",
        stream_grace_s=30.0,
    )
    port = listener.endpoint.port
    async with (
        looked_after(listener),
        AsyncEngine(make_fake_model(before_step=gate), make_config()) as engine,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        serving.open(ServedModel("fake", engine, TextWorkers(1, limits), limits))
        running = GenerationServiceStub(channel).Generate(
            GenerateRequest(start=make_start("before", max_tokens=8)), wait_for_ready=True
        )
        # Told as what it is, should it fail: nobody else would wait for an end.
        await until(lambda: gate.num_steps > 0 or running.done())
        assert not running.done(), await running.details()
        await asyncio.to_thread(send_path, port, b"/\xff")
        await until_refused(port)
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as fresh:
            gate.open()
            answer = await GenerationServiceStub(fresh).GenerateOnce(
                GenerateOnceRequest(start=make_start("after", max_tokens=4)),
                wait_for_ready=True,
                timeout=60,
            )
        assert list(answer.completions[0].token_ids) == expected_output(PROMPT, 4)
        assert ids_of([response.event async for response in running]) == expected_output(PROMPT, 8)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNRESET, errno.EADDRNOTAVAIL])
async def test_a_look_that_fails_for_another_reason_opens_no_port_again(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    num_looks, num_made = 0, 0

    async def fail(*_: object) -> None:
        nonlocal num_looks
        num_looks += 1
        raise OSError(number, "as the test wants it")

    def make(door: Door) -> grpc.aio.Server:
        nonlocal num_made
        num_made += 1
        return grpc.aio.server()

    monkeypatch.setattr(listening, "_LOOK_EVERY_S", 0)
    monkeypatch.setattr(asyncio, "open_connection", fail)
    async with looked_after(Listener(make, Endpoint("127.0.0.1", 0), "--port", stream_grace_s=30.0)):
        await until(lambda: num_looks > 3)
    assert num_made == 1


class FakeServer:
    """Listens nowhere, and notes that it was started and stopped."""

    def __init__(self) -> None:
        self.is_started = False
        self.is_stopped = False

    async def start(self) -> None:
        self.is_started = True

    async def stop(self, grace_s: float | None) -> None:
        self.is_stopped = True


@dataclass
class FallingPort:
    """A port whose first look finds nobody, the servers made for it in turn, and their doors."""

    listener: Listener
    servers: list[FakeServer]
    doors: list[Door]


@pytest.fixture
def falling_port(monkeypatch: pytest.MonkeyPatch) -> FallingPort:
    servers, doors = list[FakeServer](), list[Door]()

    def make(door: Door) -> grpc.aio.Server:
        servers.append(FakeServer())
        doors.append(door)
        return cast(grpc.aio.Server, servers[-1])

    async def answers(listener: Listener) -> bool:
        return len(servers) > 1

    monkeypatch.setattr(listening, "_LOOK_EVERY_S", 0)
    monkeypatch.setattr(door_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(listening, "bind", lambda *_: 1)
    monkeypatch.setattr(Listener, "_answers", answers)
    listener = Listener(make, Endpoint("127.0.0.1", 0), "--port", stream_grace_s=1000.0)
    return FallingPort(listener, servers, doors)


async def test_a_server_that_fell_is_closed_by_its_door_when_its_last_call_has_ended(
    falling_port: FallingPort,
) -> None:
    servers, call = falling_port.servers, FakeCall()
    falling_port.doors[0].enter(cast(Any, call))
    async with looked_after(falling_port.listener):
        await until(lambda: len(servers) > 1 and servers[1].is_started)
        fallen = weakref.ref(servers[0])
        for _ in range(100):
            await asyncio.sleep(0)
        assert not servers[0].is_stopped, "its call has as long as is promised"
        call.end()
        await until(lambda: servers[0].is_stopped)
        assert not servers[1].is_stopped
        # However often a port falls, nothing of it is kept.
        servers[0] = servers[1]
        await until(lambda: fallen() is None)


async def test_the_end_of_a_port_does_not_wait_for_the_calls_of_a_server_that_fell(
    falling_port: FallingPort,
) -> None:
    servers = falling_port.servers
    falling_port.doors[0].enter(cast(Any, FakeCall()))
    async with looked_after(falling_port.listener):
        await until(lambda: len(servers) > 1 and servers[1].is_started)
        await falling_port.listener.stop(0.0)
        assert [server.is_stopped for server in servers] == [True, True]
