"""What is drawn in the place of each draft, and what of it is told."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.engine.native.kit import native_kit
from headrace.engine.runner.results import LaunchedTables, StepTables
from headrace.engine.runner.verification import draw_places, greedy_places, places_of
from headrace.engine.sampling.constraint import RowConstraint, RowMask
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.scheduling.plan import ScheduledSequence, StepPlan
from headrace.engine.sequence import SequenceId
from tests.support.anything import Anything

GREEDY = SamplingParams(temperature=0.0)


def make_row(
    drafts: tuple[int, ...],
    *,
    sampling: SamplingParams = GREEDY,
    suppressed: frozenset[int] = frozenset(),
    num_suppressed: int = 0,
    num_logprobs: int | None = None,
) -> ScheduledSequence:
    known = (4, 5)
    return ScheduledSequence(
        SequenceId(1),
        1,
        (5, *drafts),
        len(drafts),
        (1,),
        True,
        sampling,
        num_prompt_tokens=1,
        known_token_ids=known if sampling.needs_history else (),
        suppressed_token_ids=suppressed,
        num_suppressed=num_suppressed,
        num_logprobs=num_logprobs,
    )


def run_of(drafts: tuple[int, ...], drawn: list[int], ill: int | None = None) -> tuple[int, ...]:
    """What a row with these drafts is told when these tokens are drawn."""
    tokens = torch.tensor([[token_id, place != ill, 1] for place, token_id in enumerate(drawn)])
    row = make_row(drafts)
    (result,) = LaunchedTables(StepPlan(0, (row,)), StepTables(tokens, failures=(None,))).fetch().rows
    assert result.num_draft_tokens == (0 if result.failure else len(drafts))
    return result.token_ids


@pytest.mark.parametrize(
    ("drafts", "drawn", "run"),
    [
        ((), [3], (3,)),
        ((3, 4, 5), [3, 4, 5, 6], (3, 4, 5, 6)),
        ((3, 4, 5), [9, 4, 5, 6], (9,)),
        ((3, 4, 5), [3, 9, 5, 6], (3, 9)),
        ((3, 4, 5), [3, 4, 9, 6], (3, 4, 9)),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_was_not_drawn(
    drafts: tuple[int, ...], drawn: list[int], run: tuple[int, ...]
) -> None:
    assert run_of(drafts, drawn) == run


def test_a_run_ends_before_a_place_that_is_ill_and_an_ill_first_place_fails() -> None:
    assert run_of((3, 4), [3, 4, 5], ill=2) == (3, 4)
    assert run_of((3, 4), [3, 4, 5], ill=1) == (3,)
    assert run_of((3, 4), [3, 4, 5], ill=0) == ()


def test_what_is_looked_at_grows_along_the_drafts() -> None:
    sampling = SamplingParams(seed=3, frequency_penalty=1.0)
    row = make_row((7, 8), sampling=sampling, suppressed=frozenset({2}), num_suppressed=2)

    places = places_of(row, None)

    assert [place.position for place in places] == [2, 3, 4]
    assert [place.known_token_ids for place in places] == [(4, 5), (4, 5, 7), (4, 5, 7, 8)]
    assert [place.suppressed_token_ids for place in places] == [{2}, {2}, set()]


def test_each_place_has_its_own_mask() -> None:
    masks = [RowMask(b"\x08"), RowMask(b"\x10", must_end=True), None]
    row = make_row((3, 4), suppressed=frozenset({4}), num_suppressed=9)
    logits = torch.zeros(3, 8)

    sampled = draw_places(logits, [row], [masks], {})

    # A text that nothing can follow ends, `min_tokens` or not.
    assert sampled.token_ids.tolist() == [3, 4, 0]


def test_drafts_that_rejection_sampling_judges_and_others_may_share_a_step() -> None:
    logits = torch.tensor([[0.0, 5.0, -math.inf]] * 5)
    drawn = SamplingParams(temperature=1.0, seed=4)
    rows = [make_row((2,)), make_row((2, 1), sampling=drawn)]
    impossible = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])

    sampled = draw_places(logits, rows, [None, None], {1: impossible})

    greedy, first, second = sampled.token_ids[0], sampled.token_ids[2], sampled.token_ids[3]
    assert greedy == 1
    # The target never says 2: it is refused, and replaced by what is left of the target.
    assert first == 1
    assert second == 1


@pytest.mark.skipif(native_kit() is None, reason="the native library is not built")
def test_rows_that_only_the_model_has_a_say_in_are_told_the_same_in_one_pass() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    logits[2, 7] = math.nan
    logits[4, 9] = math.inf
    logits[5] = -math.inf
    rows = [make_row((3, 4)), make_row(()), make_row((1, 2, 3))]

    sampled = draw_places(logits, rows, [None] * 3, {})
    tokens = greedy_places(logits, rows)

    assert tokens is not None
    assert tokens[:, 0].tolist() == sampled.token_ids.tolist()
    assert tokens[:, 1].tolist() == sampled.is_healthy.tolist()
    assert tokens[:, 2].tolist() == sampled.has_choice.tolist()


@pytest.mark.parametrize(
    "other",
    [
        make_row((), sampling=SamplingParams(temperature=0.5)),
        make_row((), sampling=SamplingParams(temperature=0.0, repetition_penalty=1.1)),
        make_row((), sampling=SamplingParams(temperature=0.0, logit_bias=((3, 1.0),))),
        make_row((), sampling=SamplingParams(temperature=0.0, banned_token_ids=frozenset({1}))),
        make_row((), suppressed=frozenset({2})),
        make_row(())._replace(constraint=RowConstraint(Anything(), (), frozenset())),
    ],
)
def test_one_row_with_a_say_of_its_own_is_enough_for_the_usual_way(other: ScheduledSequence) -> None:
    assert greedy_places(torch.zeros(2, 8), [make_row(()), other]) is None
