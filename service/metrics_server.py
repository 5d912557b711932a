"""The port that Prometheus scrapes: plain HTTP, served by threads of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry, start_http_server

from headrace.service.metrics import LoadCollector, Snapshot
from headrace.service.server import BindError, Endpoint
from headrace.service.serving import Serving

_PATIENCE_S = 5.0
"""A scrape waits so long for an event loop that is busy."""


@asynccontextmanager
async def metrics_port(serving: Serving, endpoint: Endpoint) -> AsyncIterator[int]:
    """Serve the metrics of `serving` at a port until the end of the block; its number is given.

    Raises:
        BindError: the port can't be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LoadCollector(_from_other_threads(lambda: snapshot(serving))))
    registry.register(serving.edge.metrics.registry)
    try:
        server, thread = start_http_server(endpoint.port, endpoint.host, registry)
    except OSError as error:
        raise BindError(
            f"can't serve metrics on {endpoint.address}: {error.strerror}; choose another --metrics-port"
        ) from error
    try:
        yield int(server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


def snapshot(serving: Serving) -> Snapshot | None:
    """The truth now; None while no model is served. For the event loop's thread."""
    served = serving.served
    if served is None:
        return None
    engine = served.engine
    return Snapshot(
        served.name,
        engine.load(),
        engine.max_num_seqs,
        engine.seconds_since_progress(),
        num_detached=serving.resumables.num_detached,
    )


def _from_other_threads(ask: Callable[[], Snapshot | None]) -> Callable[[], Snapshot | None]:
    """`ask`, as other threads may call it: it is run on this thread's event loop, which owns the truth."""
    loop = asyncio.get_running_loop()

    async def on_loop(asked_s: float) -> Snapshot | None:
        found, lag_s = ask(), time.monotonic() - asked_s
        return None if found is None else replace(found, lag_s=lag_s)

    def asked() -> Snapshot | None:
        question = asyncio.run_coroutine_threadsafe(on_loop(time.monotonic()), loop)
        try:
            return question.result(_PATIENCE_S)
        except TimeoutError:
            # Whoever does not answer is not up.
            question.cancel()
            return None

    return asked
