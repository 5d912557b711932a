"""What is kept and what replaces the rest is distributed as the target's own draws, exactly and in fact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.sampling.draws import Purpose
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.rejection import judge, normalised, residual
from headrace.engine.sampling.row import SampledRow
from headrace.engine.sampling.sampler import choose, distributions, draw, uniforms
from tests.support.far_device import as_if_far

VOCAB_SIZE = 8
NUM_DRAWS = 20_000
# Far beyond what chance does once in a million runs, with seven degrees of freedom or fewer.
LARGEST_CHI_SQUARE = 41.0
TARGET = torch.tensor([2.1, 0.3, 1.2, -0.7, 0.9, 1.9, -2.0, 0.1])
UNLIKE = torch.tensor([-1.5, 2.2, 0.4, 1.9, -0.3, -0.8, 1.1, 0.6])

pairs = st.integers(2, 6).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)] * 2)
)

CONTROLS: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.7),
    "hot, top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "top_k": SamplingParams(temperature=0.7, top_k=5),
    "min_p, typical_p": SamplingParams(min_p=0.1, typical_p=0.9),
    "penalties and bias": SamplingParams(
        temperature=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((1, 1.5), (5, -2.0)),
        banned_token_ids=frozenset({2}),
    ),
}


@cache
def many_rows(params: SamplingParams) -> list[SampledRow]:
    """As many as there are draws, each with a seed of its own."""
    return rows_for([params] * NUM_DRAWS)


def rows_for(params: Sequence[SamplingParams]) -> list[SampledRow]:
    """A row per parameter set, each with a seed of its own."""
    return [SampledRow(replace(each, seed=i), 0, 3, 1, (5, 0, 0)) for i, each in enumerate(params)]


def speculate(target: Tensor, draft: Tensor, rows: list[SampledRow]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drafts of every row, what stands in their places, and the probabilities of both sides."""
    ours = distributions(target.expand(len(rows), -1).contiguous(), rows)
    theirs = distributions(draft.expand(len(rows), -1).contiguous(), rows)
    assert ours.weights is not None
    assert theirs.weights is not None
    drafts = choose(theirs, [replace(row, purpose=Purpose.DRAFT) for row in rows]).token_ids
    judged = judge(ours.weights, theirs.weights, drafts, rows)
    return drafts, judged, normalised(ours.weights), normalised(theirs.weights)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Pearson's statistic of counts against probabilities; impossible tokens must not occur."""
    expected = probs * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def counts_of(token_ids: Tensor) -> Tensor:
    return torch.bincount(token_ids, minlength=VOCAB_SIZE).double()


