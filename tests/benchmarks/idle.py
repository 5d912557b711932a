"""Nothing is said for ten minutes while clients ask for signs of life: does one of their streams break?

python -m tests.benchmarks.idle --seconds 600 --keepalive-s 10

One request runs for all that time, over a model that computes nothing, and it has the only place. The others
wait in the queue, or on a connection or a `Session` that has nothing to send. What goes over each connection
is counted: pings of either side, and GOAWAY, which is how a server says "too many pings". The network of one
client passes nothing on any more, which both sides have to notice by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.clients import HeadraceError, InferenceClient, RetryPolicy, Unavailable
from headrace.clients.connection import ConnectionOptions
from headrace.v1.control_pb2 import GetLoadRequest
from headrace.v1.generation_pb2 import GenerateRequest
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.aftermath import until_idle
from tests.support.breakable_link import breakable_link
from tests.support.http2 import GOAWAY, FrameCounter
from tests.support.server_process import ServerProcess, server_process
from tests.support.service import RawSession, ids_of, make_start, rest_of

STEP_S = 0.25
NUM_TOKENS = 3
"""Of each answer but the long one."""
FROZEN_PROMPT = tuple(range(1, 14))
"""Of the client whose network freezes: nobody else's is as long."""
MOST_FROZEN_S = 120.0
"""A server asks after 60 s of silence and gives up 20 s later."""
_CLOCK_SERVER = "tests.benchmarks.streams"
_LOOK_EVERY_S = 0.05
_ONCE = RetryPolicy(max_attempts=1)


@dataclass(frozen=True)
class Client:
    """One that has nothing to read for long.

    Args:
        address: what it connects to.
        keepalive_s: after so long without a word it asks for a sign of life, seconds.
        seconds: how long nothing is said.
    """

    address: str
    keepalive_s: float
    seconds: float

    async def queued(self) -> int:
        """A request waits for its turn; how many tokens come in the end, as for all of these."""
        async with self._channel() as channel:
            return await _num_tokens(channel)

    async def queued_session(self) -> int:
        """A request of a Session waits for its turn; the stream is never half-closed."""
        async with self._channel() as channel:
            session = RawSession(GenerationServiceStub(channel))
            await session.start(make_start("r", max_tokens=NUM_TOKENS))
            await session.until_end_of("r")
            return len(ids_of(session.events["r"]))

    async def queued_by_default(self) -> int:
        """The same as `queued`, by Headrace's own client as it stands: it pings every 30 s."""
        async with InferenceClient(self.address, retry=_ONCE) as client:
            return len((await client.generate([1, 2, 3], max_tokens=NUM_TOKENS).answer()).token_ids)

    async def silent_session(self) -> int:
        """A Session of Headrace's own client has nothing to send for long, and is not half-closed."""
        connection = ConnectionOptions(keepalive_time_s=self.keepalive_s)
        async with (
            InferenceClient(self.address, connection=connection, retry=_ONCE) as client,
            client.session() as session,
        ):
            await asyncio.sleep(self.seconds)
            return len((await session.generate([1, 2, 3], max_tokens=NUM_TOKENS).answer()).token_ids)

    async def no_call(self) -> int:
        """A connection has no call at all, and its client pings nevertheless."""
        async with self._channel() as channel:
            await channel.channel_ready()
            await asyncio.sleep(self.seconds)
            return await _num_tokens(channel)

    def _channel(self) -> grpc.aio.Channel:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.keepalive_time_ms", round(1e3 * self.keepalive_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        return grpc.aio.insecure_channel(self.address, options=options)


async def _num_tokens(channel: grpc.aio.Channel) -> int:
    call = GenerationServiceStub(channel).Generate(GenerateRequest(start=make_start(max_tokens=NUM_TOKENS)))
    return len(ids_of([response.event async for response in call]))


KINDS: tuple[Callable[[Client], Awaitable[int]], ...] = (
    *(Client.queued, Client.queued_session, Client.queued_by_default),
    *(Client.silent_session, Client.no_call),
)


@dataclass
class Wait:
    """What one client has been through.

    Args:
        asked, answered: what went over its connection.
        num_connections: that it has made.
        num_tokens: of its answer.
        lasted_s: from its beginning to the end of its answer, seconds.
        error: what it was told in place of the answer.
    """

    name: str
    asked: FrameCounter = field(default_factory=partial(FrameCounter, is_client=True))
    answered: FrameCounter = field(default_factory=partial(FrameCounter, is_client=False))
    num_connections: int = 0
    num_tokens: int = 0
    lasted_s: float = 0.0
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What should not have been, in words."""
        found = [self.error] if self.error else []
        if self.num_tokens != NUM_TOKENS:
            found.append(f"{self.num_tokens} tokens in place of {NUM_TOKENS}")
        if self.num_connections != 1:
            found.append(f"{self.num_connections} connections in place of one")
        if self.answered.kinds[GOAWAY]:
            found.append("the server said GOAWAY")
        return found


@dataclass
class Idle:
    """What became of all of them.

    Args:
        num_long_tokens: of the request that ran.
        frozen_client_s, frozen_server_s: from the moment at which a network passed nothing on any more until
            its client was told so, and until its request was in the queue no more, seconds.
        frozen_faults: what should not have been there, in words.
    """

    waits: list[Wait] = field(default_factory=list)
    num_long_tokens: int = 0
    frozen_client_s: float = 0.0
    frozen_server_s: float = 0.0
    frozen_faults: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What should not have been, in words."""
        return [f"{wait.name}: {fault}" for wait in self.waits for fault in wait.faults] + self.frozen_faults


