"""Clients that mean no good, or can't do better. Each is a coroutine over a port that ends by itself.

None of them waits for an answer that may never come: what the server says to them is read and dropped.
"""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType

from headrace.v1.generation_pb2 import GenerateRequest
from tests.support import http2
from tests.support.service import make_start

GENERATE = b"/headrace.v1.GenerationService/Generate"
HOST = "127.0.0.1"
Attack = Callable[[int], Coroutine[None, None, None]]


class Connection:
    """A connection whose answers are dropped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._dropping = asyncio.create_task(_drop_all(reader))

    async def send(self, *parts: bytes) -> bool:
        """Send one after the other; whether the server still takes it."""
        try:
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()
        except OSError:
            return False
        return True

    async def until_closed(self) -> None:
        """Wait until the server hangs up."""
        await asyncio.wait({self._dropping})

    async def close(self) -> None:
        """Go without a word."""
        self._dropping.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.gather(self._dropping, return_exceptions=True)


async def _drop_all(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65536):
            pass


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection to a port, closed at the end of the block."""
    connection = Connection(*await asyncio.open_connection(HOST, port))
    try:
        yield connection
    finally:
        await connection.close()


def request(max_tokens: int = 100) -> bytes:
    """An ordinary request, encoded."""
    return GenerateRequest(start=make_start(max_tokens=max_tokens)).SerializeToString()


async def connection_flood(port: int) -> None:
    """Many connections that say nothing."""
    connections = [Connection(*await asyncio.open_connection(HOST, port)) for _ in range(300)]
    await asyncio.gather(*(connection.close() for connection in connections))


async def stream_flood(port: int) -> None:
    """More open calls than a connection may have, none of which ever says what it wants."""
    async with connected(port) as connection:
        await connection.send(http2.opening())
        for first in range(1, 12_000, 400):
            calls = [http2.call_headers(stream, GENERATE) for stream in range(first, first + 400, 2)]
            if not await connection.send(b"".join(calls)):
                return


async def ping_flood(port: int) -> None:
    """Pings without end."""
    async with connected(port) as connection:
        await connection.send(http2.opening())
        for i in range(100):
            if not await connection.send(b"".join(http2.ping(i) for _ in range(500))):
                return


async def settings_flood(port: int) -> None:
    """Settings without end, each to be acknowledged."""
    async with connected(port) as connection:
        await connection.send(http2.opening())
        for i in range(100):
            if not await connection.send(http2.settings(initial_window_size=i) * 500):
                return


async def rapid_resets(port: int) -> None:
    """Calls that are given up as soon as they are made."""
    async with connected(port) as connection:
        await connection.send(http2.opening())
        for first in range(1, 8_000, 200):
            calls = [
                http2.call_headers(stream, GENERATE) + http2.message(stream, request()) + http2.reset(stream)
                for stream in range(first, first + 200, 2)
            ]
            if not await connection.send(b"".join(calls)):
                return


async def garbage(port: int) -> None:
    """Bytes that are no HTTP/2, from the first one on or from some later one on."""
    rng = random.Random(7)
    beginnings = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        http2.PREFACE,
        http2.opening(),
        http2.opening() + http2.call_headers(1, GENERATE),
        http2.opening() + http2.call_headers(1, GENERATE) + http2.message(1, request(), flags=0),
    )
    for _ in range(6):
        for beginning in beginnings:
            async with connected(port) as connection:
                await connection.send(beginning + rng.randbytes(rng.randrange(1, 3000)))