@given(pairs)
def test_the_outcome_is_the_target_s_distribution_exactly(pair: tuple[list[int], list[int]]) -> None:
    """Summed over all drafts: kept with min(1, target / draft), else drawn from what is left."""
    target, draft = (normalised(torch.tensor([side], dtype=torch.float32)) for side in pair)
    kept = torch.minimum(target, draft)
    refused = 1.0 - kept.sum()
    left = residual(target, draft)
    outcome = kept + refused * left / left.sum()

    assert torch.allclose(outcome, target, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(pairs, st.integers(0, 2**32))
def test_every_draft_is_judged_as_its_chance_says(pair: tuple[list[int], list[int]], seed: int) -> None:
    """Each token as a draft, with the uniform numbers of its place: kept exactly when the rule keeps it."""
    target, draft = (torch.tensor([side], dtype=torch.float32) for side in pair)
    size = target.shape[1]
    rows = [SampledRow(SamplingParams(seed=seed + i), 0, i) for i in range(size)]
    drafts = torch.arange(size)

    judged = judge(target.expand(size, -1), draft.expand(size, -1), drafts, rows)

    numbers = uniforms(rows, Purpose.ACCEPT)
    ours, theirs = normalised(target)[0].tolist(), normalised(draft)[0].tolist()
    for token_id in range(size):
        is_kept = numbers[token_id] * theirs[token_id] < ours[token_id]
        assert (judged[token_id] == token_id) == is_kept
        assert target[0, judged[token_id]] > 0


@pytest.mark.parametrize("draft", [TARGET, UNLIKE, TARGET + 0.4 * UNLIKE], ids=["equal", "unlike", "near"])
@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
def test_kept_and_replaced_drafts_together_are_the_target_s_draws(
    controls: SamplingParams, draft: Tensor
) -> None:
    rows = many_rows(controls)

    drafts, judged, target_probs, draft_probs = speculate(TARGET, draft, rows)

    assert chi_square(counts_of(drafts), draft_probs[0]) < LARGEST_CHI_SQUARE
    assert chi_square(counts_of(judged), target_probs[0]) < LARGEST_CHI_SQUARE
    # Measured acceptance within three standard deviations (four would be a coincidence of one in 16,000).
    chance = float(torch.minimum(target_probs[0], draft_probs[0]).sum())
    spread = math.sqrt(chance * (1 - chance) / NUM_DRAWS)
    assert abs(float((drafts == judged).double().mean()) - chance) <= 3 * spread + 1e-9


def test_temperatures_may_be_mixed_in_a_batch() -> None:
    kinds = list(CONTROLS.values())
    rows = rows_for(kinds * (NUM_DRAWS // 4))

    _, judged, target_probs, _ = speculate(TARGET, UNLIKE, rows)

    for i in range(len(kinds)):
        assert chi_square(counts_of(judged[i :: len(kinds)]), target_probs[i]) < LARGEST_CHI_SQUARE


def test_rows_do_not_depend_on_what_is_judged_beside_them() -> None:
    rows = rows_for(list(CONTROLS.values()) * 10)
    _, judged, _, _ = speculate(TARGET, UNLIKE, rows)

    for i, row in enumerate(rows):
        assert speculate(TARGET, UNLIKE, [row])[1] == judged[i : i + 1]


@pytest.mark.parametrize("draft", [TARGET, UNLIKE], ids=["equal", "unlike"])
def test_a_device_that_takes_waiting_to_look_at_judges_the_same(draft: Tensor) -> None:
    rows = rows_for(list(CONTROLS.values()) * 10)
    here = speculate(TARGET, draft, rows)

    with as_if_far():
        far = speculate(TARGET, draft, rows)

    assert all(torch.equal(a, b) for a, b in zip(here, far, strict=True))


def test_equal_distributions_keep_every_draft() -> None:
    rows = rows_for([SamplingParams(temperature=0.8)] * 2_000)
    drafts, judged, _, _ = speculate(TARGET, TARGET, rows)
    assert torch.equal(drafts, judged)


def test_disjoint_distributions_keep_none() -> None:
    ours, theirs = torch.tensor([[0.0, 3.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0, 1.0]])
    rows = rows_for([SamplingParams()] * 500)
    drafts = draw(theirs.expand(500, -1), uniforms(rows, Purpose.DRAFT))
    judged = judge(ours.expand(500, -1), theirs.expand(500, -1), drafts, rows)
    assert set(drafts.tolist()) == {0, 3}
    assert set(judged.tolist()) == {1, 2}


def test_a_draft_that_could_not_have_been_drawn_is_no_division_by_zero() -> None:
    """A draft of probability 0 is kept where the target has it, refused where it hasn't."""
    ours, theirs = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    rows = rows_for([SamplingParams()] * 2)
    judged = judge(ours.expand(2, -1), theirs.expand(2, -1), torch.tensor([1, 2]), rows)
    assert judged[0] == 1
    assert judged[1] in (0, 1)


@given(pairs, st.data())
def test_with_a_draft_model_of_few_tokens_the_outcome_is_the_target_s_distribution_too(
    pair: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    target = normalised(torch.tensor([pair[0]], dtype=torch.float32))
    known = data.draw(st.sets(st.integers(0, len(pair[0]) - 1), min_size=1).map(sorted))
    vocabulary = torch.tensor(known)
    draft = normalised(torch.tensor([pair[1]], dtype=torch.float32)[:, vocabulary] + 1.0)
    kept = torch.zeros_like(target)
    kept[:, vocabulary] = torch.minimum(target[:, vocabulary], draft)
    left = residual(target, draft, vocabulary)

    assert torch.allclose(kept + (1.0 - kept.sum()) * left / left.sum(), target, atol=1e-12)


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
def test_drafts_of_few_tokens_are_judged_by_their_own_ids(controls: SamplingParams) -> None:
    """As with all tokens, those that the draft model lacks being impossible to it."""
    vocabulary = torch.tensor([1, 2, 5, 7])
    rows = many_rows(controls)
    ours = distributions(TARGET.expand(len(rows), -1).contiguous(), rows)
    wide = torch.full((VOCAB_SIZE,), -math.inf)
    wide[vocabulary] = UNLIKE[vocabulary]
    theirs = distributions(wide.expand(len(rows), -1).contiguous(), rows)
    assert ours.weights is not None
    assert theirs.weights is not None
    drafts = choose(theirs, [replace(row, purpose=Purpose.DRAFT) for row in rows]).token_ids

    judged = judge(ours.weights, theirs.weights[:, vocabulary].contiguous(), drafts, rows, vocabulary)

    assert chi_square(counts_of(judged), normalised(ours.weights)[0]) < LARGEST_CHI_SQUARE
    chance = float(torch.minimum(normalised(ours.weights)[0], normalised(theirs.weights)[0]).sum())
    spread = math.sqrt(chance * (1 - chance) / NUM_DRAWS)
    assert abs(float((drafts == judged).double().mean()) - chance) <= 3 * spread + 1e-9
