"""A plan while it is being made, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.allowance import StepAllowance
from headrace.engine.scheduling.plan import DraftWork, ScheduledSequence, StepLimits
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.engine.speculative.proposer import NO_DRAFTS, Drafts

CatchUp = Callable[[Sequence, int], DraftWork | None]
"""What the draft model reads of a sequence beside a step that brings it to a position."""

_NOTHING: frozenset[int] = frozenset()
_new_row = tuple.__new__


class PlanInProgress:
    """Who gets how many tokens in a step, and what is left of its limits.

    Args:
        limits: the server's.
        allowance: what promised latencies leave to prompts.

    `num_preempted` counts who has been put out of the batch for it, `num_stripped` who had left the batch
    before and has lost the blocks that it still held.
    """

    def __init__(self, limits: StepLimits, allowance: StepAllowance) -> None:
        self.limits = limits
        self.allowance = allowance
        self.num_tokens_left = limits.num_tokens
        self.num_tokens_of: dict[Sequence, int] = {}
        self.drafts_of: dict[Sequence, Drafts] = {}
        self.num_preempted = 0
        self.num_stripped = 0

    def has_room(self, num_running: int) -> bool:
        """Whether one more sequence may have a place in the step beside so many, and a token."""
        return self.num_tokens_left > 0 and num_running < self.limits.max_num_seqs

    def chunk_len(self, sequence: Sequence, num_matched_tokens: int = 0) -> int:
        """How many of a sequence's tokens may be computed in this step.

        Args:
            num_matched_tokens: of one that is about to join, tokens that it needn't compute.
        """
        limit = self.limits.max_prefill_chunk
        num_tokens = min(sequence.num_new_tokens - num_matched_tokens, self.num_tokens_left)
        if limit is not None:
            num_tokens = min(num_tokens, limit)
        if sequence.is_decoding:
            return num_tokens
        first_position = sequence.num_computed_tokens + num_matched_tokens
        is_new = sequence.status is SequenceStatus.WAITING
        return self.allowance.chunk_len(first_position, num_tokens, is_new=is_new)

    def take_decode(self, sequence: Sequence) -> None:
        """Give a sequence that decodes its one token."""
        self.num_tokens_of[sequence] = 1
        self.num_tokens_left -= 1

    def end_decodes(self) -> None:
        """Whoever decodes has its token. If nobody does, for those that did have lost their places just now,
        prompts need wait for nobody."""
        if not self.num_tokens_of:
            self.allowance.lift()

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence that many tokens."""
        if not sequence.is_decoding:
            self.allowance.take(sequence.num_computed_tokens, num_tokens)
        self.num_tokens_of[sequence] = num_tokens
        self.num_tokens_left -= num_tokens

    def add_drafts(self, sequence: Sequence, drafts: Drafts) -> None:
        """Give a sequence that decodes drafts, too."""
        self.drafts_of[sequence] = drafts
        self.num_tokens_left -= drafts.num_tokens
        self.allowance.take_drafts(drafts.num_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Take back whatever a sequence was given."""
        drafts = self.drafts_of.pop(sequence, NO_DRAFTS)
        self.num_tokens_left += self.num_tokens_of.pop(sequence, 0) + drafts.num_tokens

    def rows(self, kv: KVCacheManager, catch_up: CatchUp, now_s: float) -> tuple[ScheduledSequence, ...]:
        """The step's rows.

        Args:
            kv: whose block tables they get.
            now_s: noted in sequences that are scheduled for the first time, monotonic seconds.
        """
        drafts_of, block_ids_of = self.drafts_of, kv.block_ids
        rows: list[ScheduledSequence] = []
        for sequence, num_tokens in self.num_tokens_of.items():
            if num_tokens == 1 and sequence.is_plain and sequence.is_decoding and sequence not in drafts_of:
                rows.append(_decode_row(sequence, block_ids_of(sequence.sequence_id)))
            else:
                if sequence.first_scheduled_s is None:
                    sequence.first_scheduled_s = now_s
                drafts = drafts_of.get(sequence, NO_DRAFTS)
                rows.append(_row(sequence, num_tokens, kv, drafts, catch_up))
        return tuple(rows)


def _decode_row(sequence: Sequence, block_ids: tuple[int, ...]) -> ScheduledSequence:
    """What nearly all rows of nearly all steps are: made without the tuple's own `__new__`, which takes as
    long again to sort arguments and defaults."""
    token_ids = sequence.token_ids
    return _new_row(
        ScheduledSequence,
        (
            sequence.sequence_id,
            len(token_ids) - 1,  # first_position
            (token_ids[-1],),
            0,  # num_draft_tokens
            block_ids,
            True,  # is_sampled
            sequence.request.sampling,
            sequence.index,
            sequence.num_prompt_tokens,
            (),  # known_token_ids
            _NOTHING,
            sequence.num_logprobs,
            None,  # num_prompt_logprobs
            None,  # constraint
            0,  # num_suppressed
            None,  # draft
            None,  # takes_from
        ),
    )


def _row(
    sequence: Sequence, num_tokens: int, kv: KVCacheManager, drafts: Drafts, catch_up: CatchUp
) -> ScheduledSequence:
    request, first = sequence.request, sequence.num_computed_tokens
    is_sampled = first + num_tokens == len(sequence.token_ids) and not sequence.is_read_only
    needs_history = request.sampling.needs_history or sequence.num_prompt_logprobs is not None
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        first_position=first,
        token_ids=tuple(sequence.token_ids[first : first + num_tokens]) + drafts.token_ids,
        num_draft_tokens=len(drafts.token_ids),
        block_ids=kv.block_ids(sequence.sequence_id),
        is_sampled=is_sampled,
        sampling=request.sampling,
        index=sequence.index,
        num_prompt_tokens=sequence.num_prompt_tokens,
        known_token_ids=tuple(sequence.token_ids) if needs_history else (),
        suppressed_token_ids=sequence.suppressed_token_ids,
        num_logprobs=sequence.num_logprobs,
        num_prompt_logprobs=sequence.num_prompt_logprobs,
        constraint=sequence.row_constraint if is_sampled else None,
        num_suppressed=sequence.num_suppressed,
        draft=drafts.work or catch_up(sequence, first + num_tokens),
    )