async def breaches(port: int) -> None:
    """Frames that are well made and may not stand where they do."""
    call = http2.call_headers(1, GENERATE)
    for frames in (
        http2.frame(http2.DATA, 0, 0, b"x"),
        http2.frame(http2.DATA, 0, 5, b"x"),
        http2.frame(http2.HEADERS, http2.END_HEADERS, 2, b""),
        http2.frame(http2.PING, 0, 0, b"short"),
        http2.frame(http2.PING, 0, 1, bytes(8)),
        http2.frame(http2.SETTINGS, 0, 0, b"short"),
        http2.frame(http2.WINDOW_UPDATE, 0, 0, (2**31 - 1).to_bytes(4, "big")) * 3,
        http2.frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)),
        http2.frame(http2.PUSH_PROMISE, http2.END_HEADERS, 1, bytes(4)),
        http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, b""),
        http2.frame(http2.GOAWAY, 0, 0, bytes(8)),
        http2.frame(99, 255, 2**31 - 1, b"unknown"),
        call + call,
        call + http2.message(1, request()) + http2.message(1, request()),
        call + http2.frame(http2.DATA, http2.END_STREAM, 1, b"\x00\xff\xff\xff\xffshort"),
        call + http2.frame(http2.DATA, http2.END_STREAM, 1, b"\x07" + bytes(4)),
        call + http2.frame(http2.DATA, http2.END_STREAM, 1, b""),
        http2.call_headers(1, GENERATE, more={b"content-type": b"text/html"}),
        http2.call_headers(1, GENERATE, more={b":method": b"GET"}),
        http2.call_headers(1, GENERATE, more={b"grpc-timeout": b"never"}),
        http2.call_headers(1, GENERATE, more={b"grpc-encoding": b"zip"}) + http2.message(1, request()),
        http2.call_headers(1, b""),
        http2.call_headers(1, b"/" * 4000),
        http2.call_headers(1, b"/no/such/method") + http2.message(1, b""),
    ):
        async with connected(port) as connection:
            await connection.send(http2.opening() + frames + http2.ping())


async def slow_loris(port: int) -> None:
    """The beginning of a call, byte by byte, never to its end."""
    beginning = http2.opening() + http2.call_headers(1, GENERATE, flags=0)
    for size in (5, 40, len(beginning) - 1):
        async with connected(port) as connection:
            for i in range(size):
                await connection.send(beginning[i : i + 1])


async def endless_headers(port: int) -> None:
    """A header block that goes on and on."""
    async with connected(port) as connection:
        await connection.send(http2.opening() + http2.call_headers(1, GENERATE, flags=0))
        field = http2.header_block({b"a": b"b" * 4000})
        for _ in range(2000):
            if not await connection.send(http2.frame(http2.CONTINUATION, 0, 1, field)):
                return


async def huge_headers(port: int) -> None:
    """Headers far beyond what is taken, honestly written and referred to."""
    async with connected(port) as connection:
        many = {b"x-%d" % i: b"v" * 1000 for i in range(14)}
        for stream in range(1, 60, 2):
            await connection.send(http2.opening() if stream == 1 else b"")
            await connection.send(http2.call_headers(stream, GENERATE, more=many))
    for stream in range(1, 5):
        async with connected(port) as connection:
            await connection.send(http2.opening() + http2.header_bomb(stream, GENERATE, 12_000))


async def readers_without_a_window(port: int) -> None:
    """Calls whose answers are never let through."""
    async with connected(port) as connection:
        await connection.send(http2.PREFACE + http2.settings(initial_window_size=0))
        for stream in range(1, 200, 2):
            await connection.send(http2.call_headers(stream, GENERATE) + http2.message(stream, request()))


async def vanishers(port: int) -> None:
    """Clients that go in the middle of everything."""
    for cut in range(1, 400, 13):
        whole = http2.opening() + http2.call_headers(1, GENERATE) + http2.message(1, request())
        async with connected(port) as connection:
            await connection.send(whole[:cut])


async def compressed_bomb(port: int) -> None:
    """A message of some hundred kilobytes that would be a thousand times as much."""
    packed = gzip.compress(bytes(2**28))
    body = b"\x01" + len(packed).to_bytes(4, "big") + packed
    async with connected(port) as connection:
        headers = http2.call_headers(1, GENERATE, more={b"grpc-encoding": b"gzip"})
        await connection.send(http2.opening(), headers)
        for first in range(0, len(body), 16_000):
            flags = http2.END_STREAM if first + 16_000 >= len(body) else 0
            await connection.send(http2.frame(http2.DATA, flags, 1, body[first : first + 16_000]))
        await connection.send(http2.ping())


ATTACKS: MappingProxyType[str, Attack] = MappingProxyType(
    {
        attack.__name__: attack
        for attack in (
            connection_flood,
            stream_flood,
            ping_flood,
            settings_flood,
            rapid_resets,
            garbage,
            breaches,
            slow_loris,
            endless_headers,
            huge_headers,
            readers_without_a_window,
            vanishers,
            compressed_bomb,
        )
    }
)


async def attack_at_random(port: int, rng: random.Random, names: Sequence[str] = ()) -> str:
    """Make one attack; its name."""
    name = rng.choice(list(names or ATTACKS))
    await ATTACKS[name](port)
    return name
