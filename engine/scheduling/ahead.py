"""Plans the step behind one that has not returned yet, so that a device need not wait for the host.

What the step under way draws is unknown to the host, and stays on the device: the rows of the next step take
it from there. All else that the plan holds is known, as long as nothing has to be decided by what is drawn.
So a step is planned ahead only where every row goes on by one token or ends by its length, and where the
blocks for that are there; whoever waits may join. A row may end by what is drawn, too: then the row behind it
is void.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from headrace.engine.errors import IntegrityError
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.plan import UNKNOWN_TOKEN, ScheduledSequence, StepPlan
from headrace.engine.scheduling.planning import PlanInProgress
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence


class PlanAhead:
    """Plans steps that follow others.

    Args:
        scheduler: whose decisions it must not anticipate.
        kv: where blocks come from.
        budget: which latencies are promised.
    """

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager, budget: LatencyBudget) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._budget = budget

    def plan(
        self, last: StepPlan, sequences: List[Sequence | None], now_s: float
    ) -> tuple[StepPlan | None, int]:
        """Plan the step behind one that is under way.

        Args:
            last: it.
            sequences: of its rows; None where the row is void.
            now_s: monotonic seconds.

        Returns:
            The plan, None where something has to be decided by what `last` draws, or where there is nothing
            to do; and how many sequences that had left the batch have lost their blocks for those that join.
        """
        scheduler, block_size = self._scheduler, self._kv.layout.block_size
        due_s = scheduler.parking.due_s
        if due_s is not None and due_s <= now_s:
            return None, 0
        going_on: list[tuple[int, ScheduledSequence]] = []
        num_ending = num_missing = 0
        for number, (row, sequence) in enumerate(zip(last.rows, sequences, strict=True)):
            if not _can_be_followed(row):
                return None, 0
            if sequence is None:
                continue
            if row.end_position + 1 >= sequence.max_len:
                num_ending += 1
                continue
            going_on.append((number, row))
            num_missing += len(row.block_ids) * block_size <= row.end_position
        is_whole = len(going_on) + num_ending == len(scheduler.running)
        if not is_whole or num_missing > self._kv.num_available_blocks:
            return None, 0
        allowance = self._budget.begin_step(scheduler.running, len(scheduler.waiting), now_s, last)
        if not going_on:
            allowance.lift()
        joining = PlanInProgress(scheduler.limits, allowance)
        joining.num_tokens_left -= len(going_on)
        rows = [self._row_behind(row, number) for number, row in going_on]
        scheduler.admit(joining, now_s)
        rows += joining.rows(self._kv, _nothing_to_catch_up, now_s)
        if not rows:
            return None, joining.num_stripped
        return StepPlan(last.step + 1, tuple(rows), last.step if going_on else None), joining.num_stripped

    def _row_behind(self, row: ScheduledSequence, number: int) -> ScheduledSequence:
        if self._kv.allocate_slots(row.sequence_id, row.end_position + 1) is None:
            raise IntegrityError(f"sequence {row.sequence_id} was found to have room and then had none")
        return row_behind(row, number, self._kv.block_ids(row.sequence_id))


def row_behind(row: ScheduledSequence, number: int, block_ids: tuple[int, ...]) -> ScheduledSequence:
    """The row that goes on behind another, by the one token that is drawn there.

    Args:
        number: which of its step's sampled rows that is.
        block_ids: with room for one more token.
    """
    num_suppressed = max(0, row.num_suppressed - 1)
    return row._replace(
        first_position=row.end_position,
        token_ids=(UNKNOWN_TOKEN,),
        block_ids=block_ids,
        suppressed_token_ids=row.suppressed_token_ids if num_suppressed else frozenset(),
        num_suppressed=num_suppressed,
        takes_from=number,
    )


def _can_be_followed(row: ScheduledSequence) -> bool:
    """Whether the row behind it needs nothing of what it draws but the token, on the device."""
    return (
        row.is_sampled
        and not row.num_draft_tokens
        and row.draft is None
        and row.constraint is None
        # Penalties and bad words look at the text; of a prompt whose logprobs are told there may be more.
        and not row.known_token_ids
    )


def _nothing_to_catch_up(sequence: Sequence, end_position: int) -> None:
    """Where steps are planned ahead there is no draft model."""
