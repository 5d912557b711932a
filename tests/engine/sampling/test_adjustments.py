"""Masks, penalties and bias: equal to their definition and to transformers, row by row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from headrace.engine.sampling.adjustments import adjust, completed_bad_words
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.row import SampledRow
from tests.support.slow_sampling import adjusted_logits

VOCAB_SIZE = 300
TOKEN = st.integers(0, 11)


def make_row(
    known: tuple[int, ...] = (),
    num_prompt_tokens: int = 0,
    suppressed: frozenset[int] = frozenset(),
    **controls: Any,
) -> SampledRow:
    params = SamplingParams(**controls)
    return SampledRow(params, 0, len(known), num_prompt_tokens, known, suppressed)


def adjusted(logits: Tensor, *rows: SampledRow) -> Tensor:
    changed = logits.clone()
    adjust(changed, rows)
    return changed


def random_logits(num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(8)) * 4


HISTORIES = [(5,), (5, 5, 5), tuple(range(40)), (299, 0, 17, 0, 299), tuple([3, 1, 4, 1, 5] * 30)]


@pytest.mark.parametrize("known", HISTORIES, ids=len)
@pytest.mark.parametrize("penalty", [0.2, 0.9, 1.1, 1.3, 10.0])
def test_the_repetition_penalty_is_that_of_transformers(known: tuple[int, ...], penalty: float) -> None:
    """Prompt and output alike, however the two share what is known."""
    logits = random_logits()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([known]), logits.clone())

    for num_prompt_tokens in {0, 1, len(known)}:
        row = make_row(known, num_prompt_tokens, repetition_penalty=penalty)
        torch.testing.assert_close(adjusted(logits, row), theirs, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("known", HISTORIES, ids=len)
@pytest.mark.parametrize(
    "words",
    [
        ((7,),),
        ((5, 5),),
        ((1, 5),),
        ((0, 299, 8), (299, 12), (299,), (39, 4), (5, 3)),
        ((3, 1, 4, 1, 5, 9), (1, 5, 3, 1, 4, 1, 5, 9), (4, 1, 5, 5)),
    ],
)
def test_bad_words_are_those_of_transformers(
    known: tuple[int, ...], words: tuple[tuple[int, ...], ...]
) -> None:
    logits = random_logits()
    theirs = NoBadWordsLogitsProcessor([list(word) for word in words])(torch.tensor([known]), logits.clone())

    assert torch.equal(adjusted(logits, make_row(known, bad_words=words)), theirs)


def test_bias_and_bans_are_those_of_transformers() -> None:
    logits = random_logits()
    known = torch.tensor([[1, 2]])
    bias = {4: 2.5, 299: -100.0, 0: 0.125}
    theirs = SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])(known, logits.clone())
    theirs = SuppressTokensLogitsProcessor([9, 4])(known, theirs)

    row = make_row(logit_bias=tuple(bias.items()), banned_token_ids=frozenset({9, 4}))

    assert torch.equal(adjusted(logits, row), theirs)


def test_frequency_counts_and_presence_does_not_and_both_look_at_the_output_alone() -> None:
    logits = torch.zeros(1, 6)
    known = (0, 0, 1, 1, 1, 2, 0)

    by_both = adjusted(logits, make_row(known, 2, frequency_penalty=0.5, presence_penalty=0.25))
    by_presence = adjusted(logits, make_row(known, 2, presence_penalty=-1.0))

    assert by_both.tolist() == [[-0.75, -1.75, -0.75, 0.0, 0.0, 0.0]]
    assert by_presence.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]
    assert not adjusted(logits, make_row(known, len(known), frequency_penalty=2.0)).any()


def test_the_order_is_masks_then_repetition_then_output_penalties_then_bias() -> None:
    logits = torch.tensor([[4.0, -4.0, 8.0, 1.0]])
    row = make_row(
        (0, 1),
        0,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((0, 3.0), (1, 3.0), (2, 100.0), (0, 0.5)),
        banned_token_ids=frozenset({2}),
    )

    assert adjusted(logits, row).tolist() == [[4.0 / 2 - 1 + 3.5, -4.0 * 2 - 1 + 3, -math.inf, 1.0]]


def test_allowed_ids_are_all_that_is_left_and_bans_go_before_them() -> None:
    logits = random_logits(vocab_size=6)
    row = make_row(
        allowed_token_ids=frozenset({1, 3, 5}),
        banned_token_ids=frozenset({3}),
        suppressed=frozenset({5}),
    )

    assert torch.isfinite(adjusted(logits, row)).tolist() == [[False, True, False, False, False, False]]


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 16, 258])
def test_a_constraint_leaves_the_tokens_whose_bits_are_set_of_its_own_row(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size)
    allowed = {i for i in range(vocab_size) if i % 3 == 0}
    bits = sum(1 << i for i in allowed).to_bytes(-(-vocab_size // 8), "little")
    rows = [make_row(), replace(make_row(), allowed_bits=bits), replace(make_row(), allowed_bits=b"")]

    changed = adjusted(logits, *rows)

    assert torch.equal(changed[0], logits[0])
    assert {i for i in range(vocab_size) if math.isfinite(changed[1, i])} == allowed
    assert torch.equal(changed[1, sorted(allowed)], logits[1, sorted(allowed)])
    assert torch.equal(changed[2], torch.full((vocab_size,), -math.inf))


@pytest.mark.parametrize(
    ("known", "words", "completed"),
    [
        ((), ((1,), (1, 2)), {1}),
        ((1,), ((1, 2), (2, 1), (1, 1, 3)), {2}),
        ((1, 1), ((1, 1, 3), (1, 3, 4), (1, 1, 1, 5)), {3}),
        ((4, 1, 2), ((1, 2, 3), (4, 1, 2, 9), (2, 7), (4, 1)), {3, 9, 7}),
    ],
)
def test_a_bad_word_is_completed_by_its_last_token_alone(
    known: tuple[int, ...], words: tuple[tuple[int, ...], ...], completed: set[int]
) -> None:
    assert set(completed_bad_words(make_row(known, bad_words=words))) == completed


def test_what_the_model_makes_impossible_stays_so() -> None:
    logits = torch.tensor([[-math.inf, 1.0]])
    row = make_row(
        (0, 0),
        repetition_penalty=0.5,
        frequency_penalty=-2.0,
        presence_penalty=-2.0,
        logit_bias=((0, 100.0),),
    )

    assert adjusted(logits, row).tolist() == [[-math.inf, 1.0]]


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 1e-30])
def test_a_tiny_repetition_penalty_makes_no_number_that_is_none(penalty: float) -> None:
    changed = adjusted(torch.tensor([[3.0, 0.0, -3.0, 1.0]]), make_row((0, 1, 2), repetition_penalty=penalty))

    assert bool(torch.isfinite(changed).all())
    assert changed.argmax() == 0


def rows_strategy() -> st.SearchStrategy[SampledRow]:
    token_sets = st.frozensets(TOKEN, max_size=4)

    def build(draw: st.DrawFn) -> SampledRow:
        known = tuple(draw(st.lists(TOKEN, max_size=12)))
        banned = draw(token_sets)
        allowed = draw(st.none() | st.frozensets(TOKEN, min_size=1, max_size=8))
        return make_row(
            known,
            draw(st.integers(0, len(known))),
            draw(token_sets),
            repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3])),
            frequency_penalty=draw(st.sampled_from([-0.7, 0.0, 1.1])),
            presence_penalty=draw(st.sampled_from([-0.3, 0.0, 2.0])),
            logit_bias=tuple(draw(st.lists(st.tuples(TOKEN, st.sampled_from([-3.0, 0.5])), max_size=3))),
            banned_token_ids=banned,
            allowed_token_ids=None if allowed is not None and not allowed - banned else allowed,
            bad_words=tuple(draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=4))),
        )

    return st.composite(build)()


@given(st.lists(rows_strategy(), min_size=1, max_size=6))
def test_every_row_is_adjusted_by_the_definition_and_by_itself(rows: list[SampledRow]) -> None:
    logits = random_logits(len(rows), 12)

    changed = adjusted(logits, *rows)

    expected = [adjusted_logits(x, row) for x, row in zip(logits.tolist(), rows, strict=True)]
    torch.testing.assert_close(changed, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    alone = [adjusted(logits[i : i + 1], row) for i, row in enumerate(rows)]
    assert torch.equal(changed, torch.cat(alone))


def test_a_row_says_whether_anything_changes_its_logits() -> None:
    assert not make_row((1, 2), 1, temperature=0.3, top_k=4, num_logprobs=3).is_adjusted
    for controls in (
        {"suppressed": frozenset({1})},
        {"banned_token_ids": frozenset({1})},
        {"allowed_token_ids": frozenset({1})},
        {"bad_words": ((1,),)},
        {"logit_bias": ((1, 0.5),)},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
    ):
        assert make_row(**controls).is_adjusted
    assert replace(make_row(), allowed_bits=b"").is_adjusted
