"""Builders of sequences and schedulers for tests that need no engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from types import MappingProxyType

from headrace.engine.config import BatchingPolicy, CacheLayout, SchedulerConfig
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.budget import LatencyBudget
from headrace.engine.scheduling.plan import RowResult, StepPlan
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceId
from tests.support.requests import make_request

_ids = count()


def make_sequence(
    *,
    prompt_len: int = 4,
    max_tokens: int = 8,
    priority: int = 0,
    client: str = "",
    arrival_s: float = 0.0,
    prompt: tuple[int, ...] | None = None,
) -> Sequence:
    """A waiting sequence, younger than every one made before; its rank is its number."""
    request = make_request(
        prompt=prompt, prompt_len=prompt_len, max_tokens=max_tokens, priority=priority, client=client
    )
    sequence_id = SequenceId(next(_ids))
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        max_len=len(request.prompt_token_ids) + max_tokens,
        end_token_ids=frozenset(),
        arrival_s=arrival_s,
        token_ids=list(request.prompt_token_ids),
        rank=(0.0, sequence_id),
    )


class SchedulerHarness:
    """A scheduler, its pool, and the half of a step that the engine does: numbers only, no model."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_prefill_chunk: int | None = None,
        max_num_skips: int = 64,
        batching: BatchingPolicy = BatchingPolicy.CONTINUOUS,
        priority_ageing_s: float = 10.0,
        client_weights: Mapping[str, float] = MappingProxyType({}),
        static_batch_wait_s: float = 0.0,
        paused_hold_s: float = 1000.0,
        prefix_caching: bool = False,
        budget: LatencyBudget | None = None,
    ) -> None:
        self.kv = KVCacheManager(CacheLayout(num_blocks + 1, block_size))
        config = SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_prefill_chunk,
            max_num_skips=max_num_skips,
            batching=batching,
            priority_ageing_s=priority_ageing_s,
            client_weights=client_weights,
            static_batch_wait_s=static_batch_wait_s,
            paused_hold_s=paused_hold_s,
        )
        self.scheduler = Scheduler(config, self.kv, prefix_caching=prefix_caching, budget=budget)
        self.num_steps = 0
        self.num_preemptions = 0
        self.sequences: list[Sequence] = []

    def add(
        self,
        *,
        prompt_len: int = 4,
        max_tokens: int = 8,
        priority: int = 0,
        client: str = "",
        prompt: tuple[int, ...] | None = None,
    ) -> Sequence:
        """Queue a new sequence. It is as many seconds late as there have been steps."""
        sequence = make_sequence(
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            priority=priority,
            client=client,
            arrival_s=float(self.num_steps),
            prompt=prompt,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def by_id(self, sequence_id: SequenceId) -> Sequence:
        """One of all that were ever queued."""
        return next(s for s in self.sequences if s.sequence_id == sequence_id)

    def computed_of(self, client: str) -> tuple[int, int]:
        """Prompt tokens of a client's sequences that have begun, and the tokens that those have made."""
        begun = [s for s in self.sequences if s.request.client == client and s.first_scheduled_s is not None]
        return sum(s.num_prompt_tokens for s in begun), sum(s.num_output_tokens for s in begun)

    def step(self) -> dict[SequenceId, int]:
        """Plan, pretend to run, take in; returns tokens computed per sequence."""
        plan, num_preempted = self.scheduler.schedule(self.num_steps, now_s=float(self.num_steps))
        self.num_steps += 1
        self.num_preemptions += num_preempted
        return {} if plan is None else self.take_in(plan)

    def take_in(self, plan: StepPlan) -> dict[SequenceId, int]:
        """Count the plan's tokens as computed, draw a token for each sampled row, end what is full."""
        live = {sequence.sequence_id: sequence for sequence in self.scheduler.running}
        for row in plan.rows:
            sequence = live[row.sequence_id]
            drawn = (0,) if row.is_sampled else ()
            sequence.token_ids += drawn
            self.scheduler.computed.take_in(sequence, row, RowResult(drawn), len(drawn))
            if drawn and len(sequence.token_ids) == sequence.max_len:
                self.scheduler.finish(sequence)
        self.kv.check_integrity()
        return {row.sequence_id: len(row.token_ids) for row in plan.rows}

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        before = self.num_steps
        while self.scheduler.running or self.scheduler.waiting:
            assert self.num_steps - before < max_steps, "no progress"
            self.step()
        return self.num_steps - before
