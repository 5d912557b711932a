from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from headrace.service.grpc_batches import mend_batches
from tests.support.repository import ROOT

CANCELLED_CALLS = """
import asyncio, ctypes, gc
import grpc
from headrace.service.grpc_batches import mend_batches

NUM_CALLS = 1000
library = ctypes.CDLL(None)

class Heaps(ctypes.Structure):
    # struct mallinfo2 of <malloc.h>
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    ]

library.mallinfo2.restype = Heaps
ended = asyncio.Semaphore(0)

class Words(grpc.GenericRpcHandler):
    def service(self, details):
        async def answer(request, context):
            try:
                while True:
                    await context.write(b"word")
            finally:
                ended.release()

        async def one(request, context):
            return b"word"

        if details.method == "/words/One":
            return grpc.unary_unary_rpc_method_handler(one)
        return grpc.unary_stream_rpc_method_handler(answer)

async def main():
    assert mend_batches()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Words(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = channel.unary_stream("/words/Words")
        used = []
        for _ in range(3):
            for _ in range(NUM_CALLS):
                call = stub(b"")
                await call.read()
                call.cancel()
            for _ in range(NUM_CALLS):
                await ended.acquire()
            # What gRPC still tells of calls that are over, it tells before it tells of this one.
            await channel.unary_unary("/words/One")(b"")
            gc.collect()
            used.append(library.mallinfo2().uordblks)
        print((used[2] - used[1]) / NUM_CALLS)
    await server.stop(None)

asyncio.run(main())
"""
MOST_LEFT_BYTES = 150
"""By a call that was cancelled; unmended it is more than 250."""


@dataclass
class Operations:
    """What gRPC's own function does: it begins something, waits for it, and frees what that took."""

    future: Any = None
    ended: list[str] = field(default_factory=list)

    async def execute(self, call: Any, operations: tuple[Any, ...], loop: Any) -> None:
        self.future = loop.create_future()
        await self.future
        self.ended.append("freed")


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    operations = Operations()
    monkeypatch.setattr(cygrpc, "execute_batch", operations.execute)
    assert mend_batches(), "another version of gRPC: see whether grpc#43360 still stands, and what it needs"
    return operations


async def test_operations_that_succeed_end_for_whoever_waits(operations: Operations) -> None:
    waiting = asyncio.ensure_future(_executed())
    await asyncio.sleep(0)
    assert not operations.ended
    operations.future.set_result(None)
    await waiting
    assert operations.ended == ["freed"]


async def test_what_failed_is_freed_and_told(operations: Operations) -> None:
    waiting = asyncio.ensure_future(_executed())
    await asyncio.sleep(0)
    operations.future.set_exception(ValueError("the call is over"))
    with pytest.raises(ValueError, match="the call is over"):
        await waiting
    assert operations.ended == ["freed"]


@pytest.mark.parametrize("told", [None, ValueError("the call is over")])
async def test_whoever_waits_is_told_when_freeing_fails(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, told: Exception | None
) -> None:
    monkeypatch.setattr(operations, "ended", None)
    waiting = asyncio.ensure_future(_executed())
    await asyncio.sleep(0)
    if told is None:
        operations.future.set_result(None)
    else:
        operations.future.set_exception(told)
    with pytest.raises(AttributeError, match="append"):
        await waiting


@pytest.mark.parametrize("has_succeeded", [True, False])
async def test_what_nobody_waits_for_any_more_is_freed_at_its_end(
    operations: Operations, has_succeeded: bool
) -> None:
    waiting = asyncio.ensure_future(_executed())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert not operations.future.cancelled()
    assert not operations.ended
    if has_succeeded:
        operations.future.set_result(None)
    else:
        operations.future.set_exception(ValueError("nobody wants to know"))
    assert operations.ended == ["freed"]


async def test_an_end_that_another_loop_learns_of_is_told_in_its_own(operations: Operations) -> None:
    waiting = asyncio.ensure_future(_executed())
    await asyncio.sleep(0)

    async def tell() -> None:
        operations.future.call_soon_threadsafe(operations.future.set_result, None)

    await asyncio.to_thread(asyncio.run, tell())
    await waiting
    assert operations.ended == ["freed"]


def test_an_unknown_version_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = Operations()
    monkeypatch.setattr(cygrpc, "execute_batch", operations.execute)
    monkeypatch.setattr("grpc.__version__", "9.0.0")
    assert not mend_batches()
    assert cygrpc.execute_batch == operations.execute


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library tells no sizes")
def test_cancelled_calls_leave_nothing_behind() -> None:
    told = subprocess.run(
        [sys.executable, "-c", CANCELLED_CALLS], capture_output=True, check=True, cwd=ROOT, text=True
    )
    assert float(told.stdout) < MOST_LEFT_BYTES


async def _executed() -> None:
    await cygrpc.execute_batch(None, (), asyncio.get_running_loop())
