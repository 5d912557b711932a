"""`headrace top` follows a server through its end and its next start."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import pytest

from headrace.clients.errors import Unavailable, Unimplemented
from headrace.clients.top import Snapshot
from headrace.clients.watching import follow
from headrace.v1 import control_pb2
from tests.support.fake_server import Context, FakeControl, running_fake_server


class RecordedView:
    """Keeps what it is shown; `changed` is set each time."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.messages: list[str] = []
        self.changed = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.changed.set()

    def say(self, message: str) -> None:
        self.messages.append(message)
        self.changed.set()

    async def until(self, num_snapshots: int, num_messages: int) -> None:
        while len(self.snapshots) < num_snapshots or len(self.messages) < num_messages:
            self.changed.clear()
            await self.changed.wait()


class Busy(FakeControl):
    """Makes three steps and then none, but goes on."""

    async def WatchSteps(self, request: control_pb2.WatchStepsRequest, context: Context):
        async for response in super().WatchSteps(request, context):
            yield response
        await asyncio.Event().wait()


async def test_once_is_one_picture_with_the_steps_in_it() -> None:
    view = RecordedView()
    async with running_fake_server(control=Busy()) as server:
        await follow(server.target, view, interval_s=0.2, is_once=True)
    (snapshot,) = view.snapshots
    assert snapshot.load.num_waiting == 1
    assert snapshot.lanes[4].request == "a"
    assert snapshot.parts[2].p50_s == pytest.approx(0.002)


async def test_it_ends_after_its_time() -> None:
    view = RecordedView()
    async with running_fake_server(control=Busy()) as server:
        # Neither the server nor a slow machine ends it.
        await follow(server.target, view, interval_s=0.01, duration_s=0.5)
    assert view.messages == []


async def test_a_server_that_goes_is_waited_for() -> None:
    view = RecordedView()
    async with running_fake_server(control=Busy()) as first:
        target = first.target
        following = asyncio.create_task(follow(target, view, interval_s=0.01))
        await view.until(2, 0)
    await view.until(0, 1)
    num_shown = len(view.snapshots)
    async with running_fake_server(target=target, control=Busy()):
        await view.until(num_shown + 2, 1)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert view.messages[0].startswith(f"{target}: ")
    assert view.messages[0].endswith("; trying again")


async def test_nobody_there_at_the_beginning_is_an_error() -> None:
    with pytest.raises(Unavailable, match="refused"):
        await follow("127.0.0.1:1", RecordedView(), interval_s=0.1)


async def test_a_port_for_callers_is_named_as_the_wrong_one() -> None:
    async with running_fake_server(control=None) as server:
        with pytest.raises(
            Unimplemented, match=r"no control service: give the operator's port .*--control-port"
        ):
            await follow(server.target, RecordedView(), interval_s=0.1)
