from __future__ import annotations

import pytest

from headrace.engine import ConfigError, Speculation, SpeculationConfig, SpeculationParams
from headrace.engine.config import CacheLayout
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence
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
        self.sequence = decoding(max_tokens=5000)
        self.kv.allocate_slots(self.sequence.sequence_id, 2000)
        self.speculator.begin(self.sequence)

    def step(self, *, is_right: bool) -> int:
        """How many drafts are planned; the sequence then has one token more, and those that are right."""
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
        self.speculator.observe(self.sequence, row, RowResult((9,) * (kept + 1), num_draft_tokens=length))
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
