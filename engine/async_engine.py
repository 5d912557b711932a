"""The engine as asyncio sees it: one background coroutine that rebuilds the batch at every step.

All state belongs to the event loop's thread; only the `Runner` runs elsewhere, with a frozen plan in and a
frozen result out. So submit, abort and figures need no lock, and a long prefill never freezes the loop.

With asynchronous scheduling up to two steps are under way: while a device runs the first, the one behind it
is planned and launched. What is asked from outside is applied each time that a step has returned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from headrace.engine.async_scheduling import runs_ahead
from headrace.engine.config import BatchingPolicy, CacheLayout, EngineConfig, ModelInfo, Speculation
from headrace.engine.constraints import ConstraintDesk
from headrace.engine.core import EngineCore, RequestEvent
from headrace.engine.errors import Draining, EngineDead
from headrace.engine.model_thread import ModelThread
from headrace.engine.outputs import FailureEvent, Load
from headrace.engine.runner.fault_barrier import FaultBarrier
from headrace.engine.runner.protocol import LoadedModel
from headrace.engine.scheduling.budget import LatencyDesk
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.sequence import Request, RequestId
from headrace.engine.streams import StepWatch, TokenStream
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import max_tokens_for

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


class AsyncEngine:
    """Serves requests for as long as its ``async with`` block lasts.

    Leaving the block ends every open request with `Draining`; call `drain` before to let them finish.

    Args:
        model: what to serve.
        config: limits and policy.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._core = EngineCore(
            model.info,
            model.layout,
            model.tokenizer,
            config,
            time.monotonic,
            draft_max_len=model.draft_max_len,
        )
        self._barrier = FaultBarrier(model.runner)
        self._runs_ahead = runs_ahead(
            config.scheduler.async_scheduling,
            computes_apart=model.computes_apart,
            is_speculating=config.speculation.kind is not Speculation.NONE,
        )
        self._constraints = ConstraintDesk(model)
        self._streams: dict[RequestId, TokenStream] = {}
        self._to_abort: set[RequestId] = set()
        self._to_resume: set[RequestId] = set()
        self._watches: list[StepWatch] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._died = asyncio.Event()
        self._death: EngineDead | None = None
        self._is_draining = False
        self._end_all = False
        self._is_stopping = False
        self._last_progress_s = time.monotonic()
        self._thread = ModelThread()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self._model.info

    @property
    def layout(self) -> CacheLayout:
        """Its KV pool."""
        return self._model.layout

    @property
    def tokenizer(self) -> Tokenizer:
        """Its text side."""
        return self._model.tokenizer

    @property
    def constraints(self) -> ConstraintDesk:
        """Where constraints are made ready for requests."""
        return self._constraints

    @property
    def latencies(self) -> LatencyDesk:
        """Where promised latencies are changed."""
        return self._core.latencies

    @property
    def batching(self) -> BatchingPolicy:
        """When waiting requests join the batch."""
        return self._config.scheduler.batching

    @property
    def max_num_seqs(self) -> int:
        """Slots."""
        return self._config.scheduler.max_num_seqs

    @property
    def is_dead(self) -> bool:
        """Whether the loop has died of a fault."""
        return self._death is not None

    def seconds_since_progress(self) -> float:
        """Heartbeat, seconds: 0 when there is nothing to do, else the time since the last finished step, or
        since there is something to do if that came later.
        """
        return 0.0 if self._idle.is_set() else time.monotonic() - self._last_progress_s

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._run_guarded(), name="headrace-engine")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_draining = self._is_stopping = True
        self._wake.set()
        if self._loop_task is not None:
            # Not awaited itself: it may have been cancelled, which is no reason to cancel whoever leaves.
            await asyncio.wait({self._loop_task})
        await self._thread.run(self._barrier.close)
        self._thread.close()
        self._constraints.close()

    def max_tokens_for(self, request: Request) -> int:
        """The cap that applies to a request: its own, or what context and KV pool leave to its prompt."""
        return max_tokens_for(request, self.info, self.layout)

    def submit(self, request: Request) -> TokenStream:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served; every field that is wrong is named.
            DuplicateRequest: its id is live.
            DeadlineExceeded: its deadline has passed already.
            Overloaded: the queue is full.
            Draining: nothing new is taken any more.
            EngineDead: the loop has died.
        """
        if self._death is not None:
            raise EngineDead(str(self._death))
        if self._is_draining:
            raise Draining("the server is draining: it finishes what it has and takes nothing new")
        self._core.add(request)
        stream = self._streams[request.request_id] = TokenStream(
            request.request_id,
            request.n,
            max_unread_tokens=self._config.scheduler.max_unread_tokens,
            on_room=self._resume,
        )
        if self._idle.is_set():
            self._last_progress_s = time.monotonic()
            self._idle.clear()
        self._wake.set()
        return stream

    def abort(self, request_id: RequestId) -> None:
        """End a request as cancelled before the next step. Nothing happens when it is not live."""
        if request_id in self._streams:
            self._to_abort.add(request_id)
            self._wake.set()

    def _resume(self, request_id: RequestId) -> None:
        """Go on with a paused request before the next step."""
        self._to_resume.add(request_id)
        self._wake.set()

    async def drain(self, grace_s: float | None) -> int:
        """Take nothing new, let what there is finish.

        Args:
            grace_s: longest wait, seconds; None waits for as long as it takes.

        Returns:
            How many requests were unfinished at its end; they are ended with `Draining` before the next step.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests are unfinished at the end of the drain", len(self._streams))
        num_unfinished = len(self._streams)
        if num_unfinished:
            self._end_all = True
            self._wake.set()
        return num_unfinished

    def load(self) -> Load:
        """How busy it is now."""
        return self._core.load

    def flush_cache(self) -> int:
        """Give up all cached KV that no live request holds; returns the number of blocks."""
        return self._core.flush_cache()

    def watch_steps(self) -> StepWatch:
        """Follow what each step does."""
        watch = StepWatch(self._watches.remove)
        self._watches.append(watch)
        if self._death is not None:
            watch.close()
        return watch

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    async def died(self) -> EngineDead:
        """Wait until the loop dies of a fault, and get the fault."""
        await self._died.wait()
        if self._death is None:
            raise AssertionError("the loop is said to have died of nothing")
        return self._death

    async def _run_guarded(self) -> None:
        """Supervise the loop: however it ends, every open request gets an end."""
        try:
            await self._run()
            self._publish(self._core.fail_all(_stopped()))
        except BaseException as fault:
            logger.critical("the engine loop died", exc_info=fault)
            self._death = (
                fault
                if isinstance(fault, EngineDead)
                else EngineDead(f"the engine died ({type(fault).__name__})")
            )
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.put(FailureEvent(self._death))
            self._died.set()
            # Anything but a cancellation has been told to everybody whom it concerns.
            if isinstance(fault, asyncio.CancelledError):
                raise
        finally:
            for watch in self._watches:
                watch.close()
            self._idle.set()

    async def _run(self) -> None:
        while not self._is_stopping or self._core.num_under_way:
            self._publish(self._core.abort(self._to_abort))
            self._to_abort.clear()
            self._core.resume(self._to_resume)
            self._to_resume.clear()
            self._publish(self._core.expire())
            if self._end_all:
                self._publish(self._core.fail_all(_stopped()))
            plans = self._plan()
            if not plans and not self._core.num_under_way:
                self._wake.clear()
                if self._config.check_integrity:
                    # Whoever has just been told of an end hears of it first: a large pool takes a while.
                    await asyncio.sleep(0)
                    self._core.check_integrity()
                await self._rest()
                continue
            result = await self._thread.run(self._barrier.advance, *plans)
            events, stats = self._core.finish_step(result)
            self._last_progress_s = time.monotonic()
            self._publish(events)
            for watch in self._watches:
                watch.put(stats)

    def _plan(self) -> list[StepPlan]:
        """What is to be launched now: the next step, if none is under way, and the one behind it, if that can
        be planned before it has returned."""
        if self._is_stopping:
            return []
        plans = [] if self._core.num_under_way else [self._core.begin_step()]
        if self._runs_ahead and None not in plans:
            plans.append(self._core.begin_step(ahead=True))
        return [plan for plan in plans if plan is not None]

    async def _rest(self) -> None:
        """Wait until something comes, or until something is due of what there is."""
        due_s = self._core.due_s
        if not self._core.has_work:
            self._idle.set()
            await self._wake.wait()
            return
        # To wait on purpose is no standstill, so the heartbeat goes on.
        self._last_progress_s = now_s = time.monotonic()
        with suppress(TimeoutError):
            left_s = _HEARTBEAT_S if due_s is None else due_s - now_s
            async with asyncio.timeout(min(_HEARTBEAT_S, max(0.0, left_s))):
                await self._wake.wait()

    def _publish(self, events: list[RequestEvent]) -> None:
        # What is put now, its reader has had no time to take: only what was too much before counts.
        lagging = dict.fromkeys(
            request_id for request_id, _ in events if self._streams[request_id].is_overfull
        )
        for request_id, event in events:
            stream = self._streams[request_id]
            stream.put(event)
            if stream.is_finished:
                del self._streams[request_id]
                lagging.pop(request_id, None)
        if lagging:
            for request_id in lagging:
                self._streams[request_id].pause()
            self._publish(self._core.pause(lagging))


def _stopped() -> Draining:
    return Draining("the server was stopped before the request was finished")
