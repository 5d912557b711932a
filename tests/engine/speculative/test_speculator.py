from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from headrace.engine import ConfigError, SamplingParams, Speculation, SpeculationConfig, SpeculationParams
from headrace.engine.config import CacheLayout
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import Sequence
from headrace.engine.speculative.draft_proposer import DraftModelProposer
from headrace.engine.speculative.prompt_lookup import PromptLookup
from headrace.engine.speculative.speculator import Speculator, make_proposer
from tests.support.requests import GREEDY, speculating
from tests.support.sequences import make_sequence


def decoding(*, max_tokens: int = 100, speculation: SpeculationParams | None = None) -> Sequence:
    """A sequence that decodes, and whose text repeats itself."""
    sequence = make_sequence(prompt_len=12, max_tokens=max_tokens)
    sequence.token_ids[:] = [1, 2, 3, 4] * 3
    sequence.token_ids.append(1)
    sequence.num_computed_tokens = 12
    if speculation is not None:
        sequence.request = type(sequence.request)(
            sequence.request.request_id, sequence.request.prompt_token_ids, speculation=speculation
        )
    return sequence


def cheap(num_tokens: int, num_context_tokens: int) -> float:
    return 7.0 + 0.1 * num_tokens


def middling(num_tokens: int, num_context_tokens: int) -> float:
    return 7.0 + 1.5 * num_tokens


def dear(num_tokens: int, num_context_tokens: int) -> float:
    return 1.0 * num_tokens


def with_lookup(seconds_of=cheap, **config) -> Speculator:
    return Speculator(SpeculationConfig(Speculation.PROMPT_LOOKUP, **config), PromptLookup(), seconds_of)


def test_nobody_proposes_anything_without_a_proposer():
    idle = Speculator(SpeculationConfig(), None, cheap)
    assert not idle.is_active
    assert idle.plan([decoding()], 100) == {}


def test_drafts_that_pay_are_made_and_others_are_not():
    sequence = decoding()
    assert with_lookup().plan([sequence], 100)[sequence].token_ids[:4] == (2, 3, 4, 1)
    assert with_lookup(dear).plan([sequence], 100) == {}


def test_a_number_that_is_asked_for_is_made_whether_it_pays_or_not():
    sequence = decoding(speculation=SpeculationParams(num_tokens=3))
    assert with_lookup(dear).plan([sequence], 100)[sequence].token_ids == (2, 3, 4)
    assert with_lookup(dear).plan([sequence], 2)[sequence].token_ids == (2, 3)
    assert with_lookup(dear, num_speculative_tokens=2).plan([decoding()], 100) != {}


@pytest.mark.parametrize(("max_tokens", "most"), [(2, 0), (3, 1), (4, 2), (50, 5)])
def test_no_draft_stands_where_the_last_token_goes(max_tokens, most):
    sequence = decoding(max_tokens=max_tokens)
    drafts = with_lookup(num_speculative_tokens=5).plan([sequence], 100)
    assert (len(drafts[sequence].token_ids) if drafts else 0) == most


def test_who_wants_none_gets_none():
    for wanted in (SpeculationParams(is_enabled=False), SpeculationParams(num_tokens=0)):
        assert with_lookup().plan([decoding(speculation=wanted)], 100) == {}


class DraftHarness:
    """A speculator with a draft model that is always wrong, or always right, when it is asked at all."""

    def __init__(self, seconds_of=cheap) -> None:
        self.kv = KVCacheManager(CacheLayout(1000, 4))
        config = speculating(Speculation.DRAFT_MODEL)
        self.speculator = Speculator(config, make_proposer(config, self.kv, 1000), seconds_of)
        self.propose_s = 0.0
        self.begin()
        # The first step that would have drafts shows what one without takes.
        if seconds_of is not dear:
            assert self.speculator.plan([self.sequence], 100) == {}

    def begin(self) -> None:
        """Go on with a new sequence."""
        self.sequence = decoding(max_tokens=5000)
        self.kv.allocate_slots(self.sequence.sequence_id, 2000)
        self.speculator.begin(self.sequence)

    def end(self) -> None:
        """The sequence is over."""
        self.speculator.forget(self.sequence)
        self.kv.free(self.sequence.sequence_id)

    def step(self, *, is_right: bool, propose_s: float = 0.0, is_mute: bool = False) -> int:
        """How many drafts are planned; the sequence then has one token more, and those that are right.

        Args:
            propose_s: what proposing takes, for each token that the draft model computes.
            is_mute: the request's controls leave the draft model nothing to say.
        """
        drafts = self.speculator.plan([self.sequence], 100).get(self.sequence)
        length = 0 if drafts is None else drafts.num_tokens
        end = len(self.sequence.token_ids)
        row = ScheduledSequence(
            self.sequence.sequence_id,
            end - 1,
            (0,),
            0,
            (),
            True,
            GREEDY,
            draft=None if drafts is None else drafts.work,
        )
        kept = length if is_right else 0
        self.sequence.token_ids += [9] * (kept + 1)
        result = RowResult((9,) * (kept + 1), num_draft_tokens=0 if is_mute else length)
        num_computed = 0 if drafts is None else len(drafts.work.token_ids) + max(0, length - 1)
        self.propose_s += propose_s * num_computed
        step = StepPlan(0, (row,)), StepResult((result,), propose_s=propose_s * num_computed)
        self.speculator.note_step(*step)
        self.speculator.observe(self.sequence, row, result)
        return length


