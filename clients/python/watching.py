"""Follows a server for `headrace top`, also through its end and its next start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from headrace.clients.connection import ConnectionOptions
from headrace.clients.control import ControlClient
from headrace.clients.errors import Unavailable, Unimplemented
from headrace.clients.events import StepReport
from headrace.clients.retry import RetryPolicy
from headrace.clients.top import TopState
from headrace.clients.top_view import TopView

_AGAIN_S = 1.0
_ANSWER_S = 10.0
_WARM_UP_S = 1.0
"""Time that figures of the last seconds need before the first of them means something."""


async def follow(
    target: str,
    view: TopView,
    *,
    interval_s: float,
    duration_s: float | None = None,
    is_once: bool = False,
    connection: ConnectionOptions | None = None,
) -> None:
    """Show how a server does, again and again. One that goes is waited for.

    Args:
        target: its control port.
        interval_s: from picture to picture, seconds.
        duration_s: when to end, seconds; None: never.
        is_once: end after one picture.

    Raises:
        Unavailable: nobody answers at the beginning.
        HeadraceError: it can't be watched.
    """
    follower = _Follower(TopState(), view, interval_s, is_once=is_once)
    try:
        async with asyncio.timeout(duration_s):
            while True:
                client = ControlClient(target, retry=RetryPolicy(max_attempts=1), connection=connection)
                try:
                    async with client as control:
                        await follower.follow(control)
                    return
                except Unimplemented as error:
                    raise Unimplemented(
                        f"{target} has no control service: give the operator's port (`headrace serve "
                        "--control-port`), not the callers'",
                        code=error.code,
                    ) from None
                except Unavailable as error:
                    # One that says when it will be back is there, only not ready.
                    if not follower.has_shown and error.retry_after_s is None:
                        raise
                    view.say(f"{target}: {_reason(error)}; trying again")
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        return


class _Follower:
    def __init__(self, state: TopState, view: TopView, interval_s: float, *, is_once: bool) -> None:
        self._state = state
        self._view = view
        self._interval_s = interval_s
        self._is_once = is_once
        self.has_shown = False

    async def follow(self, control: ControlClient) -> None:
        """Show one server for as long as it lasts, or once."""
        self._state.forget()
        self._state.take_load(await control.load(timeout_s=_ANSWER_S), time.monotonic())
        async with control.step_watch() as steps:
            watching = asyncio.create_task(self._take(steps))
            try:
                await self._show_until_it_ends(control, watching)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _show_until_it_ends(self, control: ControlClient, watching: asyncio.Task[None]) -> None:
        wait_s = min(_WARM_UP_S, self._interval_s)
        while True:
            ended, _ = await asyncio.wait({watching}, timeout=wait_s)
            if ended:
                watching.result()
                raise Unavailable("the server has gone down")
            self._state.take_load(await control.load(timeout_s=_ANSWER_S), time.monotonic())
            self._view.show(self._state.snapshot(time.monotonic()))
            self.has_shown = True
            if self._is_once:
                return
            wait_s = self._interval_s

    async def _take(self, steps: AsyncIterator[StepReport]) -> None:
        async for report in steps:
            self._state.take_step(report, time.monotonic())


def _reason(error: Unavailable) -> str:
    # gRPC tells of every address that it tried; the last one says it all.
    return error.message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
