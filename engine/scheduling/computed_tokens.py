"""Counts the tokens whose KV is valid, and sees to what comes of it: blocks to share, what clients owe."""

from __future__ import annotations

from collections.abc import Sequence as List

from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.speculator import Speculator


class ComputedTokens:
    """What steps have computed of all sequences.

    Args:
        kv: where filled blocks are offered.
        ledger: where clients are charged.
        speculator: who learns what became of drafts.
    """

    def __init__(self, kv: KVCacheManager, ledger: ClientLedger, speculator: Speculator) -> None:
        self._kv = kv
        self._ledger = ledger
        self._speculator = speculator
        self.num_held = 0
        """Tokens whose KV is valid and held, those of shared blocks once for each sequence."""

    def take_in_decodes(self, sequences: List[Sequence]) -> None:
        """What `take_in` does, for sequences that have computed one token and got one, without any drafts."""
        block_size = self._kv.layout.block_size
        num_made: dict[str, int] = {}
        for sequence in sequences:
            sequence.num_computed_tokens = num_computed = sequence.num_computed_tokens + 1
            client = sequence.request.client
            num_made[client] = num_made.get(client, 0) + 1
            if num_computed % block_size == 0 and sequence.sharing_key is not None:
                self._kv.offer(sequence.sequence_id, sequence.token_ids, num_computed, sequence.sharing_key)
        self.num_held += len(sequences)
        for client, num_tokens in num_made.items():
            self._ledger.charge_output(client, num_tokens)

    def take_in(
        self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult, num_output_tokens: int
    ) -> None:
        """Count what a step has computed for a running sequence, and charge its client for what it has made.

        The sequence holds the tokens that it got already. The KV of drafts that were refused, or that stand
        behind the end, lies beyond what is counted.
        """
        if num_output_tokens:
            self._ledger.charge_output(sequence.request.client, num_output_tokens)
        num_before = sequence.num_computed_tokens
        if row.num_draft_tokens or outcome.num_draft_tokens:
            num_kept = row.known_end + outcome.num_accepted_tokens
            num_computed = min(num_kept, len(sequence.token_ids))
        else:
            num_computed = row.first_position + len(row.token_ids)
        sequence.num_computed_tokens = num_computed
        self.num_held += num_computed - num_before
        if self._speculator.is_active:
            self._speculator.observe(sequence, row, outcome)
        key = sequence.sharing_key
        if key is not None and num_computed % self._kv.layout.block_size < num_computed - num_before:
            # At least one block has been filled: others may share it.
            self._kv.offer(sequence.sequence_id, sequence.token_ids, num_computed, key)

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence holds the KV of its first tokens, which others have computed."""
        sequence.num_computed_tokens = num_tokens
        self.num_held += num_tokens

    def lose(self, sequence: Sequence) -> None:
        """A sequence holds nothing any more, and has it all to compute again."""
        self.num_held -= sequence.num_computed_tokens
        sequence.num_computed_tokens = 0

    def note_end(self, sequence: Sequence) -> None:
        """A sequence is over, and keeps its own count."""
        self.num_held -= sequence.num_computed_tokens
