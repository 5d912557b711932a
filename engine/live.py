"""Requests that are not over: their sequences, the text of each, and what is told of them.

Events are made here and nowhere else, so every way to an end tells the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.engine.errors import TextFailed
from headrace.engine.outputs import (
    FinishEvent,
    FinishReason,
    OutputEvent,
    RowStats,
    Timings,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence
from headrace.engine.sequence import Request, Sequence, SequenceId
from headrace.engine.text import OutputText

UNTELLABLE = "the tokenizer can't tell its text"
"""Why a sequence ends whose text is beyond its tokenizer."""

_new_event = tuple.__new__
"""Half the time of the tuple's own `__new__`, which sorts arguments and defaults first."""


class Taken(NamedTuple):
    """What a sequence has got out of a step.

    Args:
        event: what is new, which may be nothing.
        end: its end, if it has come.
        num_tokens: tokens that it has got.
        num_draft_tokens, num_accepted_tokens: see `headrace.engine.outputs.Usage`.
    """

    event: TokenEvent
    end: FinishEvent | None
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence and its text.

    Args:
        logprob_sum: of all tokens made so far, where logprobs are told at all.
    """

    sequence: Sequence
    text: OutputText
    request: LiveRequest
    logprob_sum: float = 0.0
    _usual_stats: RowStats | None = None
    _is_simple: bool = field(init=False)
    _is_untellable: bool = False

    def __post_init__(self) -> None:
        self._is_simple = self.sequence.is_plain and not self.text.may_stop

    def take(self, row: ScheduledSequence, outcome: RowResult, now_s: float) -> Taken | None:
        """Take what was drawn; None if its text can't be told, so that it can't go on."""
        if self._is_untellable:
            return None
        try:
            return self._take(row, outcome, now_s)
        except TextFailed:
            return None

    def _take(self, row: ScheduledSequence, outcome: RowResult, now_s: float) -> Taken:
        """Take drawn tokens one at a time through the one path that can end a sequence.

        What stands behind the end was never said: of a run of drafts that were kept, the rest is dropped.
        """
        sequence = self.sequence
        token_ids: list[int] = []
        text, is_over = "", False
        reason, matched_stop, num_taken = FinishReason.LENGTH, None, 0
        for token_id in outcome.token_ids:
            if sequence.num_output_tokens == 0:
                sequence.first_token_s = now_s
                if sequence.request.output.is_echoed:
                    token_ids += sequence.request.prompt_token_ids
                    text += self.text.echo(sequence.request.prompt_token_ids)
            sequence.last_token_s = now_s
            sequence.token_ids.append(token_id)
            token_ids.append(token_id)
            num_taken += 1
            delta, matched_stop = self._push(token_id)
            text += delta
            if matched_stop is not None:
                reason, is_over = FinishReason.STOP, True
            elif len(sequence.token_ids) >= sequence.max_len:
                is_over = True
            if is_over:
                break
        logprobs = outcome.logprobs[:num_taken]
        self.logprob_sum += sum(entry.chosen.logprob for entry in logprobs)
        num_judged, num_accepted = _judged(outcome, num_taken, is_over=is_over)
        sequence.num_draft_tokens += num_judged
        sequence.num_accepted_draft_tokens += num_accepted
        if sequence.is_read_only and row.end_position == sequence.num_prompt_tokens:
            is_over = True
        if is_over:
            text += self.text.flush()
        prompt_logprobs = self._new_prompt_logprobs(row, outcome)
        return Taken(
            TokenEvent(sequence.index, tuple(token_ids), text, logprobs, prompt_logprobs),
            self.end(reason, matched_stop) if is_over else None,
            num_taken,
            num_judged,
            num_accepted,
        )

    def take_usual(self, row: ScheduledSequence, outcome: RowResult, now_s: float) -> TokenEvent | None:
        """What `take` does in the usual case: one token computed, one made, which neither begins nor ends
        anything, no draft. In every other case None, and no change."""
        if not self._is_simple:
            return None
        sequence, token_ids = self.sequence, outcome.token_ids
        known = sequence.token_ids
        if (
            len(token_ids) != 1
            or len(row.token_ids) != 1
            or outcome.num_draft_tokens
            or outcome.failure is not None
            or sequence.first_token_s is None
            or len(known) + 1 >= sequence.max_len
            or token_ids[0] in sequence.end_token_ids
        ):
            return None
        known.append(token_ids[0])
        sequence.last_token_s = now_s
        logprobs = outcome.logprobs
        if logprobs:
            self.logprob_sum += logprobs[0].chosen.logprob
        try:
            event = (sequence.index, token_ids, self.text.push(token_ids[0])[0], logprobs, ())
        except TextFailed:
            self._is_untellable = True
            return None
        return _new_event(TokenEvent, event)

    def stats(self, row: ScheduledSequence, slot: int | None, taken: Taken | TokenEvent | None) -> RowStats:
        """What a step did for it.

        Args:
            slot: its place in the batch when the step was run.
            taken: what came of it; an event alone where `take_usual` did the work, None if it failed.
        """
        sequence, place = self.sequence, -1 if slot is None else slot
        if isinstance(taken, TokenEvent):
            # The same in every such step, so it is made once.
            if self._usual_stats is None or self._usual_stats.slot != place:
                self._usual_stats = RowStats(
                    sequence.request.request_id, sequence.index, place, 0, 1, False, num_output_tokens=1
                )
            return self._usual_stats
        num_known = len(row.token_ids) - row.num_draft_tokens
        is_decode = num_known == 1 and row.first_position >= sequence.num_prompt_tokens
        return RowStats(
            request_id=sequence.request.request_id,
            index=sequence.index,
            slot=place,
            num_prefill_tokens=0 if is_decode else num_known,
            num_decode_tokens=1 if is_decode else 0,
            is_finished=sequence.is_finished,
            num_output_tokens=0 if taken is None else taken.num_tokens,
            num_draft_tokens=0 if taken is None else taken.num_draft_tokens,
            num_accepted_tokens=0 if taken is None else taken.num_accepted_tokens,
        )

    def _push(self, token_id: int) -> tuple[str, int | str | None]:
        """Add a token that its sequence has got already; the text that is new and what it ends by."""
        sequence = self.sequence
        if token_id in sequence.end_token_ids:
            return self.text.end_with(token_id), token_id
        is_armed = sequence.num_output_tokens >= sequence.request.stop.min_tokens
        return self.text.push(token_id, is_stop_armed=is_armed)

    def cut_off(self, reason: FinishReason) -> tuple[TokenEvent, FinishEvent]:
        """End it from outside: what was held back, and the end."""
        try:
            held_back = self.text.flush()
        except TextFailed:
            # It ends here anyway, and what could be told has been.
            held_back = ""
        return TokenEvent(self.sequence.index, (), held_back), self.end(reason)

    def end(self, reason: FinishReason, matched_stop: int | str | None = None) -> FinishEvent:
        """The end of it, as things stand now."""
        sequence = self.sequence
        return FinishEvent(
            index=sequence.index,
            reason=reason,
            matched_stop=matched_stop,
            usage=Usage(
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached_tokens,
                sequence.num_draft_tokens,
                sequence.num_accepted_draft_tokens,
            ),
            timings=_timings(sequence),
            num_preemptions=sequence.num_preemptions,
        )

    def _new_prompt_logprobs(self, row: ScheduledSequence, outcome: RowResult) -> tuple[TokenLogprobs, ...]:
        """Of the places of the prompt that were computed, those that were not told before a preemption."""
        num_told = self.sequence.num_prompt_logprobs_told
        new = outcome.prompt_logprobs[max(0, num_told - row.first_position) :]
        self.sequence.num_prompt_logprobs_told += len(new)
        return new


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, those of its sequences that are not over, and those that are but can't be told yet.

    Args:
        is_ranked: whether more sequences are made than told: then nothing can be told before all are over.
    """

    request: Request
    open: dict[int, LiveSequence] = field(default_factory=dict)
    held: dict[int, list[TokenEvent]] = field(default_factory=dict)
    ranked: list[tuple[float, int, FinishEvent]] = field(default_factory=list)
    is_ranked: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_ranked = self.request.best_of > self.request.n

    def begin(
        self, max_len: int, end_token_ids: frozenset[int], now_s: float, ids: Iterator[int]
    ) -> Iterator[Sequence]:
        """Its sequences, which wait; the first one computes the prompt for all.

        Args:
            max_len: longest that each may become, tokens.
            end_token_ids: every id that ends one.
            now_s: when it has come, monotonic seconds.
            ids: of sequences.
        """
        request, leader = self.request, None
        for index in range(request.best_of):
            sequence = Sequence(
                sequence_id=SequenceId(next(ids)),
                request=request,
                max_len=max_len,
                end_token_ids=end_token_ids,
                arrival_s=now_s,
                token_ids=list(request.prompt_token_ids),
                index=index,
                matcher=None if request.constraint is None else request.constraint.start(),
                leader=leader,
            )
            leader = leader or sequence
            yield sequence

    def tell(self, live: LiveSequence, event: TokenEvent, end: FinishEvent | None) -> list[OutputEvent]:
        """What of a sequence's new output its caller hears now."""
        if end is not None:
            del self.open[live.sequence.index]
        if not self.is_ranked:
            return [*told(event), *([] if end is None else [end])]
        self.held.setdefault(event.index, []).append(event)
        if end is not None:
            num_tokens = max(1, live.sequence.num_output_tokens)
            self.ranked.append((-live.logprob_sum / num_tokens, event.index, end))
        return [] if self.open else list(self._tell_best())

    def _tell_best(self) -> Iterator[OutputEvent]:
        """The `n` of highest mean log-probability, numbered anew, the best first."""
        best = sorted(self.ranked, key=lambda item: item[:2])[: self.request.n]
        # The prompt's own were told of the first that was made, which may not be among the best.
        prompt_logprobs = tuple(entry for event in self.held[0] for entry in event.prompt_logprobs)
        for place, (_, index, end) in enumerate(best):
            whole = TokenEvent.joined([TokenEvent(place, (), ""), *self.held[index]])
            yield from told(whole._replace(prompt_logprobs=() if place else prompt_logprobs))
            yield replace(end, index=place)


def told(event: TokenEvent) -> list[OutputEvent]:
    """The event, or nothing if nothing is new in it."""
    is_new = event.token_ids or event.text or event.prompt_logprobs
    return [event] if is_new else []


def _judged(outcome: RowResult, num_taken: int, *, is_over: bool) -> tuple[int, int]:
    """How many drafts were judged, and how many of those were kept; none that stands behind the end."""
    num_judged = outcome.num_draft_tokens
    if is_over:
        num_judged = min(num_judged, num_taken)
    return num_judged, min(outcome.num_accepted_tokens, num_taken)


def _timings(sequence: Sequence) -> Timings:
    scheduled_s, first_s, last_s = sequence.first_scheduled_s, sequence.first_token_s, sequence.last_token_s
    return Timings(
        queued_s=None if scheduled_s is None else scheduled_s - sequence.arrival_s,
        prefill_s=None if scheduled_s is None or first_s is None else first_s - scheduled_s,
        first_token_s=None if first_s is None else first_s - sequence.arrival_s,
        decode_s=None if first_s is None or last_s is None else last_s - first_s,
    )
