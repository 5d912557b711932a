"""Plans what the draft model does: which of its KV is valid, what it has to catch up with, how much it
proposes.

Its KV lies behind the same block ids as the target's. A sequence's draft KV is valid as far as the draft
model has computed that very sequence's tokens, itself or in a shared block that is known to hold them: it may
trail the target's by much after a prefix hit, by nothing but the newest token after a refusal, and by one
more where all drafts were kept, for nobody has computed the last of them.
"""

from __future__ import annotations

from headrace.engine.config import DraftSampling
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence
from headrace.engine.sequence import Sequence, SequenceId
from headrace.engine.speculative.acceptance import KeptRate
from headrace.engine.speculative.proposer import NO_DRAFTS, Drafts

MAX_CATCH_UP = 512
"""So many tokens of one sequence the draft model catches up with in one step; the rest waits for the next."""
_PRIOR = 0.7
_PRIOR_WEIGHT = 8.0
_USUAL_WEIGHT = 24.0
"""What all sequences have in common counts almost as much as what is remembered of one: else a row whose
drafts just pay goes without them for long after a few that were refused by chance."""
_SLOW_FORGET = 0.999
_PLACE_WEIGHT = 6.0
_FADES = 0.9
_LONGEST_REST = 512
"""After a failure, or where the draft model had nothing to propose, a sequence goes without it for a step,
then two, then four, up to so many."""


class _State:
    """What is known of one sequence.

    Args:
        num_computed: its first so many tokens have valid draft KV.
        num_resting: so many steps it goes without the draft model, which has failed it or had nothing to
            propose.
        last_rest: how many it went without the last time; 0 when the draft model has proposed since.
    """

    __slots__ = ("last_rest", "num_computed", "num_resting", "rate", "rates")

    def __init__(self, num_places: int) -> None:
        self.num_computed = 0
        self.num_resting = self.last_rest = 0
        self.rate = KeptRate()
        self.rates = [KeptRate() for _ in range(num_places)]

    def rest(self) -> None:
        """Go without the draft model for longer than the last time."""
        self.last_rest = self.num_resting = min(_LONGEST_REST, max(1, 2 * self.last_rest))


