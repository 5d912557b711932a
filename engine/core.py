"""One engine without asyncio and without threads: `begin_step`, then `finish_step`.

Whoever drives it (see `headrace.engine.async_engine`) runs the plan in between, wherever it likes. Where a
device runs it, the step behind it can be planned meanwhile.
Requests may be added and ended at any time. A sequence that leaves the batch while a step is under way may
have a row in it: that row is void, and what it writes to is nobody else's before the step has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import replace
from itertools import compress

from headrace.engine.config import CacheLayout, EngineConfig, ModelInfo
from headrace.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    IntegrityError,
    NothingToDraw,
    RequestFailed,
)
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.live import UNTELLABLE, LiveRequest, LiveSequence, Taken
from headrace.engine.live_requests import LiveRequests
from headrace.engine.outputs import (
    FailureEvent,
    FinishEvent,
    FinishReason,
    Load,
    OutputEvent,
    StepStats,
    StepTotals,
    TokenEvent,
)
from headrace.engine.scheduling.admission import QueueGate
from headrace.engine.scheduling.ahead import PlanAhead
from headrace.engine.scheduling.budget import LatencyBudget, LatencyDesk
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Request, RequestId, Sequence, SequenceStatus
from headrace.engine.speculative.speculator import Speculator, make_proposer
from headrace.engine.steps_under_way import StepsUnderWay, StepUnderWay
from headrace.engine.tokenizer import Tokenizer
from headrace.engine.validation import check_request, max_tokens_for

RequestEvent = tuple[RequestId, OutputEvent]


class EngineCore:
    """Requests in, plans out; results in, events out.

    Args:
        info: the served model.
        layout: its KV pool.
        tokenizer: for the text of events.
        config: limits and policy.
        clock: monotonic seconds.
        draft_max_len: longest sequence of the draft model, tokens; None where there is none.

    Raises:
        ConfigError: a draft model is to propose tokens and there is none.
    """

    def __init__(
        self,
        info: ModelInfo,
        layout: CacheLayout,
        tokenizer: Tokenizer,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        draft_max_len: int | None = None,
    ) -> None:
        self._info = info
        self._layout = layout
        self._clock = clock
        self._kv = KVCacheManager(layout, info.name)
        self._budget = LatencyBudget(config.latency)
        self._speculation = config.speculation
        self._speculator = Speculator(
            config.speculation,
            make_proposer(config.speculation, self._kv, draft_max_len),
            self._budget.costs.seconds_of_decodes,
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self._kv,
            prefix_caching=config.cache.prefix_caching,
            budget=self._budget,
            speculator=self._speculator,
        )
        self._max_num_paused = config.scheduler.max_num_paused
        self._num_untold_preemptions = 0
        self._gate = QueueGate(config.scheduler, self._scheduler.waiting)
        self._live = LiveRequests(info, tokenizer)
        self._totals = StepTotals()
        self._under_way = StepsUnderWay(self._budget)
        self._ahead = PlanAhead(self._scheduler, self._kv, self._budget)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    @property
    def num_under_way(self) -> int:
        """Steps that were planned and have not been finished: none, one, or two."""
        return len(self._under_way)

    @property
    def due_s(self) -> float | None:
        """When `expire` and `begin_step` are to be called again if nothing was planned and nothing comes
        meanwhile, by the engine's clock; None for never."""
        if not self._live:
            return None
        moments = (self._scheduler.due_s, self._live.next_expiry_s)
        return min((due_s for due_s in moments if due_s is not None), default=None)

    @property
    def load(self) -> Load:
        """How busy it is now."""
        return Load(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks=self._kv.counts,
            totals=replace(
                self._totals, num_preemptions=self._totals.num_preemptions + self._num_untold_preemptions
            ),
            num_paused=self._scheduler.parking.num_paused,
            latency=self._budget.status(self._scheduler.running, self._scheduler.waiting),
        )

    @property
    def latencies(self) -> LatencyDesk:
        """Where promised latencies are changed."""
        return LatencyDesk(self._budget, self._scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served; every field that is wrong is named.
            DuplicateRequest: its id is live.
            DeadlineExceeded: its deadline has passed already.
            Overloaded: the queue is full, or the first token would come too late.
        """
        now_s = self._clock()
        check_request(request, self._info, self._layout, self._speculation)
        if request.request_id in self._live:
            raise DuplicateRequest(f"request id {request.request_id!r} is in use by a live request")
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise DeadlineExceeded("the deadline passed before the request was queued")
        max_len = len(request.prompt_token_ids) + max_tokens_for(request, self._info, self._layout)
        self._gate.check(request, max_len, len(self._scheduler.running))
        if self._live:
            # Who has nothing to do refuses nobody: only what is served shows whether a forecast was right.
            self._budget.check(request, self._scheduler.waiting.num_in_time)
        for live in self._live.begin(request, max_len, now_s):
            self._scheduler.add(live.sequence)

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestEvent]:
        """End requests as cancelled. Ids that are not live are passed over."""
        lives = self._live.named(request_ids)
        return [event for live in lives for event in self._cut_off(live, FinishReason.CANCELLED)]

    def pause(self, request_ids: Iterable[RequestId]) -> list[RequestEvent]:
        """Compute nothing for requests whose readers lag until `resume`. Ids that are not live are passed
        over. Where more sequences are paused than may be, requests are ended as overloaded: the
        longest paused one of the client that has the most of them."""
        now_s, parking = self._clock(), self._scheduler.parking
        for live in self._live.sequences_of(request_ids):
            self._scheduler.pause(live.sequence, now_s)
        events: list[RequestEvent] = []
        while parking.num_paused > self._max_num_paused:
            victim = self._live[parking.most_in_the_way.request_id]
            events.append(self._fail(victim, parking.crowded(self._max_num_paused)))
        return events

    def resume(self, request_ids: Iterable[RequestId]) -> None:
        """Go on with requests that were paused. Ids that are not live are passed over."""
        now_s = self._clock()
        for live in self._live.sequences_of(request_ids):
            self._scheduler.resume(live.sequence, now_s)

    def fail_all(self, error: EngineError) -> list[RequestEvent]:
        """End every request with `error`."""
        return [self._fail(live, error) for live in self._live]

    def expire(self) -> list[RequestEvent]:
        """End the requests whose time limit or deadline has passed."""
        now_s = self._clock()
        events: list[RequestEvent] = []
        for live in self._live.expired(now_s):
            deadline_s = live.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                late = DeadlineExceeded("the deadline passed before the request was finished")
                events.append(self._fail(live, late))
            else:
                events += self._cut_off(live, FinishReason.TIME_LIMIT)
        return events

    def begin_step(self, *, ahead: bool = False) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do before `due_s`. `finish_step` must follow
        before the next one.

        Args:
            ahead: plan the one behind the step that is under way, before that one has drawn its tokens. None
                then, too, where something has to be decided between the two.
        """
        started_s = self._clock()
        if ahead:
            plan, num_preemptions = self._plan_ahead(started_s)
            num_told = num_preemptions
        else:
            self._under_way.begin(started_s)
            plan, num_preemptions = self._scheduler.schedule(self._totals.num_steps, started_s)
            num_told = self._num_untold_preemptions + num_preemptions
        self._num_untold_preemptions += num_preemptions
        if plan is not None:
            num_waiting, allowance = len(self._scheduler.waiting), self._budget.allowance
            planned_s = self._clock()
            step = StepUnderWay(plan, allowance, num_told, num_waiting, started_s, planned_s, is_ahead=ahead)
            self._under_way.add(step)
            self._kv.under_way.note(self._under_way.sequence_ids)
        return plan

    def _plan_ahead(self, now_s: float) -> tuple[StepPlan | None, int]:
        if self.num_under_way != 1 or self._speculator.is_active:
            return None, 0
        last = self._under_way.newest.plan
        lives = map(self._live.running, last.rows)
        sequences = [None if live is None else live.sequence for live in lives]
        return self._ahead.plan(last, sequences, now_s)

    def finish_step(self, result: StepResult) -> tuple[list[RequestEvent], StepStats]:
        """Take in the outcome of the oldest step under way.

        Returns:
            What to tell the callers, in order, and what the step did.
        """
        step = self._under_way.take()
        self._kv.under_way.note(self._under_way.sequence_ids)
        self._speculator.note_step(step.plan, result)
        executed_s = self._clock()
        # Nothing of a void row is taken in.
        found = [self._live.running(row) for row in step.plan.rows]
        rows, outcomes = list(compress(step.plan.rows, found)), list(compress(result.rows, found))
        lives = [live for live in found if live is not None]
        slots = [live.sequence.batch_slot for live in lives]
        taken = self._take_all_in(lives, rows, outcomes, executed_s)
        # Counted before anybody leaves: the step ran with these blocks.
        num_used = self._scheduler.computed.num_held - self._kv.num_shared_slots
        num_allocated = self._kv.num_live_blocks * self._layout.block_size
        events = self._tell_all(lives, outcomes, taken)
        stats = step.stats(
            result,
            tuple(
                live.stats(row, slot, new)
                for live, row, slot, new in zip(lives, rows, slots, taken, strict=True)
            ),
            self._kv.counts,
            num_kv_slots_allocated=num_allocated,
            num_kv_slots_used=num_used,
            executed_s=executed_s,
            updated_s=(updated_s := self._clock()),
        )
        self._under_way.note_end(step, result, updated_s)
        self._num_untold_preemptions -= step.num_preemptions
        before, self._totals = self._totals, self._totals.plus(stats)
        self._gate.note_step(
            self._totals.num_computed_tokens - before.num_computed_tokens,
            self._totals.step_s - before.step_s,
        )
        return events, stats

    def flush_cache(self) -> int:
        """Give up all cached KV that no live request holds; returns the number of blocks."""
        return self._kv.flush()

    def check_integrity(self) -> None:
        """Audit the KV pool, and demand that it is whole when nobody is live and no step under way; else
        IntegrityError."""
        self._kv.check_integrity()
        kept = self._kv.num_live_blocks, self._kv.num_remembered
        if not self._live and not self._under_way and any(kept):
            raise IntegrityError(f"nobody is live, yet {kept[0]} blocks and {kept[1]} entries are kept")

    def _take_all_in(
        self,
        lives: List[LiveSequence],
        rows: List[ScheduledSequence],
        outcomes: List[RowResult],
        now_s: float,
    ) -> list[Taken | TokenEvent | None]:
        """Take in what became of each row: an event alone in the usual case, None for one that has failed."""
        taken: list[Taken | TokenEvent | None] = []
        usual: list[Sequence] = []
        may_be_usual = not self._speculator.is_active
        for live, row, outcome in zip(lives, rows, outcomes, strict=True):
            event = live.take_usual(row, outcome, now_s) if may_be_usual else None
            if event is None:
                taken.append(self._take_in(live, row, outcome, now_s))
            else:
                taken.append(event)
                usual.append(live.sequence)
        self._scheduler.computed.take_in_decodes(usual)
        return taken

    def _take_in(
        self, live: LiveSequence, row: ScheduledSequence, outcome: RowResult, now_s: float
    ) -> Taken | None:
        """Take in what became of a row; None if it failed."""
        taken = None if outcome.failure is not None else live.take(row, outcome, now_s)
        if taken is None:
            self._kv.withdraw(row.sequence_id)
            return None
        self._scheduler.computed.take_in(live.sequence, row, outcome, taken.num_tokens)
        return taken

    def _tell_all(
        self, lives: List[LiveSequence], outcomes: List[RowResult], taken: List[Taken | TokenEvent | None]
    ) -> list[RequestEvent]:
        """Let those leave who are over, and tell what is new."""
        events: list[RequestEvent] = []
        for live, outcome, new in zip(lives, outcomes, taken, strict=True):
            request = live.request
            if live.sequence.status is SequenceStatus.FINISHED:
                continue  # another sequence of its request has failed in this step
            if isinstance(new, TokenEvent):
                if request.is_ranked:
                    events += self._tell(live, new, None)
                else:
                    events.append((request.request.request_id, new))
            elif new is None:
                kind = NothingToDraw if outcome.is_own_doing else RequestFailed
                events.append(self._fail(request, kind(outcome.failure or UNTELLABLE)))
            else:
                events += self._tell(live, new.event, new.end)
        return events

    def _tell(self, live: LiveSequence, event: TokenEvent, end: FinishEvent | None) -> list[RequestEvent]:
        if end is not None:
            self._forget(live)
        return self._addressed(live.request, live.request.tell(live, event, end))

    def _cut_off(self, request: LiveRequest, reason: FinishReason) -> list[RequestEvent]:
        """End all sequences of a request from outside, normally."""
        events: list[RequestEvent] = []
        for live in list(request.open.values()):
            self._forget(live)
            events += self._addressed(request, request.tell(live, *live.cut_off(reason)))
        return events

    def _fail(self, request: LiveRequest, error: EngineError) -> RequestEvent:
        for live in request.open.values():
            self._forget(live)
        request.open.clear()
        self._live.forget(request)
        return request.request.request_id, FailureEvent(error)

    def _addressed(self, request: LiveRequest, events: list[OutputEvent]) -> list[RequestEvent]:
        if not request.open:
            self._live.forget(request)
        return [(request.request.request_id, event) for event in events]

    def _forget(self, live: LiveSequence) -> None:
        """The one way out of scheduler and pool."""
        self._scheduler.finish(live.sequence)
        self._gate.note_end(live.sequence)
        self._budget.note_end(live.sequence)
        self._live.forget_sequence(live)
