"""Ports that stand up again.

A request path that is no UTF-8 ends the accepting loop of grpc.aio's server, and the server tells nobody.
Whatever ends it, the next caller must find a server on the same port, and running streams must go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from headrace.service.door import Door
from headrace.service.server import BindError, Endpoint, bind
from headrace.service.tasks import begin, end
from headrace.service.telemetry import log, places_of

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_LOOK_EVERY_S = 1.0


class Listener:
    """A server on a port, for as long as it is wanted.

    Args:
        make: builds a server with all its services, behind a door of its own.
        endpoint: where it listens; port 0 is settled by `bind`, and then kept.
        port_flag: how the operator names the port.
        credentials: for TLS; None is plain text.
        stream_grace_s: how long the streams of a server that fell may go on, seconds. What had reached it and
            was not taken up waits until they have ended, then gets UNAVAILABLE and may come again.
    """

    def __init__(
        self,
        make: Callable[[Door], grpc.aio.Server],
        endpoint: Endpoint,
        port_flag: str,
        stream_grace_s: float,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._make = make
        self._port_flag = port_flag
        self._stream_grace_s = stream_grace_s
        self._credentials = credentials
        self._door = Door()
        self._server = make(self._door)
        self.endpoint = Endpoint(endpoint.host, bind(self._server, endpoint, port_flag, credentials))
        # Servers that fell and are not closed yet, by what closes them.
        self._fallen: dict[asyncio.Task[None], tuple[grpc.aio.Server, Door]] = {}

    async def start(self) -> None:
        """Begin to accept."""
        await self._server.start()

    async def watch(self) -> None:
        """Stand up again whenever the port no longer answers, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if not await self._answers():
                    await self._stand_up()
            except Exception as error:
                # Nobody else looks after the port: the next look tries again.
                log.critical("a port can't be looked after", port=self.endpoint.port, **places_of(error))

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, once nothing runs any more or `grace_s` seconds are over; see `Door.close`."""
        closing = list(self._fallen)
        everything = ((self._server, self._door), *self._fallen.values())
        await asyncio.gather(*(door.close(server, grace_s) for server, door in everything))
        # A shorter grace ends the longer one that a fallen server was given.
        await end(*closing)

    async def _answers(self) -> bool:
        host = _ANY_ADDRESS.get(self.endpoint.host, self.endpoint.host)
        try:
            _, writer = await asyncio.open_connection(host, self.endpoint.port)
        except ConnectionRefusedError:
            return False
        except OSError:
            # Too many open files, say, or a reset: no proof that nobody listens, and the next look is soon.
            return True
        writer.close()
        return True

    async def _stand_up(self) -> None:
        log.critical("a port fell and is opened again", port=self.endpoint.port)
        door = Door()
        fresh = self._make(door)
        try:
            bind(fresh, self.endpoint, self._port_flag, self._credentials)
        except BindError as error:
            # The next look tries again.
            log.critical("the port can't be opened", port=self.endpoint.port, reason=str(error))
            return
        closing = begin(self._door.close(self._server, self._stream_grace_s), "fallen-port")
        self._fallen[closing] = (self._server, self._door)
        closing.add_done_callback(lambda _: self._fallen.pop(closing))
        self._server, self._door = fresh, door
        await fresh.start()
