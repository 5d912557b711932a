"""A step's tables are shared out to the rows that they belong to."""

from __future__ import annotations

import math

import torch

from headrace.engine.runner.results import LaunchedTables, StepTables
from headrace.engine.sampling.logprobs import logprob_table
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId

BIG_VOCABULARY = 2**18


def make_row(
    num_tokens: int = 1,
    *,
    is_sampled: bool = True,
    num_prompt_tokens: int = 0,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> ScheduledSequence:
    return ScheduledSequence(
        SequenceId(0),
        0,
        (0,) * num_tokens,
        0,
        (1,),
        is_sampled,
        SamplingParams(),
        num_prompt_tokens=num_prompt_tokens,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def table(*token_ids: int, num_top: int = 2, vocab_size: int = 8) -> torch.Tensor:
    logits = torch.arange(vocab_size).float().expand(len(token_ids), -1)
    return logprob_table(logits, torch.tensor(token_ids), num_top)


def result_of(rows: tuple[ScheduledSequence, ...], tables: StepTables) -> tuple[RowResult, ...]:
    return LaunchedTables(StepPlan(0, rows), tables).fetch().rows


def test_a_step_that_draws_nothing_answers_each_row_with_nothing() -> None:
    assert result_of((make_row(is_sampled=False),) * 2, StepTables()) == (RowResult(), RowResult())


def test_ids_and_ranks_of_a_large_vocabulary_come_through_whole() -> None:
    tokens = torch.tensor([[BIG_VOCABULARY - 1, 1, 1]])
    logprobs = table(0, vocab_size=BIG_VOCABULARY)

    (row,) = result_of((make_row(num_logprobs=1),), StepTables(tokens, logprobs, (), (None,)))

    assert row.token_ids == (BIG_VOCABULARY - 1,)
    assert row.logprobs[0].chosen.rank == BIG_VOCABULARY
    assert [entry.token_id for entry in row.logprobs[0].top] == [BIG_VOCABULARY - 1]


def test_each_row_gets_its_own_and_no_more_than_it_asked_for() -> None:
    rows = (
        make_row(3, is_sampled=False, num_prompt_tokens=9, num_prompt_logprobs=1),
        make_row(num_logprobs=0),
        make_row(2, num_prompt_tokens=2, num_prompt_logprobs=2, num_logprobs=2),
        make_row(),
    )
    tokens = torch.tensor([[4, 1, 1], [5, 1, 1], [6, 1, 1]])
    tables = StepTables(tokens, table(4, 5), (table(1, 2), table(3, 7)), (None, None, None))

    first, second, third, fourth = result_of(rows, tables)

    assert [entry.chosen.token_id for entry in first.prompt_logprobs] == [1, 2, 3]
    assert [len(entry.top) for entry in first.prompt_logprobs] == [1, 1, 1]
    assert [r.token_ids for r in (first, second, third, fourth)] == [(), (4,), (5,), (6,)]
    assert (second.logprobs[0].chosen.token_id, second.logprobs[0].top) == (4, ())
    assert [entry.token_id for entry in third.logprobs[0].top] == [7, 6]
    assert [entry.chosen.token_id for entry in third.prompt_logprobs] == [7]
    assert (fourth.logprobs, fourth.prompt_logprobs) == ((), ())


def test_each_failure_is_its_rows_own_and_says_what_it_is() -> None:
    sick = logprob_table(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), 0)
    rows = (
        make_row(),
        make_row(),
        make_row(),
        make_row(2, is_sampled=False, num_prompt_tokens=2, num_prompt_logprobs=0),
        make_row(),
    )
    tokens = torch.tensor([[0, 0, 0], [1, 1, 0], [2, 1, 1], [3, 1, 1]])

    results = result_of(rows, StepTables(tokens, None, (sick,), (None, None, "known before", None)))

    failures = [row.failure for row in results]
    assert "not finite" in str(failures[0])
    assert "leaves no token" in str(failures[1])
    assert failures[2] == "known before"
    assert "not finite" in str(failures[3])
    assert results[4] == RowResult((3,))
    assert [row.token_ids for row in results[:4]] == [()] * 4
