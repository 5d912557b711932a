"""Many clients of every kind on one server for a long time: is a token lost or doubled, is anything kept?

python -m tests.benchmarks.soak --seconds 600 --clients 200
python -m tests.benchmarks.soak --only cancel_first --actions 50000

Half of the clients behave well, some of them slowly, and what they are told is compared with what each prompt
gives alone. The others cancel, vanish, ask for what can't be had, or send what is no HTTP/2. With --only they
all do the same.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from headrace.v1.generation_pb2 import GenerateRequest, GenerationEvent, StartGeneration
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.benchmarks.growth import Growth, Look
from tests.support.hostile import GENERATE, connected, request
from tests.support.http2 import call_headers, header_bomb, message, opening, ping, reset
from tests.support.served_tiny import ServedTiny, ids_over, served_tiny
from tests.support.service import RawSession, ids_of, is_ended, make_start

PROMPTS = tuple(tuple(range(20 + i, 24 + 3 * i)) for i in range(12))
LENGTHS = (1, 5, 20, 60)
SAMPLE_EVERY_S = 0.5
KINDS = ("stream", "session", "own_connection", "cancel", "cancel_first", "invalid", "vanish", "garbage")
_Kind = Callable[[random.Random], Coroutine[None, None, None]]
_BUSY = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})


@dataclass
class Soak:
    """What is seen of a server under all its clients.

    Args:
        right, wrong, refused: answers of well-behaved clients: as alone; with a token lost, doubled or wrong;
            turned away by a full server.
        faults: statuses that nobody should have got, and answers that were wrong, a few in words.
        done: what each kind of client has done how often.
        growth: of its memory.
        num_unwell: looks at which health didn't say SERVING.
    """

    right: int = 0
    wrong: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    growth: Growth = field(default_factory=Growth)
    num_unwell: int = 0

    def judge(self, events: list[GenerationEvent], expected: list[int]) -> None:
        """Compare what one client was told with what it is told alone."""
        got = ids_of(events)
        in_order = [event.sequence for event in events] == list(range(len(events)))
        if got == expected and in_order:
            self.right += 1
        else:
            self.wrong += 1
            self.note(f"{len(got)} tokens in place of {len(expected)}, in order: {in_order}: {got}")

    def note(self, fault: str) -> None:
        """Keep the first few."""
        if len(self.faults) < 20:
            self.faults.append(fault)

    @property
    def num_actions(self) -> int:
        """Of all clients so far."""
        return self.done.total()

    @property
    def has_failed(self) -> bool:
        """Whether anything was lost, wrong or kept."""
        return bool(self.wrong or self.faults or self.num_unwell) or self.growth.is_flat is False


@dataclass
class Crowd:
    """All clients of one soak."""

    tiny: ServedTiny
    channels: list[grpc.aio.Channel]
    answers: dict[tuple[int, ...], list[int]]
    soak: Soak = field(default_factory=Soak)

    def start(self, rng: random.Random, label: str = "") -> tuple[StartGeneration, list[int]]:
        """A request and its right answer."""
        prompt, num_tokens = rng.choice(PROMPTS), rng.choice(LENGTHS)
        return make_start(label, prompt=prompt, max_tokens=num_tokens), self.answers[prompt][:num_tokens]

    def stub(self, rng: random.Random) -> GenerationServiceStub:
        """Over one of the connections that many share."""
        return GenerationServiceStub(rng.choice(self.channels))

    async def stream(self, rng: random.Random) -> None:
        """A well-behaved client: one request, read to its end, at times slowly."""
        start, expected = self.start(rng)
        pause_s = rng.choice((0.0, 0.0, 0.0, 0.05))
        events: list[GenerationEvent] = []
        try:
            async for response in self.stub(rng).Generate(GenerateRequest(start=start), timeout=120):
                events.append(response.event)
                await asyncio.sleep(pause_s)
        except grpc.aio.AioRpcError as error:
            self._refused(error)
        else:
            self.soak.judge(events, expected)

    async def session(self, rng: random.Random) -> None:
        """A well-behaved client: several requests over one stream, some of which it takes back."""
        session = RawSession(self.stub(rng), timeout_s=120)
        wanted: dict[str, list[int]] = {}
        try:
            for i in range(rng.randrange(1, 8)):
                start, expected = self.start(rng, f"r{i}")
                await session.start(start)
                if rng.random() < 0.2:
                    await session.cancel(f"r{i}")
                else:
                    wanted[f"r{i}"] = expected
            if await session.half_close() is not grpc.StatusCode.OK:
                self.soak.note(f"a session ended with {await session.call.code()}")
        except grpc.aio.AioRpcError as error:
            self._refused(error)
            return
        for label, expected in wanted.items():
            events = session.events.get(label, [])
            if is_ended(events) and events[-1].HasField("error"):
                self.soak.refused += 1
            else:
                self.soak.judge(events, expected)

    async def own_connection(self, rng: random.Random) -> None:
        """A well-behaved client that connects for one request."""
        start, expected = self.start(rng)
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.tiny.address, options=options) as channel:
            call = GenerationServiceStub(channel).Generate(GenerateRequest(start=start), timeout=120)
            try:
                events = [response.event async for response in call]
            except grpc.aio.AioRpcError as error:
                self._refused(error)
            else:
                self.soak.judge(events, expected)

    async def cancel(self, rng: random.Random) -> None:
        """Give up at some moment."""
        start, _ = self.start(rng)
        call = self.stub(rng).Generate(GenerateRequest(start=start))
        with suppress(grpc.aio.AioRpcError):
            for _ in range(rng.randrange(5)):
                await call.read()
        call.cancel()

    async def cancel_first(self, rng: random.Random) -> None:
        """Give up at the first token."""
        start, _ = self.start(rng)
        start.stop.max_tokens = max(LENGTHS)
        call = self.stub(rng).Generate(GenerateRequest(start=start))
        with suppress(grpc.aio.AioRpcError):
            await call.read()
            await call.read()
        call.cancel()

    async def invalid(self, rng: random.Random) -> None:
        """Ask for what can't be had."""
        start, _ = self.start(rng)
        start.sampling.temperature = rng.choice((-1.0, float("nan"), 1e9))
        with suppress(grpc.aio.AioRpcError):
            await self.stub(rng).Generate(GenerateRequest(start=start)).read()

    async def vanish(self, rng: random.Random) -> None:
        """Go in the middle of an answer without a word."""
        async with connected(self.tiny.process.port) as connection:
            await connection.send(opening() + call_headers(1, GENERATE) + message(1, request(60)))
            await asyncio.sleep(rng.random() / 5)

    async def garbage(self, rng: random.Random) -> None:
        """Send what is no HTTP/2, or too much of it."""
        call = call_headers(1, GENERATE)
        parts = rng.choice(
            (
                rng.randbytes(500),
                opening() + rng.randbytes(500),
                opening() + call + rng.randbytes(100),
                opening() + ping() * 500,
                opening() + call + message(1, rng.randbytes(40)) + ping(),
                opening() + b"".join(call_headers(i, GENERATE) + reset(i) for i in range(1, 200, 2)),
                opening() + header_bomb(1, GENERATE, 1000),
            )
        )
        with suppress(OSError):
            async with connected(self.tiny.process.port) as connection:
                await connection.send(parts)

    def _refused(self, error: grpc.aio.AioRpcError) -> None:
        self.soak.refused += 1
        if error.code() not in _BUSY:
            self.soak.note(f"{error.code().name}: {error.details()}")

    async def client(self, number: int, kinds: Sequence[_Kind], is_over: Callable[[], bool]) -> None:
        """One client, until it is over."""
        rng = random.Random(number)
        while not is_over():
            kind = rng.choice(kinds)
            await kind(rng)
            self.soak.done[kind.__name__] += 1

    def kinds(self, number: int, only: str | None) -> Sequence[_Kind]:
        """What a client does: even numbers behave well, unless all do the same."""
        if only is not None:
            return [getattr(self, only)]
        well = (self.stream, self.stream, self.session, self.own_connection)
        ill = (self.cancel, self.cancel, self.invalid, self.vanish, self.garbage)
        return ill if number % 2 else well

    async def look(self, began_s: float) -> None:
        """Sample memory and health until cancelled."""
        while True:
            is_serving = await self.tiny.process.health() == health_pb2.HealthCheckResponse.SERVING
            self.soak.num_unwell += not is_serving
            at_s = time.monotonic() - began_s
            self.soak.growth.looks.append(Look(at_s, self.soak.num_actions, self.tiny.rss_bytes))
            await asyncio.sleep(SAMPLE_EVERY_S)


