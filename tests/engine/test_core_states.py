"""The engine core as a state machine: random requests, steps, aborts and faults over a pool so small that
preemption is common. After every rule the books must add up; at the end every request has had one end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine import (
    BatchingPolicy,
    FailureEvent,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    LatencyTargets,
    LoadedModel,
    RequestFailed,
    RequestId,
    Speculation,
    SpeculationParams,
    TokenEvent,
)
from headrace.engine.core import EngineCore, RequestEvent
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from headrace.engine.sequence import Request
from tests.support.fake_runner import (
    EOS,
    expected_output,
    half_right_draft,
    make_fake_model,
    next_token,
    repetitive_token,
    useless_draft,
)
from tests.support.requests import make_config, make_request, speculating


class CoreMachine(RuleBasedStateMachine):
    core: EngineCore
    model: LoadedModel

    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 12),
        chunk=st.none() | st.integers(1, 5),
        max_num_skips=st.integers(0, 3),
        batching=st.sampled_from(BatchingPolicy),
        paused_hold_s=st.sampled_from([0.0, 0.5, 100.0]),
        kind=st.sampled_from(Speculation),
        draft=st.sampled_from([next_token, useless_draft, half_right_draft]),
        draft_max_len=st.integers(4, 40),
        num_drafts=st.none() | st.integers(1, 5),
    )
    def start(self, *, num_blocks, block_size, kind, draft, draft_max_len, num_drafts, **limits):
        self.now_s = 0.0
        # What has been said before is said again only in a text that repeats itself.
        self.choose = repetitive_token if kind is Speculation.PROMPT_LOOKUP else next_token
        self.model = model = make_fake_model(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=40,
            choose=self.choose,
            draft=draft,
            draft_max_len=draft_max_len,
        )
        is_fixed = kind is not Speculation.NONE
        self.config = make_config(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["budget"],
            max_prefill_chunk=limits["chunk"],
            max_num_skips=limits["max_num_skips"],
            batching=limits["batching"],
            paused_hold_s=limits["paused_hold_s"],
            max_num_paused=3,
            speculation=speculating(kind, num_drafts if is_fixed else None, most=5),
        )
        self.core = EngineCore(
            model.info,
            model.layout,
            model.tokenizer,
            self.config,
            lambda: self.now_s,
            draft_max_len=draft_max_len,
        )
        self.requests: dict[RequestId, Request] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()

    @rule(
        prompt_len=st.integers(1, 12),
        max_tokens=st.none() | st.integers(1, 12),
        stops=st.booleans(),
        kind=st.sampled_from(["alike", "alike", "own", "other tenant", "bypass", "plain"]),
    )
    def submit(self, prompt_len, max_tokens, stops, kind):
        prompt = self.next_prompt(prompt_len) if kind == "own" else tuple(range(prompt_len))
        stop_token_ids = frozenset({self.expected(prompt, 3)[-1], EOS}) if stops else frozenset[int]()
        request = make_request(
            request_id=f"r{len(self.requests)}",
            prompt=prompt,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            isolation_key="tenant" if kind == "other tenant" else "",
            uses_prefix_cache=kind != "bypass",
            speculation=SpeculationParams(is_enabled=False if kind == "plain" else None),
        )
        pool = self.model.layout.num_tokens
        if prompt_len + (max_tokens or 1) > min(pool, 40):
            try:
                self.core.add(request)
            except InvalidRequest:
                return
            raise AssertionError("a request that can never fit was let in")
        self.core.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    @rule(seconds=st.sampled_from([0.5, 1.0]), limit=st.sampled_from([0.25, 2.0]))
    def submit_with_a_time_limit(self, seconds, limit):
        request = make_request(
            request_id=f"r{len(self.requests)}", prompt=self.next_prompt(2), max_tokens=3, time_limit_s=limit
        )
        self.core.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.now_s += seconds

    @rule(tpot_s=st.sampled_from([None, 0.001, 0.012, 0.1]), ttft_s=st.sampled_from([None, 0.001, 1.0]))
    def promise(self, tpot_s, ttft_s):
        self.core.latencies.set_targets(LatencyTargets(tpot_s, ttft_s))

    @rule()
    def step(self):
        self.take(self.core.expire())
        plan = self.begin_step()
        if plan is None:
            return
        self.check_plan(plan)
        # A row costs little and a prompt's token much, so that promises keep prompts waiting.
        self.now_s += 0.01 + 0.05 * (plan.num_tokens - len(plan.rows))
        events, stats = self.core.finish_step(self.model.runner.execute(plan))
        assert stats.blocks == self.core.load.blocks
        self.take(events)

    def begin_step(self) -> StepPlan | None:
        """Plan a step, when it is due; None when there is nothing to do."""
        # Time limits, the holds of the paused, a batch that is to be filled: each comes but once.
        for _ in range(2 * len(self.requests) + 2):
            plan = self.core.begin_step()
            if plan is not None:
                return plan
            load, due_s = self.core.load, self.core.due_s
            if load.num_running or load.num_waiting:
                assert self.config.scheduler.batching is BatchingPolicy.STATIC
                assert due_s is not None
                assert self.now_s < due_s <= self.now_s + self.config.scheduler.static_batch_wait_s
            if due_s is None:
                assert load.blocks.live == 0, "nothing is due, and yet blocks are held"
                return None
            self.now_s = due_s
            self.take(self.core.expire())
        raise AssertionError("a step that was due has not begun")

    @precondition(lambda self: self.core.has_work)
    @rule(which=st.integers(0, 3))
    def step_with_a_bad_row(self, which):
        plan = self.begin_step()
        if plan is None:
            assert self.core.load.num_paused or not self.core.has_work
            return
        rows = list(self.model.runner.execute(plan).rows)
        rows[which % len(rows)] = RowResult(failure="non-finite logits")
        events, _ = self.core.finish_step(StepResult(tuple(rows)))
        failed = [event for _, event in events if isinstance(event, FailureEvent)]
        assert len(failed) == 1
        assert isinstance(failed[0].error, RequestFailed)
        self.take(events)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pause(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        most, before = self.config.scheduler.max_num_paused, self.core.load.num_paused
        events = self.core.pause([request_id, RequestId("never seen")])
        assert len(events) <= (before == most), "somebody was given up though there was room"
        assert all(isinstance(event, FailureEvent) for _, event in events)
        assert self.core.load.num_paused == min(most, before + 1) or self.core.load.num_paused == before
        self.take(events)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def resume(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.core.resume([request_id, RequestId("never seen")])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = request_id not in self.ended
        events = self.core.abort([request_id, request_id, RequestId("never seen")])
        assert bool(events) == was_live
        self.take(events)

    def next_prompt(self, prompt_len: int) -> tuple[int, ...]:
        # Nothing may come from outside the machine, or a failure could not be replayed.
        return tuple((len(self.requests) * 7 + i) % 97 for i in range(prompt_len))

    @rule()
    def flush_cache(self):
        assert self.core.flush_cache() >= 0
        assert self.core.load.blocks.cached == 0

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        return expected_output(prompt, num_tokens, choose=self.choose)

    def take(self, events: list[RequestEvent]) -> None:
        for request_id, event in events:
            assert request_id not in self.ended, "an event after the end"
            if isinstance(event, TokenEvent):
                self.outputs[request_id] += event.token_ids
                continue
            self.ended.add(request_id)
            if isinstance(event, FinishEvent):
                self.check_finish(self.requests[request_id], self.outputs[request_id], event)

    def check_finish(self, request: Request, output: list[int], event: FinishEvent) -> None:
        assert output == self.expected(request.prompt_token_ids, len(output)), (
            "differs from the request alone"
        )
        proposed, accepted = event.usage.num_draft_tokens, event.usage.num_accepted_draft_tokens
        assert 0 <= accepted <= min(proposed, len(output))
        assert self.config.speculation.kind is not Speculation.NONE or proposed == 0
        assert request.speculation.is_enabled is not False or proposed == 0
        assert event.usage.num_completion_tokens == len(output)
        assert event.usage.num_cached_tokens < len(request.prompt_token_ids)
        assert event.usage.num_cached_tokens % self.model.layout.block_size == 0
        assert request.uses_prefix_cache or event.usage.num_cached_tokens == 0
        if event.reason is FinishReason.STOP:
            assert event.matched_stop == output[-1]
            assert output[-1] in request.stop.token_ids
        if event.reason is FinishReason.LENGTH:
            room = min(self.model.layout.num_tokens, 40) - len(request.prompt_token_ids)
            assert len(output) == min(room, request.stop.max_tokens or room)
        stops = [i for i in output[:-1] if i in request.stop.token_ids]
        assert not stops, "went on past a stop id"

    def check_plan(self, plan) -> None:
        limits = self.config.scheduler
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        assert len({row.sequence_id for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.token_ids
            num_known, num_drafts = (
                row.known_end - row.first_position,
                row.num_planned_tokens - len(row.token_ids),
            )
            # Drafts that were refused leave blocks behind them, which the next tokens take.
            num_needed = self.model.layout.num_blocks_for(row.end_position + num_drafts)
            most = self.model.layout.num_blocks_for(row.known_end + 5)
            assert num_needed <= len(row.block_ids) <= max(num_needed, most)
            assert row.known_end + num_drafts <= 39 or num_drafts == 0
            assert limits.max_prefill_chunk is None or num_known <= limits.max_prefill_chunk

    @invariant()
    def books_add_up(self):
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        load = self.core.load
        assert load.num_running + load.num_waiting + load.num_paused == len(self.requests) - len(self.ended)
        assert load.num_running <= self.config.scheduler.max_num_seqs
        assert load.blocks.free + load.blocks.cached + load.blocks.live == load.blocks.total

    def teardown(self):
        if not hasattr(self, "core"):
            return
        # Each step computes at least one token; a preemption costs at most a pool's worth of them.
        for _ in range(5_000):
            if not self.core.has_work:
                break
            self.core.resume(self.requests)
            self.step()
        assert self.ended == set(self.requests)
        assert self.core.load.blocks.live == 0


TestCoreStates = CoreMachine.TestCase
TestCoreStates.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_fake_model_never_draws_an_end_id():
    assert all(97 <= next_token(range(n)) < 123 for n in range(1, 50))