def test_a_draft_model_that_is_always_wrong_is_asked_ever_more_seldom_and_recovers():
    harness = DraftHarness()
    assert harness.step(is_right=False) > 0
    for _ in range(60):
        harness.step(is_right=False)
    lengths = [harness.step(is_right=False) for _ in range(300)]
    assert 1 <= sum(lengths) <= 8
    for _ in range(2000):
        if harness.step(is_right=True) > 1:
            break
    else:
        raise AssertionError("it was never trusted again")


def test_trials_take_a_small_share_of_the_time_what_is_caught_up_with_included():
    """What the draft model catches up with for a trial takes several times what the trial itself does."""
    harness = DraftHarness()
    for _ in range(100):
        harness.step(is_right=False, propose_s=0.05)
    harness.propose_s = 0.0
    lengths = [harness.step(is_right=False, propose_s=0.05) for _ in range(1200)]
    assert sum(lengths) >= 1
    assert harness.propose_s <= 0.012 * 1200 * cheap(1, 0)


def test_what_was_saved_for_trials_never_takes_more_than_some_steps_at_once():
    harness = DraftHarness()
    for _ in range(100):
        harness.step(is_right=False, propose_s=3.5)
    before = harness.propose_s
    for _ in range(1900):
        harness.step(is_right=False, propose_s=3.5)
    # It is far behind by now, and catching up would take a thousand steps' time.
    assert harness.propose_s - before <= 10 * cheap(1, 0)


def test_drafts_that_just_pay_are_made_all_along():
    """Kept three times in ten, at an eighth of a step each: a few refused by chance end them for no row."""

    def just_worth_it(num_tokens, num_context_tokens):
        return 7.0 + 1.0 * num_tokens

    draw = Random(0)
    harness = DraftHarness(just_worth_it)
    num_drafted = 0
    for _ in range(24):
        num_drafted += sum(harness.step(is_right=draw.random() < 0.3) > 0 for _ in range(125))
        harness.end()
        harness.begin()
    assert num_drafted >= 0.92 * 24 * 125


def test_a_prompt_is_not_caught_up_with_where_drafts_are_too_seldom_kept():
    harness = DraftHarness(middling)
    other = decoding()
    assert harness.speculator.catch_up(other, 12, 1) is not None
    for _ in range(20):
        for _ in range(4):
            harness.step(is_right=False)
        harness.end()
        harness.begin()
    assert harness.speculator.catch_up(other, 12, 1) is None


def test_a_step_without_drafts_comes_now_and_then_so_that_its_time_stays_known():
    harness = DraftHarness()
    lengths = [harness.step(is_right=True) for _ in range(100)]
    assert [place for place, length in enumerate(lengths) if length == 0] == [64]


def test_who_can_propose_nothing_is_asked_ever_more_seldom_too():
    harness = DraftHarness()
    for _ in range(60):
        harness.step(is_right=False, is_mute=True)
    assert sum(harness.step(is_right=False, is_mute=True) > 0 for _ in range(300)) <= 8


def test_nothing_is_tried_where_even_good_drafts_would_not_pay():
    harness = DraftHarness(dear)
    assert [harness.step(is_right=True) for _ in range(600)] == [0] * 600


def test_drafts_come_behind_what_the_draft_model_has_to_catch_up_with():
    harness = DraftHarness()
    drafts = harness.speculator.plan([harness.sequence], 100)[harness.sequence]
    assert drafts.work is not None
    assert drafts.work.first_position == 0
    assert drafts.work.token_ids == tuple(harness.sequence.token_ids)


def test_the_last_draft_that_was_kept_is_still_to_be_computed():
    harness = DraftHarness()
    harness.step(is_right=True)
    drafts = harness.speculator.plan([harness.sequence], 100)[harness.sequence]
    assert drafts.work is not None
    assert len(drafts.work.token_ids) == 2


def test_a_long_prompt_is_caught_up_with_in_pieces():
    kv = KVCacheManager(CacheLayout(2000, 4))
    proposer = DraftModelProposer(kv, 5000, 4, speculating(Speculation.DRAFT_MODEL).draft_sampling)
    sequence = make_sequence(prompt_len=1200)
    first = proposer.drafts(sequence, 4)
    assert first.work is not None
    assert (first.num_tokens, len(first.work.token_ids)) == (0, 512)


def test_a_server_that_is_to_draft_needs_a_draft_model():
    kv = KVCacheManager(CacheLayout(10, 4))
    with pytest.raises(ConfigError, match="no draft model"):
        make_proposer(speculating(Speculation.DRAFT_MODEL), kv, None)


def test_a_row_may_have_twice_as_many_drafts_as_pay_on_average_if_the_draft_model_is_sure_of_them():
    harness = DraftHarness()
    for _ in range(40):
        harness.step(is_right=True)
    drafts = harness.speculator.plan([harness.sequence], 100)[harness.sequence]
    assert drafts.work is not None
    # One more costs a seventieth of a step, and most are kept.
    assert 0.0 < drafts.work.least_chance < 0.05
    assert drafts.work.num_drafts == 8


def test_rows_whose_number_is_fixed_or_whose_tokens_are_drawn_get_them_all():
    fixed = decoding(speculation=SpeculationParams(num_tokens=3))
    drawn = decoding()
    drawn.request = replace(drawn.request, sampling=SamplingParams(temperature=1.0))
    harness = DraftHarness()
    for sequence in (fixed, drawn):
        harness.kv.allocate_slots(sequence.sequence_id, 200)
        harness.speculator.begin(sequence)
    for drafts in harness.speculator.plan([fixed, drawn], 100).values():
        assert drafts.work is not None
        assert drafts.work.num_drafts > 0
        assert drafts.work.least_chance == 0.0
