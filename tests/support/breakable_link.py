"""A link to a server that a test can break: TCP, passed on byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress


class BreakableLink:
    """Listens on a port of its own.

    Args:
        target: "host:port" that connections are passed on to; may be changed for those to come.
        on_sent, on_answered: are told what clients send, and what comes back, piece by piece.
    """

    def __init__(
        self,
        target: str,
        on_sent: Callable[[bytes], None] = lambda data: None,
        on_answered: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        self.target = target
        self._on_sent = on_sent
        self._on_answered = on_answered
        self.address = ""
        self.num_connections = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._is_flowing = asyncio.Event()
        self._is_flowing.set()

    def cut(self) -> None:
        """Break all connections that there are, without a word."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        self._is_flowing.set()

    def freeze(self) -> None:
        """Pass nothing on any more, though all connections stay: as when a cable is pulled."""
        self._is_flowing.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on, both ways, until either side ends it."""
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        await asyncio.gather(
            self._pass_on(reader, back, self._on_sent), self._pass_on(there, writer, self._on_answered)
        )
        self._open -= {writer, back}

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_data: Callable[[bytes], None]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                on_data(data)
                await self._is_flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def breakable_link(
    target: str,
    on_sent: Callable[[bytes], None] = lambda data: None,
    on_answered: Callable[[bytes], None] = lambda data: None,
) -> AsyncIterator[BreakableLink]:
    """A link to `target`, broken at the end; see `BreakableLink`."""
    link = BreakableLink(target, on_sent, on_answered)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        link.cut()
        await server.wait_closed()
