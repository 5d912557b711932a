"""What everybody who proposes tokens has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence
from headrace.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is proposed to follow a sequence's known tokens, or who is to propose it.

    Args:
        token_ids: the tokens, where they are known before the step.
        work: what the draft model does in the step, where it is the one that proposes.
    """

    token_ids: tuple[int, ...] = ()
    work: DraftWork | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the target model will have to judge."""
        return len(self.token_ids) + (0 if self.work is None else self.work.num_drafts)


NO_DRAFTS = Drafts()


class Proposer(Protocol):
    """Guesses what sequences say next. Whatever it guesses, the output stays the same; only its speed
    changes.

    Called between steps, in the thread that plans them.
    """

    @property
    def learns_by_judging(self) -> bool:
        """Whether its guesses must be judged by the target for their worth to be seen."""
        ...

    @property
    def seconds_per_draft(self) -> float:
        """What one more draft costs in time beyond its place in the target's step, if every row gets one."""
        ...

    @property
    def usual_chance(self) -> float:
        """How often a draft is kept in a sequence of which nothing is known yet."""
        ...

    def note_time(self, seconds: float, num_drafts: int) -> None:
        """Learn what proposing took in a step.

        Args:
            num_drafts: the most of one row, at least one.
        """
        ...

    def note_catch_up(self, seconds: float, num_tokens: int, num_drafts: int) -> None:
        """Learn what it took in a step to catch up with so many tokens of all rows, and propose then.

        Args:
            num_drafts: the most of one row.
        """
        ...

    def seconds_to_catch_up(self, sequence: Sequence) -> float:
        """What has to be done for a sequence before anything is proposed, in time."""
        ...

    def offer(self, sequence: Sequence, most: int, least_gain: float = 0.0) -> tuple[float, ...]:
        """How many tokens could be proposed for a sequence that decodes, and how likely each is to be kept.

        Args:
            most: no more than these.
            least_gain: nobody will want a draft that is kept, with all before it, less often than this.

        Returns:
            Per draft the chance that it is kept if those before it are, in [0, 1]. Empty: nothing to propose.
        """
        ...

    def drafts(self, sequence: Sequence, num_tokens: int, least_chance: float = 0.0) -> Drafts:
        """Propose so many of the tokens that were offered just now, at least one.

        Args:
            least_chance: no more behind tokens that are all kept less often than this, as far as can be told.
        """
        ...

    def catch_up(self, sequence: Sequence, end_position: int) -> DraftWork | None:
        """What the draft model has to do beside a step that brings a prompt as far as this; None for
        nothing."""
        ...

    def observe(self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult) -> None:
        """Learn what became of a row. The sequence holds the tokens that were kept already."""
        ...

    def begin(self, sequence: Sequence) -> None:
        """A sequence has joined the batch, for the first time or after a preemption."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence is over."""
        ...
