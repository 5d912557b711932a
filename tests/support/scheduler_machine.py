"""Scheduler, KV pool and fake model as a state machine: random requests of several clients and priorities,
steps, drafts, faults, aborts, expiries and time over a pool so small that preemption is common. After every
rule all that must always hold is checked, at the end that nothing is left.

`TestSchedulerStates` runs a short, fixed selection; for many more:

    .venv/bin/python -m tests.support.scheduler_machine --steps 100000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.engine import Speculation, SpeculationConfig
from headrace.engine.batch import build_batch
from headrace.engine.config import BatchingPolicy, CacheLayout, SchedulerConfig
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.fairness import OUTPUT_COST, PROMPT_COST
from headrace.engine.scheduling.plan import RowResult, StepPlan
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence, SequenceId, SequenceStatus
from headrace.engine.speculative.speculator import Speculator
from tests.support.fake_runner import FakeRunner, expected_output
from tests.support.requests import make_request
from tests.support.scheduler_checks import (
    MAX_DRAFTS,
    Before,
    GuessingProposer,
    check_admissions,
    check_preemptions,
    check_sequence,
    check_wait,
)
from tests.support.scheduler_pauses import PausingRules, num_rules
from tests.support.shadow_kv import SharedShadowKV

MAX_LEN = 40
AGEING_S = 4.0
WEIGHTS = {"heavy": 2.0}


class SchedulerMachine(PausingRules):
    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.integers(2, 4),
        max_num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 8),
        chunk=st.none() | st.integers(1, 5),
        max_num_skips=st.integers(0, 3),
        batching=st.sampled_from(
            [BatchingPolicy.CONTINUOUS, BatchingPolicy.CONTINUOUS, BatchingPolicy.STATIC]
        ),
        static_batch_wait_s=st.sampled_from([0.0, 0.4]),
        num_drafts=st.sampled_from([None, None, 1, MAX_DRAFTS]),
        prefix_caching=st.sampled_from([True, True, False]),
        paused_hold_s=st.sampled_from([0.0, 1.0, 1000.0]),
    )
    def start(self, *, num_blocks, block_size, num_drafts, prefix_caching, **limits):
        self.layout = CacheLayout(num_blocks + 1, block_size)
        self.config = SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_seqs"] + limits["spare_budget"],
            max_prefill_chunk=limits["chunk"],
            max_num_skips=limits["max_num_skips"],
            batching=limits["batching"],
            priority_ageing_s=AGEING_S,
            client_weights=WEIGHTS,
            static_batch_wait_s=limits["static_batch_wait_s"],
            paused_hold_s=limits["paused_hold_s"],
        )
        self.kv = KVCacheManager(self.layout)
        proposer = None if num_drafts is None else GuessingProposer()
        kind = Speculation.NONE if proposer is None else Speculation.PROMPT_LOOKUP
        config = SpeculationConfig(kind, None, num_drafts, MAX_DRAFTS)
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            prefix_caching=prefix_caching,
            speculator=Speculator(config, proposer, lambda num_tokens, context: 1.0),
        )
        self.is_speculating = proposer is not None
        self.runner = FakeRunner(self.layout)
        self.shadow = SharedShadowKV(self.layout)
        self.now_s = 0.0
        self.num_steps = 0
        self.next_id = 0
        self.has_lost_a_member = False
        self.sequences: dict[SequenceId, Sequence] = {}
        self.num_ends: dict[SequenceId, int] = {}

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        is_alike=st.booleans(),
        client=st.sampled_from(["a", "a", "b", "heavy"]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        has_seed=st.booleans(),
        stops=st.booleans(),
        num_sequences=st.sampled_from([1, 1, 1, 3]),
        uses_prefix_cache=st.sampled_from([True, True, False]),
    )
    def submit(self, *, prompt_len, max_tokens, is_alike, has_seed, stops, num_sequences, **options):
        next(num_rules)
        max_tokens = min(max_tokens, min(self.layout.num_tokens, MAX_LEN) - prompt_len)
        if max_tokens < 1:
            return
        # Nothing may come from outside the machine, or a failure could not be replayed.
        first = 0 if is_alike else self.next_id * 7
        prompt = tuple((first + i) % 97 for i in range(prompt_len))
        request_seed = 1 if has_seed else 0
        request = make_request(
            request_id=f"r{self.next_id}",
            prompt=prompt,
            sampling=SamplingParams(temperature=1.0, seed=request_seed),
            n=num_sequences,
            isolation_key=options["client"],
            **options,
        )
        stop_ids = frozenset(expected_output(prompt, 3, request_seed)[-1:]) if stops else frozenset[int]()
        self.add(request, prompt_len + max_tokens, stop_ids)

    def add(self, request: Request, max_len: int, stop_ids: frozenset[int]) -> None:
        leader = None
        for index in range(request.best_of):
            sequence = Sequence(
                sequence_id=SequenceId(self.next_id),
                request=request,
                max_len=max_len,
                end_token_ids=stop_ids,
                arrival_s=self.now_s,
                token_ids=list(request.prompt_token_ids),
                index=index,
                leader=leader,
            )
            leader = leader or sequence
            self.next_id += 1
            self.sequences[sequence.sequence_id] = sequence
            self.num_ends[sequence.sequence_id] = 0
            self.scheduler.add(sequence)

    @rule()
    def step(self):
        next(num_rules)
        self.run_step(failing=())

    @rule(number=st.integers(2, 10))
    def some_steps(self, number):
        for _ in range(number):
            next(num_rules)
            self.run_step(failing=())

    @rule(which=st.integers(0, 4), has_written=st.booleans())
    def step_with_a_row_that_raises(self, which, has_written):
        next(num_rules)
        self.run_step(failing=(which,), has_written=has_written)

    @rule(has_written=st.booleans())
    def step_that_raises_for_every_row(self, has_written):
        next(num_rules)
        self.run_step(failing=range(10), has_written=has_written)

    @precondition(lambda self: self.is_started and self.live)
    @rule(data=st.data())
    def abort(self, data):
        next(num_rules)
        sequence = data.draw(st.sampled_from(self.live))
        for sibling in self.live:
            if sibling.request is sequence.request:
                self.end(sibling)

    @precondition(lambda self: self.is_started and len(self.sequences) > len(self.live))
    @rule(data=st.data())
    def abort_what_is_over(self, data):
        next(num_rules)
        over = [s for s in self.sequences.values() if s.is_finished]
        self.scheduler.finish(data.draw(st.sampled_from(over)))

    @rule(seconds=st.sampled_from([0.5, AGEING_S, 3 * AGEING_S]))
    def pass_time(self, seconds):
        next(num_rules)
        self.now_s += seconds

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def expire_what_has_waited(self, seconds):
        next(num_rules)
        self.now_s += 0.25
        for sequence in list(self.scheduler.waiting):
            if self.now_s - sequence.arrival_s > seconds and sequence.request.best_of == 1:
                self.end(sequence)

    @rule()
    def flush_cache(self):
        next(num_rules)
        self.kv.flush()
        assert self.kv.counts.cached == 0

    # A step

    def run_step(self, failing, *, has_written=True):
        before = Before(self.scheduler, self.clients(), self.now_s)
        self.has_lost_a_member &= bool(before.running)
        plan, num_preempted = self.scheduler.schedule(self.num_steps, self.now_s)
        self.num_steps += 1
        self.check_holds(before.step_s)
        if plan is None and len(self.live) > len(self.paused):
            check_wait(self.scheduler, self.config, self.now_s)
        self.now_s += 0.125
        if plan is None:
            return
        self.check_plan(plan, num_preempted, before)
        if has_written or not failing:
            texts = [self.text_of(row) for row in plan.rows]
            self.shadow.step(plan, build_batch(plan, self.layout.block_size), texts)
            outcomes = list(self.runner.execute(plan).rows)
        else:
            outcomes = [RowResult() for _ in plan.rows]
        made = dict.fromkeys(("a", "b", "heavy"), 0)
        usual = []
        for i, (row, outcome) in enumerate(zip(plan.rows, outcomes, strict=True)):
            sequence = self.sequences[row.sequence_id]
            if i in failing:
                self.kv.withdraw(row.sequence_id)
                self.end(sequence)
            elif has_written or not failing:
                made[sequence.request.client] += self.take_in(sequence, row, outcome, usual)
            # A step that has raised and whose other rows are run again is another step to the scheduler.
        self.scheduler.computed.take_in_decodes(usual)
        self.check_charges(before, made)
        for sequence in self.live:
            is_stopped = sequence.token_ids[-1] in sequence.end_token_ids and sequence.num_output_tokens
            if is_stopped or len(sequence.token_ids) == sequence.max_len:
                self.end(sequence)

    def take_in(self, sequence, row, outcome, usual) -> int:
        num_taken = 0
        for token_id in outcome.token_ids:
            sequence.token_ids.append(token_id)
            num_taken += 1
            if token_id in sequence.end_token_ids or len(sequence.token_ids) == sequence.max_len:
                break
        is_usual = len(row.token_ids) == 1 and num_taken == 1 and sequence.num_output_tokens > 1
        if is_usual and not self.is_speculating:
            usual.append(sequence)
        else:
            self.scheduler.computed.take_in(sequence, row, outcome, num_taken)
        return num_taken

    def end(self, sequence):
        # The output must be what the request makes alone, whatever has happened to it.
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        request = sequence.request
        assert output == expected_output(request.prompt_token_ids, len(output), request.sampling.seed)
        assert not any(token_id in sequence.end_token_ids for token_id in output[:-1])
        was_live = not sequence.is_finished
        self.has_lost_a_member |= sequence.status is SequenceStatus.RUNNING
        self.scheduler.finish(sequence)
        self.num_ends[sequence.sequence_id] += was_live

    def text_of(self, row) -> tuple[str, list[int]]:
        sequence = self.sequences[row.sequence_id]
        own = f"alone {sequence.sequence_id}"
        return sequence.sharing_key or own, [*sequence.token_ids[: row.known_end], *row.draft_token_ids]

    # What must hold

    def check_plan(self, plan: StepPlan, num_preempted: int, before: Before) -> None:
        limits = self.config
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.rows) == len({row.sequence_id for row in plan.rows}) <= limits.max_num_seqs
        planned = {row.sequence_id for row in plan.rows}
        for row in plan.rows:
            sequence = self.sequences[row.sequence_id]
            assert sequence.status is SequenceStatus.RUNNING
            assert row.first_position == sequence.num_computed_tokens
            assert len(row.block_ids) >= self.layout.num_blocks_for(row.end_position)
            assert 0 not in row.block_ids
            num_known = row.known_end - row.first_position
            assert limits.max_prefill_chunk is None or num_known <= limits.max_prefill_chunk
            assert row.end_position < sequence.max_len or row.num_draft_tokens == 0
        # Every running sequence is in the plan unless the budget ran out.
        for sequence in self.scheduler.running:
            assert sequence.sequence_id in planned or plan.num_tokens == limits.max_num_batched_tokens
        check_preemptions(self.kv, num_preempted, planned, before)
        check_admissions(
            self.scheduler, limits, num_preempted, before, is_batch_closed=self.has_lost_a_member
        )

    def check_charges(self, before: Before, made: dict[str, int]) -> None:
        """Each client is charged for what was computed and made for it, to the token."""
        for client, counter in before.counters.items():
            begun = [
                s
                for s in before.fresh
                if s.request.client == client and s.status is not SequenceStatus.WAITING
            ]
            num_prompt = sum(s.num_prompt_tokens - s.num_cached_tokens for s in begun)
            cost = PROMPT_COST * num_prompt + OUTPUT_COST * made[client]
            charged = self.scheduler.ledger.counter(client) - counter
            assert abs(charged - cost / WEIGHTS.get(client, 1.0)) < 1e-6 or client not in self.clients()

    def clients(self) -> set[str]:
        return {s.request.client for s in self.live}

    @invariant()
    def books_add_up(self):
        if not self.is_started:
            return
        self.kv.check_integrity()
        counts = self.kv.counts
        assert counts.free + counts.cached + counts.live == counts.total
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        assert len(waiting) == len(self.scheduler.waiting)
        assert len(running) <= self.config.max_num_seqs
        parted = waiting + running + list(self.scheduler.parking.paused)
        assert sorted(s.sequence_id for s in parted) == sorted(s.sequence_id for s in self.live)
        assert self.scheduler.waiting.num_tokens == sum(s.max_len for s in waiting)
        assert self.scheduler.computed.num_held == sum(s.num_computed_tokens for s in self.live)
        places = [s.batch_slot for s in running]
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(self.config.max_num_seqs))
        ranks = [s.rank for s in running]
        assert ranks == sorted(ranks)
        for sequence in self.sequences.values():
            check_sequence(self.kv, sequence, self.num_ends[sequence.sequence_id])

    def teardown(self):
        if not self.is_started:
            return
        # A step computes at least one token; a preemption costs at most a pool's worth of them.
        bound = sum(s.max_len for s in self.live) * (2 + self.layout.num_tokens)
        for number in range(bound + 1):
            if not self.live:
                break
            if number % 4 == 3 and self.paused:
                self.resume_request(self.paused[0])
            self.run_step(failing=())
        assert not self.live, "no progress"
        self.books_add_up()
        assert self.kv.counts.live == 0
        assert self.scheduler.waiting.num_tokens == 0


def run(num_steps: int, first_seed: int = 0) -> Iterator[tuple[int, int]]:
    """Run machines until so many rules have been run; yields (seed, rules so far) after each batch."""
    begun = next(num_rules)
    for number in range(first_seed, first_seed + 10**6):
        if next(num_rules) - begun >= num_steps:
            return
        run_state_machine_as_test(
            seed(number)(SchedulerMachine),
            settings=settings(
                max_examples=50,
                stateful_step_count=50,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
        yield number, next(num_rules) - begun


def main() -> None:
    """Run many rules and say how many it were."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000, help="rules to run")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch of machines")
    args = parser.parse_args()
    began_s, num_run = time.monotonic(), 0
    for _, num_run in run(args.steps, args.seed):
        print(f"\r{num_run} rules, {time.monotonic() - began_s:.0f} s", end="", flush=True)
    print(f"\r{num_run} rules held in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
