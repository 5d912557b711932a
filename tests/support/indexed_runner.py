"""A fake runner whose draws depend on the sequence's index, and which tells logprobs: functions of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.engine import LoadedModel, SamplingParams, TokenLogprob, TokenLogprobs
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from tests.support.fake_runner import FakeRunner, FakeTokenizer, expected_output, make_fake_model


def seed_of(index: int, seed: int) -> int:
    """What the runner makes of a sequence's index."""
    return 1000 * index + seed


def expected_child(prompt: Sequence[int], num_tokens: int, index: int, seed: int = 0) -> list[int]:
    """What the sequence of this index makes, alone or not."""
    return expected_output(prompt, num_tokens, seed_of(index, seed))


def logprob_of(token_id: int) -> float:
    """A token's logprob, wherever it stands."""
    return -token_id / 4


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """What is told of a place: ids from 0 on are the likeliest."""
    return TokenLogprobs(_entry(token_id), tuple(_entry(i) for i in range(num_top)))


def _entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, logprob_of(token_id), token_id + 1)


class IndexedRunner(FakeRunner):
    """See above; `plans` keeps what it was given."""

    def compute(self, plan: StepPlan) -> StepResult:
        rows = tuple(row._replace(sampling=SamplingParams(seed=_seed_of_row(row))) for row in plan.rows)
        result = super().compute(replace(plan, rows=rows))
        self.plans[-1] = plan
        return StepResult(
            tuple(_telling(row, outcome) for row, outcome in zip(plan.rows, result.rows, strict=True))
        )


def _seed_of_row(row: ScheduledSequence) -> int:
    return seed_of(row.index, 0 if row.sampling.is_greedy else row.sampling.seed)


def _telling(row: ScheduledSequence, outcome: RowResult) -> RowResult:
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if row.num_logprobs is not None:
        logprobs = tuple(logprobs_of(token_id, row.num_logprobs) for token_id in outcome.token_ids)
    if row.num_prompt_logprobs is not None:
        first = row.first_position + 1
        told = row.known_token_ids[first : first + row.num_prompt_successors]
        prompt_logprobs = tuple(logprobs_of(token_id, row.num_prompt_logprobs) for token_id in told)
    return outcome._replace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def make_indexed_model(
    *,
    before_step: Callable[[StepPlan], None] = lambda plan: None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    tokenizer: FakeTokenizer | None = None,
) -> tuple[LoadedModel, IndexedRunner]:
    """A served model over an `IndexedRunner`, and the runner."""
    model = make_fake_model(
        num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, tokenizer=tokenizer
    )
    runner = IndexedRunner(model.layout, before_step)
    return replace(model, runner=runner), runner