class DraftModelProposer:
    """See `headrace.engine.speculative.proposer.Proposer`.

    Args:
        kv: knows whose blocks are whose.
        max_len: longest sequence of the draft model, tokens.
        most: most drafts of one row.
        draft_sampling: how drafts are judged where tokens are drawn.
    """

    learns_by_judging = True

    def __init__(self, kv: KVCacheManager, max_len: int, most: int, draft_sampling: DraftSampling) -> None:
        self._kv = kv
        self._max_len = max_len
        self._most = most
        self._draft_sampling = draft_sampling
        self._states: dict[SequenceId, _State] = {}
        self._shared = KeptRate(_SLOW_FORGET)
        self._seconds_per_draft = self._seconds_per_token = 0.0

    @property
    def seconds_per_draft(self) -> float:
        """See `Proposer.seconds_per_draft`."""
        return self._seconds_per_draft

    def note_time(self, seconds: float, num_drafts: int) -> None:
        """See `Proposer.note_time`."""
        self._seconds_per_draft = _faded(self._seconds_per_draft, seconds / num_drafts)

    @property
    def usual_chance(self) -> float:
        """See `Proposer.usual_chance`."""
        return self._shared.chance(_PRIOR, _PRIOR_WEIGHT)

    def note_catch_up(self, seconds: float, num_tokens: int, num_drafts: int) -> None:
        """See `Proposer.note_catch_up`."""
        # The first draft comes with the tokens that are caught up with.
        taken = max(0.0, seconds - max(0, num_drafts - 1) * self._seconds_per_draft) / num_tokens
        self._seconds_per_token = _faded(self._seconds_per_token, taken)

    def seconds_to_catch_up(self, sequence: Sequence) -> float:
        """See `Proposer.seconds_to_catch_up`."""
        num_missing = len(sequence.token_ids) - self._state(sequence).num_computed
        return max(0, num_missing - 1) * self._seconds_per_token

    def offer(self, sequence: Sequence, most: int, least_gain: float = 0.0) -> tuple[float, ...]:
        """See `Proposer.offer`."""
        # The draft model computes every draft but the last one.
        most = min(most, self._most, self._max_len - len(sequence.token_ids) + 1)
        if most <= 0:
            return ()
        state = self._state(sequence)
        if state.num_resting > 0:
            state.num_resting -= 1
            return ()
        usual = state.rate.chance(self.usual_chance, _USUAL_WEIGHT)
        return tuple(state.rates[place].chance(usual, _PLACE_WEIGHT) for place in range(most))

    def drafts(self, sequence: Sequence, num_tokens: int, least_chance: float = 0.0) -> Drafts:
        """See `Proposer.drafts`; one that has too much to catch up with proposes nothing yet.

        Only of greedy tokens the draft model can tell how likely they are to be kept: what is drawn is kept
        as often as two distributions overlap.
        """
        state = self._state(sequence)
        end = len(sequence.token_ids)
        is_late = end - state.num_computed > MAX_CATCH_UP
        work = self._work(sequence, state.num_computed + MAX_CATCH_UP if is_late else end)
        if work is None:
            return NO_DRAFTS
        if is_late:
            return Drafts(work=work)
        if not sequence.request.sampling.is_greedy:
            least_chance = 0.0
        is_coupled = self._is_coupled(sequence)
        return Drafts(
            work=DraftWork(work.first_position, work.token_ids, num_tokens, is_coupled, least_chance)
        )

    def catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        """See `Proposer.catch_up`."""
        state = self._state(sequence)
        if state.num_resting > 0:
            return None
        return self._work(sequence, min(end_position, state.num_computed + MAX_CATCH_UP, self._max_len))

    def observe(self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult) -> None:
        """See `Proposer.observe`."""
        if row.draft is None:
            return
        state = self._state(sequence)
        num_kept = outcome.num_accepted_tokens
        for place in range(min(outcome.num_draft_tokens, num_kept + 1)):
            is_kept = place < num_kept
            state.rates[place].add(is_kept=is_kept)
            state.rate.add(is_kept=is_kept)
            self._shared.add(is_kept=is_kept)
        if outcome.is_draft_failed:
            self._rest(sequence, state)
            return
        if row.draft.num_drafts > 0:
            if outcome.num_draft_tokens == 0:
                # The request's controls leave it nothing to propose: asking costs as much as a refused draft.
                state.rates[0].add(is_kept=False)
                state.rate.add(is_kept=False)
                state.rest()
            else:
                state.last_rest = 0
        # The last draft was proposed and not computed; those that were refused are not the text's.
        num_valid = max(0, min(num_kept, outcome.num_draft_tokens - 1))
        state.num_computed = row.draft.end_position + num_valid
        num_full = state.num_computed // self._kv.layout.block_size
        self._kv.drafted.mark(self._kv.block_ids(sequence.sequence_id)[:num_full])

    def _rest(self, sequence: Sequence, state: _State) -> None:
        """Leave a sequence in peace for some steps, then begin with it anew: what the draft model has
        computed of it may be what its failure came from."""
        state.rest()
        state.num_computed = 0
        self._kv.drafted.forget(self._kv.block_ids(sequence.sequence_id))

    def begin(self, sequence: Sequence) -> None:
        """See `Proposer.begin`: of the KV that it finds the draft model's part may be missing."""
        num_blocks = self._kv.drafted.count(self._kv.block_ids(sequence.sequence_id))
        self._state(sequence).num_computed = num_blocks * self._kv.layout.block_size

    def forget(self, sequence: Sequence) -> None:
        """See `Proposer.forget`."""
        self._states.pop(sequence.sequence_id, None)

    def _is_coupled(self, sequence: Sequence) -> bool:
        if self._draft_sampling is DraftSampling.AUTO:
            return sequence.request.speculation.has_own_seed
        return self._draft_sampling is DraftSampling.COUPLED

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = self._states[sequence.sequence_id] = _State(self._most)
        return state

    def _work(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        first = self._state(sequence).num_computed
        if end_position <= first:
            return None
        return DraftWork(first, tuple(sequence.token_ids[first:end_position]))


def _faded(known: float, new: float) -> float:
    return known * _FADES + new * (1 - _FADES) if known else new
