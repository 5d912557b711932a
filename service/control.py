"""ControlService: for the operator, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace.engine import ConfigError, InvalidRequest
from headrace.service.convert import load_to_proto, seconds, step_to_proto
from headrace.service.health import Health
from headrace.service.interceptors import Context
from headrace.service.latency import latency_to_proto, targets_from_proto
from headrace.service.serving import Serving
from headrace.service.status import duration
from headrace.service.telemetry import log
from headrace.service.violations import duration_violations
from headrace.v1 import control_pb2, control_pb2_grpc


class Drainer:
    """The one way to leave: not ready first, then a pause in which balancers notice, then nothing new.

    Args:
        lame_duck_s: that pause, seconds.
        grace_s: longest wait for running requests where the caller names none, seconds.
    """

    def __init__(self, serving: Serving, health: Health, lame_duck_s: float, grace_s: float) -> None:
        self._serving = serving
        self._health = health
        self._lame_duck_s = lame_duck_s
        self._grace_s = grace_s
        self._has_paused = False

    async def drain(self, grace_s: float | None = None) -> int:
        """Drain the engine; may be called again, and at the same time. What no stream holds is finished as
        all else is, and waits within the same grace to be resumed.

        Returns:
            How many requests were unfinished at the end of the grace.
        """
        engine = self._serving.model().engine
        grace_s = self._grace_s if grace_s is None else grace_s
        log.info("draining", lame_duck_s=self._lame_duck_s, grace_s=grace_s)
        await self._health.leave()
        if not self._has_paused:
            self._has_paused = True
            await asyncio.sleep(self._lame_duck_s)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        num_unfinished = await engine.drain(grace_s)
        resumables = self._serving.resumables
        try:
            async with asyncio.timeout(max(0.0, began_s + grace_s - loop.time())):
                await resumables.until_none_is_detached()
        except TimeoutError:
            log.warning("nobody has resumed them", requests=resumables.num_detached)
        log.info("drained", unfinished=num_unfinished)
        return num_unfinished


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Load, steps, latencies, drain."""

    def __init__(self, serving: Serving, drainer: Drainer) -> None:
        self._serving = serving
        self._drainer = drainer

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:
        """Finish what runs, take nothing new."""
        wrong = tuple(duration_violations("grace", request.grace))
        if wrong:
            raise InvalidRequest(*wrong)
        grace_s = seconds(request.grace) if request.HasField("grace") else None
        if grace_s is not None and grace_s < 0:
            raise InvalidRequest.of("grace", f"must not be negative, got {grace_s:g} s")
        return control_pb2.DrainResponse(num_unfinished=await self._drainer.drain(grace_s))

    async def FlushCache(
        self, request: control_pb2.FlushCacheRequest, context: Context
    ) -> control_pb2.FlushCacheResponse:
        """Forget all cached KV that no live request uses."""
        return control_pb2.FlushCacheResponse(num_blocks_flushed=self._serving.model().engine.flush_cache())

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: Context
    ) -> control_pb2.GetLoadResponse:
        """The load now."""
        served = self._serving.model()
        engine = served.engine
        load = engine.load()
        told = load_to_proto(load, engine.batching.value, engine.max_num_seqs)
        told.latency.CopyFrom(latency_to_proto(load.latency))
        told.model = served.name
        told.num_detached = self._serving.resumables.num_detached
        told.uptime.CopyFrom(duration(served.uptime_s))
        return told

    async def WatchSteps(
        self, request: control_pb2.WatchStepsRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchStepsResponse]:
        """Each step as it happens, until the engine ends."""
        served = self._serving.model()
        async with served.engine.watch_steps() as watch:
            # So that who waits for it may begin what he wants to watch.
            await context.send_initial_metadata(())
            async for num_missed, stats in watch:
                yield step_to_proto(stats, num_missed, served.opened_s)

    async def SetLatencyBudget(
        self, request: control_pb2.SetLatencyBudgetRequest, context: Context
    ) -> control_pb2.SetLatencyBudgetResponse:
        """Promise other latencies."""
        served = self._serving.model()
        targets, priority = targets_from_proto(request, served.limits)
        try:
            served.engine.latencies.set_targets(targets, priority)
        except ConfigError as error:
            raise InvalidRequest.of("priority", str(error)) from error
        log.info("latency targets", tpot_s=targets.tpot_s, ttft_s=targets.ttft_s, priority=priority)
        return control_pb2.SetLatencyBudgetResponse(latency=latency_to_proto(served.engine.load().latency))
