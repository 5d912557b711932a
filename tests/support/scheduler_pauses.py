"""The part of `scheduler_machine` that is about readers: sequences are paused, and go on."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceId, SequenceStatus

num_rules = count()
"""How many rules have been run, over all machines of this process."""


class PausingRules(RuleBasedStateMachine):
    scheduler: Scheduler
    sequences: dict[SequenceId, Sequence]
    now_s: float
    has_lost_a_member: bool

    @property
    def is_started(self) -> bool:
        return hasattr(self, "scheduler")

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if not s.is_finished]

    @property
    def paused(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if s.status is SequenceStatus.PAUSED]

    @precondition(lambda self: self.is_started and self.live)
    @rule(data=st.data())
    def pause(self, data):
        next(num_rules)
        sequence = data.draw(st.sampled_from(self.live))
        for sibling in self.live:
            if sibling.request is sequence.request:
                self.has_lost_a_member |= sibling.status is SequenceStatus.RUNNING
                num_computed = sibling.num_computed_tokens
                self.scheduler.pause(sibling, self.now_s)
                assert sibling.status is SequenceStatus.PAUSED
                assert sibling.num_computed_tokens == num_computed, "to pause costs nothing by itself"

    @precondition(lambda self: self.is_started and self.paused)
    @rule(data=st.data())
    def resume(self, data):
        next(num_rules)
        self.resume_request(data.draw(st.sampled_from(self.paused)))

    def resume_request(self, sequence):
        for sibling in self.live:
            if sibling.request is sequence.request:
                self.scheduler.resume(sibling, self.now_s)
                assert sibling.status is not SequenceStatus.PAUSED

    def check_holds(self, now_s: float) -> None:
        """Who has held blocks for long enough holds none; till then the engine is told when to come back."""
        parking, holders = self.scheduler.parking, [s for s in self.paused if s.num_computed_tokens]
        assert list(parking.paused) == sorted(self.paused, key=list(parking.paused).index)
        assert (parking.due_s is None) == (not holders)
        assert parking.due_s is None or parking.due_s > now_s
