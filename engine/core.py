"""One engine without asyncio and without threads: `begin_step`, then `finish_step`.

Whoever drives it (see `headrace.engine.async_engine`) runs the plan in between, wherever it likes.
Requests may be added at any time; they are ended between steps only, so a step's rows outlive the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from headrace.engine.config import CacheLayout, EngineConfig, ModelInfo
from headrace.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    IntegrityError,
    Overloaded,
    RequestFailed,
)
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.outputs import (
    FailureEvent,
    FinishEvent,
    FinishReason,
    Load,
    OutputEvent,
    RowStats,
    StepStats,
    StepTotals,
    Timings,
    TokenEvent,
    Usage,
)
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Request, RequestId, Sequence, SequenceId
from headrace.engine.text import OutputText
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import check_request, max_tokens_for

RequestEvent = tuple[RequestId, OutputEvent]

_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Live:
    """A sequence and what turns its ids into text."""

    sequence: Sequence
    text: OutputText


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """The step between `begin_step` and `finish_step`."""

    plan: StepPlan
    num_preemptions: int
    num_waiting: int
    started_s: float
    planned_s: float


class EngineCore:
    """Requests in, plans out; results in, events out.

    Args:
        info: the served model.
        layout: its KV pool.
        tokenizer: for the text of events.
        config: limits and policy.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        info: ModelInfo,
        layout: CacheLayout,
        tokenizer: Tokenizer,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self._info = info
        self._layout = layout
        self._tokenizer = tokenizer
        self._max_num_waiting = config.scheduler.max_num_waiting
        self._clock = clock
        self._kv = KVCacheManager(layout)
        self._scheduler = Scheduler(config.scheduler, self._kv, prefix_caching=config.cache.prefix_caching)
        self._live: dict[RequestId, _Live] = {}
        self._by_sequence: dict[SequenceId, _Live] = {}
        self._expiries: list[tuple[float, SequenceId]] = []
        self._sequence_ids = count()
        self._totals = StepTotals()
        self._begun: _BegunStep | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    @property
    def load(self) -> Load:
        """How busy it is now."""
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks=self._kv.counts,
            totals=self._totals,
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served; every field that is wrong is named.
            DuplicateRequest: its id is live.
            DeadlineExceeded: its deadline has passed already.
            Overloaded: the queue is full.
        """
        now_s = self._clock()
        check_request(request, self._info, self._layout)
        if request.request_id in self._live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use by a live request")
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise DeadlineExceeded("the deadline passed before the request was queued")
        if len(self._scheduler.waiting) >= self._max_num_waiting:
            message = f"{self._max_num_waiting} requests are waiting, as many as this server lets wait"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        end_token_ids = request.stop.token_ids
        if not request.stop.ignore_eos:
            end_token_ids |= self._info.eos_token_ids
        sequence = Sequence(
            sequence_id=SequenceId(next(self._sequence_ids)),
            request=request,
            max_len=len(request.prompt_token_ids) + max_tokens_for(request, self._info, self._layout),
            end_token_ids=end_token_ids,
            arrival_s=now_s,
            token_ids=list(request.prompt_token_ids),
        )
        live = _Live(sequence, OutputText(self._tokenizer, request.output, request.stop))
        self._live[request.request_id] = self._by_sequence[sequence.sequence_id] = live
        if sequence.expires_s is not None:
            heappush(self._expiries, (sequence.expires_s, sequence.sequence_id))
        self._scheduler.add(sequence)

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestEvent]:
        """End requests as cancelled, between steps. Ids that are not live are passed over."""
        events: list[RequestEvent] = []
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                events += self._finish(live, FinishReason.CANCELLED)
        return events

    def fail_all(self, error: EngineError) -> list[RequestEvent]:
        """End every request with `error`, between steps."""
        return [event for live in list(self._live.values()) for event in self._fail(live, error)]

    def expire(self) -> list[RequestEvent]:
        """End the requests whose time limit or deadline has passed, between steps."""
        now_s = self._clock()
        events: list[RequestEvent] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, sequence_id = heappop(self._expiries)
            live = self._by_sequence.get(sequence_id)
            if live is None:
                continue
            deadline_s = live.sequence.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                events += self._fail(
                    live, DeadlineExceeded("the deadline passed before the request was finished")
                )
            else:
                events += self._finish(live, FinishReason.TIME_LIMIT)
        return events

    def begin_step(self) -> StepPlan | None:
        """Plan the next step; None when no request is live. `finish_step` must follow before the next one."""
        if self._begun is not None:
            raise IntegrityError(f"step {self._begun.plan.step} was never finished")
        started_s = self._clock()
        plan, num_preemptions = self._scheduler.schedule(self._totals.num_steps, started_s)
        if plan is not None:
            self._begun = _BegunStep(
                plan, num_preemptions, len(self._scheduler.waiting), started_s, planned_s=self._clock()
            )
        return plan

    def finish_step(self, result: StepResult) -> tuple[list[RequestEvent], StepStats]:
        """Take in the outcome of the step that `begin_step` planned.

        Returns:
            What to tell the callers, in order, and what the step did.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise IntegrityError("no step was begun")
        executed_s = self._clock()
        outcomes = list(zip(begun.plan.rows, result.rows, strict=True))
        lives = [self._by_sequence[row.sequence_id] for row, _ in outcomes]
        slots = [live.sequence.slot for live in lives]
        for live, (row, outcome) in zip(lives, outcomes, strict=True):
            if outcome.failure is None:
                live.sequence.num_computed_tokens = row.end_position
                self._scheduler.offer_blocks(live.sequence)
            else:
                self._kv.withdraw(live.sequence.sequence_id)
        # Counted before anybody leaves: the step ran with these blocks.
        num_used = sum(sequence.num_computed_tokens for sequence in self._scheduler.running)
        num_used -= self._kv.num_shared_slots
        num_allocated = self._kv.num_live_blocks * self._layout.block_size
        events: list[RequestEvent] = []
        for live, (_, outcome) in zip(lives, outcomes, strict=True):
            events += self._take_outcome(live, outcome, executed_s)
        stats = StepStats(
            step=begun.plan.step,
            num_waiting=begun.num_waiting,
            num_preemptions=begun.num_preemptions,
            blocks=self._kv.counts,
            num_kv_slots_allocated=num_allocated,
            num_kv_slots_used=num_used,
            schedule_s=begun.planned_s - begun.started_s,
            execute_s=executed_s - begun.planned_s,
            update_s=self._clock() - executed_s,
            rows=tuple(
                _row_stats(live.sequence, row, slot)
                for live, (row, _), slot in zip(lives, outcomes, slots, strict=True)
            ),
        )
        self._totals = self._totals.plus(stats)
        return events, stats

    def flush_cache(self) -> int:
        """Give up all cached KV that no live request holds; returns the number of blocks."""
        return self._kv.flush()

    def check_integrity(self) -> None:
        """Audit the KV pool, and with nobody live demand that it is whole.

        Raises:
            IntegrityError: it isn't.
        """
        self._kv.check_integrity()
        if not self._live and self._kv.num_live_blocks:
            raise IntegrityError(f"nobody is live, yet {self._kv.num_live_blocks} blocks are held")

    def _take_outcome(self, live: _Live, outcome: RowResult, now_s: float) -> list[RequestEvent]:
        """Take drawn tokens one at a time through the one path that can end a sequence."""
        if outcome.failure is not None:
            return self._fail(live, RequestFailed(outcome.failure))
        sequence, told, text = live.sequence, [], ""
        for token_id in outcome.token_ids:
            sequence.token_ids.append(token_id)
            told.append(token_id)
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            sequence.last_token_s = now_s
            if token_id in sequence.end_token_ids:
                text += live.text.end_with(token_id)
                return self._finish(live, FinishReason.STOP, told, text, matched_stop=token_id)
            delta, matched_stop = live.text.push(token_id)
            text += delta
            if matched_stop is not None:
                return self._finish(live, FinishReason.STOP, told, text, matched_stop=matched_stop)
            if len(sequence.token_ids) >= sequence.max_len:
                return self._finish(live, FinishReason.LENGTH, told, text)
        if not told:
            return []
        return [(sequence.request.request_id, TokenEvent(sequence.index, tuple(told), text))]

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        token_ids: Iterable[int] = (),
        text: str = "",
        matched_stop: int | str | None = None,
    ) -> list[RequestEvent]:
        """The one normal way out, for every reason: last output, then the end."""
        sequence = live.sequence
        request_id = sequence.request.request_id
        text += live.text.flush()
        last = TokenEvent(sequence.index, tuple(token_ids), text)
        end = FinishEvent(
            index=sequence.index,
            reason=reason,
            matched_stop=matched_stop,
            usage=Usage(sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_cached_tokens),
            timings=_timings(sequence),
            num_preemptions=sequence.num_preemptions,
        )
        self._forget(live)
        return [(request_id, last), (request_id, end)] if last.token_ids or last.text else [(request_id, end)]

    def _fail(self, live: _Live, error: EngineError) -> list[RequestEvent]:
        self._forget(live)
        return [(live.sequence.request.request_id, FailureEvent(error))]

    def _forget(self, live: _Live) -> None:
        self._scheduler.finish(live.sequence)
        del self._live[live.sequence.request.request_id]
        del self._by_sequence[live.sequence.sequence_id]


def _row_stats(sequence: Sequence, row: ScheduledSequence, slot: int | None) -> RowStats:
    is_decode = len(row.token_ids) == 1 and row.first_position >= sequence.num_prompt_tokens
    return RowStats(
        request_id=sequence.request.request_id,
        index=sequence.index,
        slot=-1 if slot is None else slot,
        num_prefill_tokens=0 if is_decode else len(row.token_ids),
        num_decode_tokens=1 if is_decode else 0,
        is_finished=sequence.is_finished,
    )


def _timings(sequence: Sequence) -> Timings:
    scheduled_s, first_s, last_s = sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s
    return Timings(
        queued_s=None if scheduled_s is None else scheduled_s - sequence.arrival_s,
        prefill_s=None if scheduled_s is None or first_s is None else first_s - scheduled_s,
        first_token_s=None if first_s is None else first_s - sequence.arrival_s,
        decode_s=None if first_s is None or last_s is None else last_s - first_s,
    )
