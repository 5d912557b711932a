"""Proposes what followed the same words before, in the sequence's own prompt or output. No model is needed.

Prompt lookup decoding: A. Saxena, "Prompt lookup decoding" (2023); also He et al., "REST" (NAACL '24). Beyond
them, a copy that goes well is followed without looking up again, so the match grows beyond the longest run
that is indexed; how likely a guess is to be right is learned by the length of the match; and since a guess
can be compared with what was drawn whether or not anybody verified it, that costs no step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as List
from itertools import islice

from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence
from headrace.engine.sequence import Sequence, SequenceId
from headrace.engine.speculative.acceptance import KeptRate
from headrace.engine.speculative.proposer import Drafts

RUN_LENS = (4, 2)
"""So many tokens are looked up, the most first."""
MAX_INDEXED = 8192
"""So many tokens of a prompt are indexed between two steps, some milliseconds."""
_MATCH_LENS = (2, 3, 4, 6, 9, 14, 24)
"""Chances are learned by the length of the match: below these, and from the last one on."""
_PRIORS = (0.25, 0.35, 0.45, 0.6, 0.75, 0.85, 0.9, 0.95)
_LONGEST = _MATCH_LENS[-1]
_LEVEL_OF = tuple(bisect_right(_MATCH_LENS, match_len) for match_len in range(_LONGEST + 1))
_SLOW_FORGET = 0.999
_PRIOR_WEIGHT = 20.0
_SHARED_WEIGHT = 4.0
"""What all sequences have shown counts for so many judgements of one."""


class LookupIndex:
    """Where each run of tokens in a growing text was last followed by another. Constant time per token.

    Args:
        token_ids: the text; it may grow between two calls, and never changes otherwise.
    """

    def __init__(self, token_ids: List[int]) -> None:
        self._token_ids = token_ids
        self._num_indexed = 0
        self._followers: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in RUN_LENS)
        self._source: int | None = None
        self.match_len = 0

    def num_unread(self, end: int) -> int:
        """Tokens before `end` that are not indexed yet."""
        return max(0, end - self._num_indexed)

    def read_ahead(self, end: int) -> None:
        """Index a part of the text that is long and that nobody wants to go on from.

        Args:
            end: as far as this, and at most `MAX_INDEXED` tokens of it.
        """
        first, end = self._num_indexed, min(end, self._num_indexed + MAX_INDEXED)
        if end <= first:
            return
        for run_len, followers in zip(RUN_LENS, self._followers, strict=True):
            start = max(0, first - run_len)
            part = self._token_ids[start:end]
            runs = zip(*(islice(part, i, None) for i in range(run_len)), strict=False)
            followers.update(zip(runs, range(start + run_len, end), strict=False))
        self._num_indexed, self._source = end, None

    def read(self) -> list[tuple[int, bool]]:
        """Index what is new.

        Returns:
            For each new token that was guessed: how long the match was, and whether the guess was right.
        """
        judged: list[tuple[int, bool]] = []
        token_ids = self._token_ids
        for i in range(self._num_indexed, len(token_ids)):
            if self._source is not None:
                is_right = token_ids[self._source] == token_ids[i]
                judged.append((self.match_len, is_right))
                self._source = self._source + 1 if is_right else None
                self.match_len += 1
            for run_len, followers in zip(RUN_LENS, self._followers, strict=True):
                if i >= run_len:
                    followers[tuple(token_ids[i - run_len : i])] = i
            if self._source is None:
                self._look_up(i + 1)
        self._num_indexed = len(token_ids)
        return judged

    def guess(self, num_tokens: int) -> tuple[int, ...]:
        """What may come next. A text that repeats itself goes on repeating itself."""
        source = self._source
        if source is None:
            return ()
        known = tuple(self._token_ids[source : source + num_tokens])
        missing = num_tokens - len(known)
        return known + tuple(known[i % len(known)] for i in range(missing)) if missing else known

    def find(self) -> bool:
        """Whether there is anything to guess; looks up the end of the text if nothing is being followed."""
        if self._source is None:
            self._look_up(self._num_indexed)
        return self._source is not None

    def _look_up(self, end: int) -> None:
        """Find what followed the last tokens before `end`, none of which is indexed with its follower yet."""
        token_ids = self._token_ids
        for run_len, followers in zip(RUN_LENS, self._followers, strict=True):
            source = followers.get(tuple(token_ids[end - run_len : end])) if end >= run_len else None
            if source is not None:
                self._source, self.match_len = source, run_len
                # The match may be longer than the run by which it was found.
                while (
                    self.match_len < _LONGEST
                    and self.match_len < source
                    and token_ids[source - 1 - self.match_len] == token_ids[end - 1 - self.match_len]
                ):
                    self.match_len += 1
                return


_State = tuple[LookupIndex, list[KeptRate]]


class PromptLookup:
    """See `headrace.engine.speculative.proposer.Proposer`."""

    learns_by_judging = False
    seconds_per_draft = 0.0
    usual_chance = 0.0

    def __init__(self) -> None:
        self._states: dict[SequenceId, _State] = {}
        self._shared = [KeptRate(_SLOW_FORGET) for _ in _PRIORS]

    def offer(self, sequence: Sequence, most: int, least_gain: float = 0.0) -> tuple[float, ...]:
        """See `Proposer.offer`."""
        index, rates = self._state(sequence)
        if index.num_unread(sequence.num_prompt_tokens) > 0:
            index.read_ahead(sequence.num_prompt_tokens)
            if index.num_unread(sequence.num_prompt_tokens) > 0:
                return ()
        for match_len, is_right in index.read():
            level = _LEVEL_OF[min(match_len, _LONGEST)]
            rates[level].add(is_kept=is_right)
            self._shared[level].add(is_kept=is_right)
        if not index.find():
            return ()
        chances: list[float] = []
        match_len, gain, last_level, chance = index.match_len, 1.0, -1, 0.0
        while len(chances) < most:
            level = _LEVEL_OF[min(match_len, _LONGEST)]
            if level != last_level:
                last_level, chance = level, self._chance(rates, level)
            gain *= chance
            if gain < least_gain:
                break
            chances.append(chance)
            match_len += 1
        return tuple(chances)

    def drafts(self, sequence: Sequence, num_tokens: int, least_chance: float = 0.0) -> Drafts:
        """See `Proposer.drafts`."""
        return Drafts(self._state(sequence)[0].guess(num_tokens))

    def catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        """Index the prompt while it is being computed, so that its last step does not have to do it all."""
        self._state(sequence)[0].read_ahead(min(end_position, sequence.num_prompt_tokens))
        return None

    def note_time(self, seconds: float, num_drafts: int) -> None:
        """See `Proposer.note_time`: its own takes none of a step's."""

    def note_catch_up(self, seconds: float, num_tokens: int, num_drafts: int) -> None:
        """See `Proposer.note_catch_up`: there is nothing to catch up with in a step."""

    def seconds_to_catch_up(self, sequence: Sequence) -> float:
        """See `Proposer.seconds_to_catch_up`."""
        return 0.0

    def observe(self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult) -> None:
        """See `Proposer.observe`: what it has to learn it sees in the text."""

    def begin(self, sequence: Sequence) -> None:
        """See `Proposer.begin`: a text that is known stays known."""

    def forget(self, sequence: Sequence) -> None:
        """See `Proposer.forget`."""
        self._states.pop(sequence.sequence_id, None)

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = LookupIndex(sequence.token_ids), [KeptRate() for _ in _PRIORS]
            self._states[sequence.sequence_id] = state
        return state

    def _chance(self, rates: List[KeptRate], level: int) -> float:
        prior = self._shared[level].chance(_PRIORS[level], _PRIOR_WEIGHT)
        return rates[level].chance(prior, _SHARED_WEIGHT)
