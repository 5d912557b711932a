"""The service in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1.control_pb2_grpc import ControlServiceStub
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.child_process import child_process, end_process

ROOT = Path(__file__).parents[2]


@dataclass
class ServerProcess:
    """A running program, what it has written, and stubs to it."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    port: int = 0
    control_port: int = 0
    generation: GenerationServiceStub = field(init=False)
    control: ControlServiceStub = field(init=False)
    health_stub: health_pb2_grpc.HealthStub = field(init=False)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(signum)

    async def exit_code(self) -> int:
        """Wait for the end."""
        return await self.process.wait()

    async def health(self, name: str = "") -> int:
        """The health of one name."""
        request = health_pb2.HealthCheckRequest(service=name)
        return int((await self.health_stub.Check(request)).status)  # type: ignore[attr-defined]

    async def until_health(self, status: int, name: str = "") -> None:
        """Watch until a name has this status."""
        request = health_pb2.HealthCheckRequest(service=name)
        async for response in self.health_stub.Watch(request):  # type: ignore[attr-defined]
            if response.status == status:
                return

    def events(self) -> list[dict[str, object]]:
        """Its log, parsed: every line has to be one JSON object."""
        return [json.loads(line) for line in self.lines]


@asynccontextmanager
async def server_process(
    plan: str, ready_file: Path, *flags: str, module: str = "tests.support.serve_fake"
) -> AsyncIterator[ServerProcess]:
    """Start the program over a fake model, on free ports, and wait until its log says that they are bound."""
    async with child_process(
        *(sys.executable, "-m", module, plan),
        *("--port", "0", "--control-port", "0", "--ready-file", str(ready_file), "--log-format", "json"),
        *("--lame-duck-s", "0", *flags),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
        stderr=PIPE,
    ) as process:
        server = ServerProcess(process)
        listening: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(_read_lines(process, server.lines, listening))
        try:
            either: set[asyncio.Future[Any]] = {listening, reading}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                raise AssertionError(f"the server ended with {await process.wait()}: {server.lines}")
            ports = listening.result()
            assert ports["pid"] == process.pid
            server.port, server.control_port = ports["port"], ports["control_port"]
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.control_port}") as control_channel,
            ):
                server.generation = GenerationServiceStub(channel)
                server.health_stub = health_pb2_grpc.HealthStub(channel)
                server.control = ControlServiceStub(control_channel)
                yield server
        finally:
            # What it wrote is whole only then.
            await end_process(process)
            await reading


async def _read_lines(
    process: asyncio.subprocess.Process, lines: list[str], listening: asyncio.Future[dict[str, int]]
) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        lines.append(line.decode().rstrip("\n"))
        if not listening.done() and '"listening"' in lines[-1]:
            listening.set_result(json.loads(lines[-1]))
