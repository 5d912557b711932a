"""Calls that wait to be taken up by the event loop: those of one connection cost no other connection its own.

The test holds the loop while it talks to the server by plain sockets; gRPC's own threads serve them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.service.limits import Limits
from tests.support import http2
from tests.support.service import RunningService, running_service

CHECK = b"/grpc.health.v1.Health/Check"
TIMEOUT_S = 60.0


class Peer:
    """A connection that sends and reads frames, and waits for both."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unread = bytearray()

    def send(self, frames: bytes) -> None:
        """Send frames, and wait until the server has read them all."""
        self._socket.sendall(frames + http2.ping(7))
        for kind, flags, _ in self.frames():
            if kind == http2.PING and flags & http2.ACK:
                return

    def frames(self) -> Iterator[tuple[int, int, int]]:
        """Kind, flags and stream of what the server says, as it comes."""
        while True:
            size = int.from_bytes(self._take(3), "big")
            kind, flags = self._take(2)
            stream = int.from_bytes(self._take(4), "big")
            self._take(size)
            yield kind, flags, stream

    def answered(self, num_calls: int) -> set[int]:
        """Wait for the ends of so many calls; the streams of those that got a message first."""
        answered, ended = set[int](), set[int]()
        for kind, flags, stream in self.frames():
            if stream and kind == http2.DATA:
                answered.add(stream)
            if stream and (kind == http2.RST_STREAM or flags & http2.END_STREAM):
                ended.add(stream)
            if len(ended) == num_calls:
                break
        return answered

    def _take(self, size: int) -> bytes:
        while len(self._unread) < size:
            received = self._socket.recv(65536)
            assert received, "the server hung up"
            self._unread += received
        taken = bytes(self._unread[:size])
        del self._unread[:size]
        return taken


@contextmanager
def peer(service: RunningService) -> Iterator[Peer]:
    host, port = service.address.split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connected:
        yield Peer(connected)


def calls(num_calls: int, *, are_reset: bool) -> bytes:
    """The opening of a connection and so many calls."""
    return http2.opening() + b"".join(
        http2.call_headers(stream, CHECK)
        + http2.message(stream, b"")
        + (http2.reset(stream) if are_reset else b"")
        for stream in range(1, 2 * num_calls, 2)
    )


async def test_calls_that_wait_on_one_connection_cost_another_none() -> None:
    async with running_service() as service:
        with peer(service) as hostile, peer(service) as good:
            # More than a connection may have open: whatever is given up makes room for one more.
            hostile.send(calls(Limits().max_concurrent_streams + 1000, are_reset=True))
            good.send(calls(1, are_reset=False))
            # Only now the loop goes on.
            assert await asyncio.to_thread(good.answered, 1) == {1}
        assert await service.check() == 1


async def test_a_connection_gets_all_the_calls_that_it_may_have_open() -> None:
    num_calls = Limits().max_concurrent_streams
    async with running_service() as service:
        with peer(service) as many:
            many.send(calls(num_calls, are_reset=False))
            assert len(await asyncio.to_thread(many.answered, num_calls)) == num_calls