async def idle(seconds: float, keepalive_s: float, *, freezes: bool) -> Idle:
    """Let all of them wait at one server.

    Args:
        freezes: whether there is a client whose network freezes, too; both sides take their time to notice.

    Raises:
        AssertionError: the server holds something when all have gone.
    """
    result = Idle()
    with tempfile.TemporaryDirectory() as folder:
        async with server_process(
            f"clock:{1e3 * STEP_S:g}", Path(folder) / "ready.json", "--max-num-seqs=1", module=_CLOCK_SERVER
        ) as server:
            await server.until_health(HealthCheckResponse.SERVING)
            await _wait_for_all(server, result, seconds, keepalive_s, freezes=freezes)
            await until_idle(server.control)
    return result


async def _wait_for_all(
    server: ServerProcess, result: Idle, seconds: float, keepalive_s: float, *, freezes: bool
) -> None:
    start = make_start(max_tokens=round(seconds / STEP_S))
    long = server.generation.Generate(GenerateRequest(start=start))
    # Accepted, then its first token: from here on it has the place.
    first = [response.event async for response in rest_of(long, 2)]
    async with asyncio.TaskGroup() as group:
        if freezes:
            group.create_task(_freeze(server, result))
        for kind in KINDS:
            group.create_task(_wait(server, kind, keepalive_s, seconds, result))
        events = [response.event async for response in rest_of(long)]
    result.num_long_tokens = len(ids_of([*first, *events]))


async def _wait(
    server: ServerProcess,
    kind: Callable[[Client], Awaitable[int]],
    keepalive_s: float,
    seconds: float,
    result: Idle,
) -> None:
    wait, began_s = Wait(kind.__name__), time.monotonic()
    result.waits.append(wait)
    async with breakable_link(_address(server), wait.asked.feed, wait.answered.feed) as link:
        try:
            wait.num_tokens = await kind(Client(link.address, keepalive_s, seconds))
        except grpc.aio.AioRpcError as error:
            wait.error = f"{error.code().name}: {error.details()}"
        except HeadraceError as error:
            wait.error = f"{type(error).__name__}: {error}"
        wait.num_connections, wait.lasted_s = link.num_connections, time.monotonic() - began_s


async def _freeze(server: ServerProcess, result: Idle) -> None:
    async with breakable_link(_address(server)) as link, InferenceClient(link.address, retry=_ONCE) as client:
        generation = client.generate(FROZEN_PROMPT, max_tokens=NUM_TOKENS)
        reading = asyncio.create_task(generation.answer())
        await _until_waiting(server)
        link.freeze()
        frozen_s = time.monotonic()
        try:
            await reading
        except Unavailable:
            result.frozen_client_s = time.monotonic() - frozen_s
        else:
            result.frozen_faults.append("the client of a frozen network got an answer")
        # Nobody tells the server: its log says when it has noticed.
        while not any(_is_frozen_end(event) for event in server.events()):
            if time.monotonic() - frozen_s > MOST_FROZEN_S:
                result.frozen_faults.append(f"the server has not noticed in {MOST_FROZEN_S:.0f} s")
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        result.frozen_server_s = time.monotonic() - frozen_s


def _is_frozen_end(event: dict[str, object]) -> bool:
    return event["event"] == "request ended" and event["prompt_tokens"] == len(FROZEN_PROMPT)


async def _until_waiting(server: ServerProcess) -> None:
    while not (await server.control.GetLoad(GetLoadRequest())).num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)


def _address(server: ServerProcess) -> str:
    return f"127.0.0.1:{server.port}"


def table(result: Idle) -> str:
    """For a person."""
    heads = ("client", "waited", "its pings", "the server's", "GOAWAYs", "connections", "tokens")
    lines = ["{:18} {:>8} {:>9} {:>12} {:>7} {:>11} {:>6}".format(*heads)]
    lines += [
        f"{wait.name:18} {wait.lasted_s:6.1f} s {wait.asked.num_pings:9} {wait.answered.num_pings:12} "
        f"{wait.answered.kinds[GOAWAY]:7} {wait.num_connections:11} {wait.num_tokens:6}"
        for wait in result.waits
    ]
    lines.append(f"the request that ran told {result.num_long_tokens} tokens")
    if result.frozen_server_s:
        lines.append(
            f"a frozen network was noticed by its client after {result.frozen_client_s:.1f} s, by the server "
            f"after {result.frozen_server_s:.1f} s"
        )
    return "\n".join([*lines, *(f"! {fault}" for fault in result.faults)])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.idle", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long nothing is said")
    parser.add_argument(
        "--keepalive-s", type=float, default=10, help="between two pings of a client, seconds"
    )
    arguments = parser.parse_args()
    result = asyncio.run(idle(arguments.seconds, arguments.keepalive_s, freezes=True))
    print(table(result))
    if result.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
