"""Everything at once over a tiny pool: families, drafts that fail, pauses, promises, ends of every kind."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from headrace.engine import (
    FailureEvent,
    FinishEvent,
    FinishReason,
    LatencyTargets,
    Request,
    RequestId,
    SamplingParams,
    Speculation,
    TokenEvent,
)
from headrace.engine.core import EngineCore, RequestEvent
from headrace.engine.runner.protocol import LaunchedStep
from headrace.engine.scheduling.plan import RowResult, StepPlan, StepResult
from tests.support.fake_runner import half_right_draft, make_fake_model, next_token
from tests.support.indexed_runner import IndexedRunner, expected_child, logprobs_of
from tests.support.requests import make_config, make_request, speculating

MAX_LEN = 40


class Storm:
    """An engine core to which random things happen; each sequence must make what it makes alone.

    Args:
        is_ahead: whether steps are planned and launched while the ones before them run; nobody speculates
            then.
    """

    def __init__(self, seed: int, *, is_ahead: bool = False) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        model = make_fake_model(
            num_blocks=self.random.randint(10, 24),
            block_size=choice([1, 2, 4]),
            max_model_len=MAX_LEN,
            draft=choice([next_token, half_right_draft]),
            draft_max_len=choice([10, MAX_LEN]),
        )
        self.max_len = min(MAX_LEN, model.layout.num_tokens)
        self.runner = IndexedRunner(model.layout, draft=half_right_draft)
        config = make_config(
            max_num_seqs=choice([1, 3, 5]),
            max_num_batched_tokens=choice([5, 9, 17]),
            max_num_skips=choice([0, 2]),
            priority_ageing_s=choice([0.5, 100.0]),
            paused_hold_s=choice([0.0, 0.5, 100.0]),
            max_num_paused=choice([2, 100]),
            speculation=None
            if is_ahead
            else speculating(Speculation.DRAFT_MODEL, choice([None, 1, 4]), most=5),
        )
        self.is_ahead = is_ahead
        self.num_ahead = self.num_void = 0
        self.under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.now_s = 0.0
        self.core = EngineCore(
            model.info,
            model.layout,
            model.tokenizer,
            config,
            lambda: self.now_s,
            draft_max_len=model.draft_max_len,
        )
        self.live: dict[RequestId, Request] = {}
        self.token_ids: dict[tuple[RequestId, int], list[int]] = {}
        self.num_ends: dict[RequestId, int] = {}

    def run(self, num_rounds: int) -> None:
        rounds = (self.submit, self.submit, self.steps, self.steps, self.steps, self.pause, self.resume)
        for _ in range(num_rounds):
            self.random.choice((*rounds, self.abort, self.promise, self.core.flush_cache))()
            self.core.check_integrity()
        for _ in range(10_000):
            if not self.live and not self.under_way:
                break
            self.core.resume(self.some(len(self.live)))
            self.steps()
        assert not self.live, "no progress"
        self.core.check_integrity()
        assert self.core.load.blocks.live == 0

    def submit(self) -> None:
        choice, prompt_len = self.random.choice, self.random.randint(1, self.max_len - 1)
        request = make_request(
            prompt=tuple(range(prompt_len)) if self.random.random() < 0.6 else None,
            prompt_len=prompt_len,
            max_tokens=self.random.randint(1, self.max_len - prompt_len),
            n=choice([1, 1, 2, 6]),
            sampling=SamplingParams(seed=choice([1, 7]), num_logprobs=choice([None, 2])),
            uses_prefix_cache=choice([True, True, False]),
            isolation_key=choice("ab"),
            client=choice("ab"),
            priority=choice([0, 0, 3]),
            time_limit_s=choice([None, None, None, 2.0]),
            stop_token_ids=frozenset(self.random.sample(range(97, 123), choice([0, 0, 2, 6]))),
        )
        self.core.add(request)
        self.live[request.request_id] = request
        self.num_ends[request.request_id] = 0

    def steps(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.take(self.core.expire())
            if not self.under_way and not self.launch(self.core.begin_step()):
                self.now_s = max(self.now_s, self.core.due_s or 0.0)
                return
            if self.is_ahead and self.random.random() < 0.9:
                self.num_ahead += self.launch(self.core.begin_step(ahead=True))
            plan, launched = self.under_way.popleft()
            result = self.fetch(plan, launched)
            # A row costs little and a prompt's token much, so that promises keep prompts waiting.
            self.now_s += 0.01 + 0.05 * (plan.num_tokens - len(plan.rows))
            events, stats = self.core.finish_step(result)
            self.num_void += len(plan.rows) - len(stats.rows)
            self.take(events)

    def launch(self, plan: StepPlan | None) -> bool:
        """Launch a step, which may not touch what steps under way write of others."""
        if plan is None:
            return False
        block_size = self.runner.layout.block_size
        for other, _ in self.under_way:
            for row in other.rows:
                written = {
                    row.block_ids[i // block_size] for i in range(row.first_position, row.end_position)
                }
                for mine in plan.rows:
                    assert mine.sequence_id == row.sequence_id or written.isdisjoint(mine.block_ids)
        self.under_way.append((plan, self.runner.launch(plan)))
        return True

    def fetch(self, plan: StepPlan, launched: LaunchedStep) -> StepResult:
        """Run a step in which the draft model may fail, and a row."""
        is_failing = self.random.random() < 0.2 and any(row.draft is not None for row in plan.rows)
        if is_failing:
            bare = replace(plan, rows=tuple(row._replace(draft=None) for row in plan.rows))
            rows = [
                outcome._replace(is_draft_failed=row.draft is not None)
                for row, outcome in zip(plan.rows, self.runner.execute(bare).rows, strict=True)
            ]
        else:
            rows = list(launched.fetch().rows)
        if self.random.random() < 0.03:
            rows[self.random.randrange(len(rows))] = RowResult(failure="not finite")
        return StepResult(tuple(rows), propose_s=0.001 * (not self.is_ahead))

    def pause(self) -> None:
        self.take(self.core.pause(self.some(2)))

    def resume(self) -> None:
        self.core.resume(self.some(2))

    def abort(self) -> None:
        self.take(self.core.abort(self.some(1)))

    def promise(self) -> None:
        tpot_s, ttft_s = self.random.choice([None, 0.012, 0.1]), self.random.choice([None, 0.1])
        self.core.latencies.set_targets(LatencyTargets(tpot_s, ttft_s), self.random.choice([None, 3]))

    def some(self, most: int) -> list[RequestId]:
        return [
            self.live[i].request_id for i in self.random.sample(sorted(self.live), min(most, len(self.live)))
        ]

    def take(self, events: list[RequestEvent]) -> None:
        for request_id, event in events:
            request = self.live[request_id]
            if isinstance(event, FailureEvent):
                del self.live[request_id]
            elif isinstance(event, TokenEvent):
                self.token_ids.setdefault((request_id, event.index), []).extend(event.token_ids)
                num_top = request.sampling.num_logprobs
                told = () if num_top is None else tuple(logprobs_of(i, num_top) for i in event.token_ids)
                assert event.logprobs == told
            else:
                self.check_end(request, event)

    def check_end(self, request: Request, end: FinishEvent) -> None:
        output = self.token_ids.get((request.request_id, end.index), [])
        seed = request.sampling.seed
        assert output == expected_child(request.prompt_token_ids, len(output), end.index, seed)
        assert end.usage.num_completion_tokens == len(output)
        assert end.usage.num_accepted_draft_tokens <= min(end.usage.num_draft_tokens, len(output))
        assert end.reason is not FinishReason.LENGTH or len(output) == request.stop.max_tokens
        assert (end.reason is FinishReason.STOP) == (
            output[-1:] != [] and output[-1] in request.stop.token_ids
        )
        self.num_ends[request.request_id] += 1
        if self.num_ends[request.request_id] == request.n:
            del self.live[request.request_id]