async def soak(
    folder: Path,
    num_clients: int,
    *,
    seconds: float = math.inf,
    num_actions: float = math.inf,
    only: str | None = None,
) -> Soak:
    """Let the clients at a server, and look at it afterwards.

    Args:
        seconds, num_actions: they begin nothing new after that.
        only: what all of them do, one of `KINDS`; None for the mixture.

    Raises:
        AssertionError: the server is not as new when all have gone.
    """
    async with served_tiny(folder, "--max-num-seqs", "16") as tiny:
        answers = {prompt: await ids_over(tiny.process, prompt, max(LENGTHS)) for prompt in PROMPTS}
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(tiny.address, options=options) for _ in range(20)]
        crowd = Crowd(tiny, channels, answers)
        began_s = time.monotonic()

        def is_over() -> bool:
            return time.monotonic() - began_s >= seconds or crowd.soak.num_actions >= num_actions

        looking = asyncio.create_task(crowd.look(began_s))
        try:
            clients = (crowd.client(i, crowd.kinds(i, only), is_over) for i in range(num_clients))
            await asyncio.gather(*clients)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await asyncio.gather(*(channel.close() for channel in channels))
        await tiny.assert_unharmed()
        return crowd.soak


def table(result: Soak) -> str:
    """For a person."""
    num_looks = len(result.growth.looks)
    lines = [
        f"answers as alone            {result.right}",
        f"answers lost/doubled/wrong  {result.wrong}",
        f"turned away                 {result.refused}",
        f"other faults                {len(result.faults)}",
        f"healthy                     at {num_looks - result.num_unwell} of {num_looks} looks",
        *result.growth.lines(),
        "blocks, requests left       0 (checked), and the canary answers as at first",
        *(f"  {kind:<24}  {count}" for kind, count in sorted(result.done.items())),
        *(f"! {fault}" for fault in result.faults),
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="(default: 600, unless --actions)")
    parser.add_argument("--actions", type=float, default=math.inf)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--only", choices=KINDS)
    arguments = parser.parse_args()
    seconds = arguments.seconds if min(arguments.seconds, arguments.actions) < math.inf else 600.0
    with tempfile.TemporaryDirectory() as folder:
        work = soak(
            Path(folder),
            arguments.clients,
            seconds=seconds,
            num_actions=arguments.actions,
            only=arguments.only,
        )
        result = asyncio.run(work)
    print(table(result))
    if result.has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
