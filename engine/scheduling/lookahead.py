"""Blocks behind the next token: drafts take them where nobody else has a use for them, and give them back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.planning import PlanInProgress
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.proposer import NO_DRAFTS
from headrace.engine.speculative.speculator import Speculator


class Lookahead:
    """Gives sequences that decode room for drafts.

    Args:
        kv: where blocks come from.
        speculator: who gets drafts.
    """

    def __init__(self, kv: KVCacheManager, speculator: Speculator) -> None:
        self._kv = kv
        self._speculator = speculator

    def num_blocks_soon(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for what is known and one block's worth of growth."""
        soon = min(len(sequence.token_ids) + self._kv.layout.block_size, sequence.max_len)
        return max(0, self._kv.num_missing_blocks(sequence.sequence_id, soon))

    def add_drafts(
        self, plan: PlanInProgress, reading: List[Sequence], *, has_waiting: bool, is_awaited: bool
    ) -> None:
        """Let the sequences of a plan, which all decode, have drafts, where nobody has to wait or give way
        for them.

        Args:
            reading: the running ones whose prompts are under way.
            has_waiting: whether anybody waits.
            is_awaited: whether somebody waits whom only blocks may be missing.
        """
        # Prompts that are under way or wait get at least half of what is left.
        most = plan.num_tokens_left // 2 if reading or has_waiting else plan.num_tokens_left
        drafts_of = self._speculator.plan(list(plan.num_tokens_of), most)
        if not drafts_of:
            return
        missing = (self._kv.num_missing_blocks(each.sequence_id, len(each.token_ids)) for each in reading)
        spare = self._kv.num_available_blocks - sum(max(0, number) for number in missing)
        for sequence, drafts in drafts_of.items():
            num_tokens = sequence.num_computed_tokens + plan.num_tokens_of[sequence] + drafts.num_tokens
            needed = max(0, self._kv.num_missing_blocks(sequence.sequence_id, num_tokens))
            if is_awaited and needed > self.num_blocks_soon(sequence):
                # Those that it is about to need anyway are kept from whoever waits, others are not.
                continue
            if needed <= spare and self._kv.allocate_slots(sequence.sequence_id, num_tokens) is not None:
                spare -= needed
                plan.add_drafts(sequence, drafts)

    def reclaim(self, plan: PlanInProgress, running: Iterable[Sequence]) -> int:
        """Take back the blocks that earlier drafts were given and that the next tokens don't need; returns
        how many."""
        if not self._speculator.is_active:
            return 0
        return sum(
            self._kv.free(
                sequence.sequence_id,
                num_kept_tokens=sequence.num_computed_tokens
                + max(1, plan.num_tokens_of.get(sequence, 0))
                + plan.drafts_of.get(sequence, NO_DRAFTS).num_tokens,
            )
            for sequence in running
        )
