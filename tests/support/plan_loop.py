"""The simplest engine there can be: fixed block tables, a plan per step, no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engine.outputs import TokenLogprobs
from headrace.engine.runner.protocol import Runner
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.ahead import row_behind
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import SequenceId

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class LoopSequence:
    """A prompt that becomes longer.

    Args:
        prompt_logprobs: by the position of the token that each is of.
    """

    sequence_id: SequenceId
    token_ids: list[int]
    max_len: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    num_computed: int = 0
    failures: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def next_row(self, chunk: int) -> ScheduledSequence | None:
        """At most `chunk` of the tokens that are still to be computed."""
        if len(self.token_ids) >= self.max_len or self.failures:
            return None
        end = min(len(self.token_ids), self.num_computed + chunk)
        return ScheduledSequence(
            sequence_id=self.sequence_id,
            first_position=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : end]),
            num_draft_tokens=0,
            block_ids=self.block_ids,
            is_sampled=end == len(self.token_ids),
            sampling=self.sampling,
            num_prompt_tokens=self.num_prompt_tokens,
            known_token_ids=tuple(self.token_ids),
            num_logprobs=self.sampling.num_logprobs,
            num_prompt_logprobs=self.sampling.num_prompt_logprobs,
        )

    def take(self, row: ScheduledSequence, outcome: RowResult) -> None:
        """Take in what came of its row."""
        self.num_computed = row.end_position
        self.token_ids += outcome.token_ids
        self.logprobs += outcome.logprobs
        self.prompt_logprobs |= dict(enumerate(outcome.prompt_logprobs, start=row.first_position + 1))
        if outcome.failure is not None:
            self.failures.append(outcome.failure)


def make_sequences(
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    block_size: int,
    sampling: Sequence[SamplingParams] | None = None,
) -> list[LoopSequence]:
    """Sequences whose blocks lie interleaved in the pool, from block 1 up."""
    lengths = [len(prompt) + num_new_tokens for prompt in prompts]
    stride = len(prompts)
    return [
        LoopSequence(
            sequence_id=SequenceId(i),
            token_ids=list(prompt),
            max_len=lengths[i],
            block_ids=tuple(1 + i + stride * j for j in range(-(-lengths[i] // block_size))),
            sampling=GREEDY if sampling is None else sampling[i],
        )
        for i, prompt in enumerate(prompts)
    ]


def num_blocks_for(sequences: Sequence[LoopSequence]) -> int:
    """Pool size that holds them, the null block included."""
    return max(block_id for seq in sequences for block_id in seq.block_ids) + 1


def run_to_end(
    runner: Runner,
    sequences: Sequence[LoopSequence],
    *,
    chunk: int = 10**9,
    on_step: Callable[[StepPlan, StepResult], None] = lambda plan, result: None,
) -> list[list[int]]:
    """Step all of them together until each is as long as it may be; their tokens."""
    step = 0
    while True:
        scheduled = [(seq, row) for seq in sequences if (row := seq.next_row(chunk)) is not None]
        if not scheduled:
            return [seq.token_ids for seq in sequences]
        plan = StepPlan(step, tuple(row for _, row in scheduled))
        result = runner.execute(plan)
        on_step(plan, result)
        for (seq, row), outcome in zip(scheduled, result.rows, strict=True):
            seq.take(row, outcome)
        step += 1


def run_ahead_to_end(
    runner: Runner,
    sequences: Sequence[LoopSequence],
    on_step: Callable[[StepPlan], None] = lambda plan: None,
) -> list[list[int]]:
    """The same, with each step behind the first launched before the one that it follows is fetched."""
    scheduled = [(seq, seq.next_row(10**9)) for seq in sequences]
    plan = StepPlan(0, tuple(row._replace(known_token_ids=()) for _, row in scheduled if row is not None))
    members = [seq for seq, row in scheduled if row is not None]
    launched = runner.launch(plan)
    while True:
        on_step(plan)
        going_on = [(i, row) for i, row in enumerate(plan.rows) if row.end_position + 1 < members[i].max_len]
        following = StepPlan(
            plan.step + 1,
            tuple(row_behind(row, i, members[i].block_ids) for i, row in going_on),
            follows=plan.step,
        )
        behind = runner.launch(following) if going_on else None
        for seq, row, outcome in zip(members, plan.rows, launched.fetch().rows, strict=True):
            seq.take(row, outcome)
        if behind is None:
            return [seq.token_ids for seq in sequences]
        plan, launched, members = following, behind, [members[i] for i, _ in going_on]
