from __future__ import annotations

import pytest

from headrace.engine import TokenEvent
from headrace.service.logprobs import MAX_TOLD_AT_ONCE, logprobs_to_proto, pieces
from tests.support.fake_runner import EOS, FakeTokenizer
from tests.support.indexed_runner import logprobs_of


def event_of(num_prompt: int, num_made: int, num_top: int) -> TokenEvent:
    """So many of the prompt's logprobs, and so many tokens with theirs."""
    return TokenEvent(
        index=2,
        token_ids=tuple(range(num_made)),
        text="x" * num_made,
        logprobs=tuple(logprobs_of(i, num_top) for i in range(num_made)),
        prompt_logprobs=tuple(logprobs_of(i, num_top) for i in range(num_prompt)),
    )


def size_of(event: TokenEvent) -> int:
    return sum(1 + len(entry.top) for entry in event.logprobs + event.prompt_logprobs)


FEW, MANY = 10, MAX_TOLD_AT_ONCE // 3


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("num_made", [0, FEW, MANY])
@pytest.mark.parametrize("num_prompt", [0, FEW, MANY])
def test_pieces_are_small_in_order_and_together_the_whole(
    num_prompt: int, num_made: int, num_top: int
) -> None:
    event = event_of(num_prompt, num_made, num_top)
    cut = list(pieces(event))
    assert TokenEvent.joined(cut) == event
    assert all(size_of(piece) <= MAX_TOLD_AT_ONCE for piece in cut)
    assert (len(cut) == 1) == (size_of(event) <= MAX_TOLD_AT_ONCE)
    # The prompt comes before what follows it.
    told = [bool(piece.prompt_logprobs) for piece in cut]
    assert told == sorted(told, reverse=True)


def test_an_event_without_logprobs_is_left_as_it_is() -> None:
    event = TokenEvent(0, tuple(range(2 * MAX_TOLD_AT_ONCE)), "x")
    assert list(pieces(event)) == [event]


def test_a_token_is_told_by_its_bytes_special_or_broken_ones_too() -> None:
    told = logprobs_to_proto([logprobs_of(i, 0) for i in (97, 0xC3, EOS)], FakeTokenizer())
    assert [entry.chosen.text for entry in told] == ["a", "\N{REPLACEMENT CHARACTER}", "</s>"]


def test_where_the_vocabulary_spells_no_bytes_its_spelling_is_told() -> None:
    tokenizer = FakeTokenizer(is_byte_level=False)
    (told,) = logprobs_to_proto([logprobs_of(97, 2)], tokenizer)
    assert [told.chosen.text, *(top.text for top in told.top)] == tokenizer.spellings([97, 0, 1])
