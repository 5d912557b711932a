from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.speculative.prompt_lookup import RUN_LENS, LookupIndex, PromptLookup
from tests.support.sequences import make_sequence

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def brute_force(token_ids: list[int]) -> int | None:
    """Where the last tokens stood before, with the longest run that was looked up; the last such place."""
    for run_len in RUN_LENS:
        run = token_ids[len(token_ids) - run_len :]
        if len(run) == run_len:
            for start in range(len(token_ids) - run_len - 1, -1, -1):
                if token_ids[start : start + run_len] == run:
                    return start + run_len
    return None


@given(texts)
def test_what_is_found_is_what_followed_the_same_tokens_last(text: list[int]) -> None:
    index = LookupIndex(text)
    index.read_ahead(len(text))
    source = brute_force(text)

    assert index.find() == (source is not None)

    if source is not None:
        followers = text[source:]
        assert list(index.guess(3)) == [followers[i % len(followers)] for i in range(3)]


@given(texts, st.integers(0, 60))
def test_reading_ahead_and_reading_token_by_token_find_as_much(text: list[int], cut: int) -> None:
    ahead, one_by_one = LookupIndex(text), LookupIndex(text)
    ahead.read_ahead(min(cut, len(text)))
    ahead.read()
    one_by_one.read()
    assert ahead.find() == one_by_one.find()


@given(texts)
def test_a_copy_that_goes_well_is_followed_and_its_length_is_told(text: list[int]) -> None:
    whole = [9, 8, *text, 7, 6, 5, 9, 8]
    index = LookupIndex(whole)
    index.read_ahead(len(whole))
    assert index.find()
    assert list(index.guess(len(text) + 3)) == [*text, 7, 6, 5]
    for i, token_id in enumerate(text):
        whole.append(token_id)
        assert index.read() == [(2 + i, True)]
    whole.append(11)
    assert index.read() == [(2 + len(text), False)]
    assert not index.find()


def test_a_text_that_repeats_itself_is_guessed_to_go_on_so() -> None:
    index = LookupIndex([1, 2, 3] * 4)
    index.read()
    assert index.guess(7) == (1, 2, 3, 1, 2, 3, 1)


def test_chances_are_learned_by_the_length_of_the_match_without_any_judge() -> None:
    """Nobody verifies anything: that the text went on as guessed is seen in the text."""
    proposer = PromptLookup()
    sequence = make_sequence(prompt_len=1)
    sequence.token_ids[:] = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    before = after = offered = proposer.offer(sequence, 4)
    assert all(0 < chance < 1 for chance in before)
    assert list(before) == sorted(before)
    for _ in range(40):
        sequence.token_ids += [1, 2, 3, 4, 5, 6, 7, 8]
        after = proposer.offer(sequence, 4)
    assert min(after) > 0.95
    chaos = random.Random(3)
    for _ in range(400):
        sequence.token_ids.append(chaos.randrange(3))
        offered = proposer.offer(sequence, 4)
    assert not offered or offered[0] < 0.5


def test_a_very_long_prompt_is_indexed_in_pieces() -> None:
    proposer = PromptLookup()
    sequence = make_sequence(prompt_len=20_000)
    sequence.token_ids.append(sequence.token_ids[-97])
    sequence.num_computed_tokens = 20_000
    tries = 0
    while not proposer.offer(sequence, 2):
        tries += 1
        assert tries < 5
    assert tries == 2


def test_what_is_over_is_forgotten() -> None:
    proposer = PromptLookup()
    sequence = make_sequence(prompt_len=2)
    sequence.token_ids += [1, 2, 3, 1, 2, 3]
    assert proposer.offer(sequence, 1)
    proposer.forget(sequence)
    sequence.token_ids[2:] = [50, 60]
    assert not proposer.offer(sequence, 1)
