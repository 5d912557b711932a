"""What the engine tells: events of a request, figures of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from headrace.engine.errors import EngineError


class FinishReason(StrEnum):
    """Why a sequence ended normally."""

    STOP = "stop"
    """An end id of the model, or a stop id or stop string of the request."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence.

    Args:
        num_completion_tokens: tokens made, the end token included.
        num_draft_tokens: tokens that were proposed and judged; what was proposed behind the end was not.
        num_accepted_draft_tokens: those of them that stand in the output; never more than were proposed.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went, seconds. None: it never came so far.

    Args:
        queued_s: arrival to the start of the first step that computed a token of it.
        prefill_s: that start to the first token.
        first_token_s: arrival to the first token.
        decode_s: first token to last token.
    """

    queued_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's place in the model's own distribution, before any sampling control.

    Args:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest; tokens of equal probability share the better rank.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token that stands at a place, and the likeliest ones there, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class TokenEvent(NamedTuple):
    """New output of one sequence since the last event that was taken. A tuple: each step makes many.

    Args:
        token_ids: ids made, the end token included; with echo the prompt's ids stand before the first.
        text: their text; a character whose bytes are not complete yet is held back.
        logprobs: one per id made, when asked for.
        prompt_logprobs: one per prompt token but the first, before the first id, when asked for.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of an event
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @staticmethod
    def joined(events: Sequence[TokenEvent]) -> TokenEvent:
        """Events of one sequence that follow each other, at least one, as one; linear in what they hold."""
        if len(events) == 1:
            return events[0]
        return TokenEvent(
            events[0].index,
            tuple(chain.from_iterable(event.token_ids for event in events)),
            "".join(event.text for event in events),
            tuple(chain.from_iterable(event.logprobs for event in events)),
            tuple(chain.from_iterable(event.prompt_logprobs for event in events)),
        )


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """A sequence ended normally; nothing more follows for its index.

    Args:
        matched_stop: the end id, stop id or stop string that ended it; None for every other reason.
    """

    index: int
    reason: FinishReason
    matched_stop: int | str | None
    usage: Usage
    timings: Timings
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """The request failed; nothing more follows for it."""

    error: EngineError


OutputEvent = TokenEvent | FinishEvent | FailureEvent


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The KV pool, the null block not counted: free + cached + live = total."""

    total: int
    free: int
    cached: int
    live: int


class RowStats(NamedTuple):
    """What one batch slot did in a step. A tuple: each step makes many.

    Args:
        num_output_tokens: tokens that its sequence got: the drafts that were kept, and one more unless the
            text ended before.
        num_draft_tokens, num_accepted_tokens: see `Usage`.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a row
    slot: int
    num_prefill_tokens: int
    num_decode_tokens: int
    is_finished: bool
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did.

    Args:
        num_waiting: queue length after the step was planned.
        num_preemptions: sequences that lost their blocks while it was planned, or before since the last step.
        num_kv_slots_allocated, num_kv_slots_used: KV slots of live blocks, and those that hold a token.
        schedule_s, execute_s, update_s: time of its three parts, seconds.
        started_s: when it began, by the engine's monotonic clock.
        num_draft_failures: rows that went without drafts because the draft model failed.
        is_ahead: whether it was planned and launched while the one before it ran.
    """

    step: int
    num_waiting: int
    num_preemptions: int
    blocks: BlockCounts
    num_kv_slots_allocated: int
    num_kv_slots_used: int
    schedule_s: float
    execute_s: float
    update_s: float
    rows: tuple[RowStats, ...]
    started_s: float = 0.0
    num_draft_failures: int = 0
    is_ahead: bool = False

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts (and of outputs computed again after a preemption)."""
        return sum([row.num_prefill_tokens for row in self.rows])

    @property
    def num_decode_tokens(self) -> int:
        """Tokens computed one by one behind a finished prefill."""
        return sum([row.num_decode_tokens for row in self.rows])

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that were proposed and judged."""
        return sum([row.num_draft_tokens for row in self.rows])

    @property
    def num_accepted_tokens(self) -> int:
        """Those of them that were kept."""
        return sum([row.num_accepted_tokens for row in self.rows])


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """What came of speculation since the start.

    Args:
        num_draws: how often a sequence got tokens in a step: its target steps.
        num_output_tokens: tokens that they got.
        num_drafted_draws: how often a sequence had drafts in such a step.
        num_draft_tokens, num_accepted_tokens: see `Usage`; summed over all sequences.
        drafted_by_place, accepted_by_place: the same by a draft's place among those of its step, the first
            first. A draft behind a refused one counts as refused.
        num_draft_failures: how often a sequence went without drafts because the draft model failed.
    """

    num_draws: int = 0
    num_output_tokens: int = 0
    num_drafted_draws: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_by_place: tuple[int, ...] = ()
    accepted_by_place: tuple[int, ...] = ()
    num_draft_failures: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / proposed drafts; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target step of a sequence that had drafts, the one behind them included."""
        if not self.num_drafted_draws:
            return 1.0
        return 1.0 + self.num_accepted_tokens / self.num_drafted_draws

    @property
    def tokens_per_target_step(self) -> float:
        """Tokens per target step of a sequence, whether or not it had drafts."""
        return self.num_output_tokens / self.num_draws if self.num_draws else 1.0

    def plus(self, rows: Sequence[RowStats], num_draft_failures: int = 0) -> SpeculationTotals:
        """The totals with one more step in them."""
        drawn = [row.num_output_tokens for row in rows if row.num_output_tokens]
        drafted = [row for row in rows if row.num_output_tokens and row.num_draft_tokens]
        return SpeculationTotals(
            num_draws=self.num_draws + len(drawn),
            num_output_tokens=self.num_output_tokens + sum(drawn),
            num_drafted_draws=self.num_drafted_draws + len(drafted),
            num_draft_tokens=self.num_draft_tokens + sum(row.num_draft_tokens for row in drafted),
            num_accepted_tokens=self.num_accepted_tokens + sum(row.num_accepted_tokens for row in drafted),
            drafted_by_place=_by_place(self.drafted_by_place, [row.num_draft_tokens for row in drafted]),
            accepted_by_place=_by_place(self.accepted_by_place, [row.num_accepted_tokens for row in drafted]),
            num_draft_failures=self.num_draft_failures + num_draft_failures,
        )


