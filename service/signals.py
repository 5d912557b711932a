"""Signals that ask the process to end."""

from __future__ import annotations

import asyncio
import os
import signal

from headrace.service.telemetry import log

_LAST_RESORT_S = 3.0
"""Time after a second signal until the process ends whatever hangs."""


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for the end."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # 0 as long as nobody has lost patience.
        self.exit_code = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._caught, signum)

    async def first(self) -> None:
        """Wait for the first."""
        await self._first.wait()

    async def second(self) -> None:
        """Wait for the second."""
        await self._second.wait()

    def _caught(self, signum: signal.Signals) -> None:
        log.info("signal", name=signum.name)
        if not self._first.is_set():
            self._first.set()
            return
        if self._second.is_set():
            return
        self.exit_code = 128 + signum
        self._second.set()
        # A step that hangs holds up an orderly end.
        self._loop.call_later(_LAST_RESORT_S, os._exit, self.exit_code)