def _by_place(counts: tuple[int, ...], lengths: Sequence[int]) -> tuple[int, ...]:
    """Add one to each of the first so many counts, for each of `lengths`."""
    if not lengths:
        return counts
    wider = list(counts) + [0] * (max(lengths) - len(counts))
    for length in lengths:
        for place in range(length):
            wider[place] += 1
    return tuple(wider)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all steps since the start; `num_rows` counts the slots that were busy, step by step,
    `num_ahead_steps` the steps that were planned while the one before them ran."""

    num_steps: int = 0
    num_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_kv_slots_allocated: int = 0
    num_kv_slots_used: int = 0
    step_s: float = 0.0
    speculation: SpeculationTotals = SpeculationTotals()
    num_ahead_steps: int = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that were computed, drafts not counted."""
        return self.num_prefill_tokens + self.num_decode_tokens

    def plus(self, stats: StepStats) -> StepTotals:
        """The totals with one more step in them."""
        return StepTotals(
            num_steps=self.num_steps + 1,
            num_rows=self.num_rows + len(stats.rows),
            num_prefill_tokens=self.num_prefill_tokens + stats.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + stats.num_decode_tokens,
            num_preemptions=self.num_preemptions + stats.num_preemptions,
            num_kv_slots_allocated=self.num_kv_slots_allocated + stats.num_kv_slots_allocated,
            num_kv_slots_used=self.num_kv_slots_used + stats.num_kv_slots_used,
            step_s=self.step_s + stats.schedule_s + stats.execute_s + stats.update_s,
            speculation=self.speculation.plus(stats.rows, stats.num_draft_failures),
            num_ahead_steps=self.num_ahead_steps + stats.is_ahead,
        )


@dataclass(frozen=True, slots=True)
class LatencyClass:
    """What is promised to a priority class, and how it is kept. Only sequences with a token count.

    Args:
        priority: None for all classes that have no targets of their own.
        tpot_s, ttft_s: the targets; None promises nothing.
        is_attainable: whether the targets can be kept at all, with a single sequence running.
        num_sequences: that have ended since the start.
        num_over_tpot, num_over_ttft: those of them that missed the target of their time.
        attained_tpot_p95_s, attained_ttft_p95_s: 95 in 100 of the last 256 that have ended since the
            targets were set were not above it; None before there is one.
    """

    priority: int | None
    tpot_s: float | None = None
    ttft_s: float | None = None
    is_attainable: bool = True
    num_sequences: int = 0
    num_over_tpot: int = 0
    num_over_ttft: int = 0
    attained_tpot_p95_s: float | None = None
    attained_ttft_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyStatus:
    """The latency budget.

    Args:
        classes: all that have targets of their own, after the one for everybody else.
        predicted_step_s: what a step that decodes everything that runs now is expected to take.
        predicted_ttft_s: what a short request that came now would have to wait for its first token.
        num_steps_over: steps since the start that took longer than the targets left them.
        num_late: sequences that wait and can't have their first token in time any more.
    """

    classes: tuple[LatencyClass, ...] = (LatencyClass(None),)
    predicted_step_s: float = 0.0
    predicted_ttft_s: float = 0.0
    num_steps_over: int = 0
    num_late: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's load now.

    Args:
        num_paused: sequences that neither run nor wait, because their reader lags.
    """

    num_running: int
    num_waiting: int
    blocks: BlockCounts
    totals: StepTotals
    latency: LatencyStatus = LatencyStatus()
    num_paused: int = 0
