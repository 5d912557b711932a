from __future__ import annotations

import pytest

from headrace.engine import ConfigError
from headrace.engine.speculative.vocabulary import num_common_ids
from tests.support.fake_runner import VOCAB_SIZE, FakeTokenizer


class Renamed(FakeTokenizer):
    """A tokenizer of which some tokens are others, and some ids unknown."""

    def __init__(self, spellings):
        super().__init__()
        self._spellings = spellings

    def spellings(self, token_ids):
        usual = super().spellings(token_ids)
        return [self._spellings.get(i, text) for i, text in zip(token_ids, usual, strict=True)]


@pytest.mark.parametrize(("ours", "theirs"), [(258, 258), (258, 300), (300, 258), (258, 200)])
def test_sizes_may_differ_by_padding(ours, theirs):
    padding = dict.fromkeys(range(VOCAB_SIZE, 400), "")
    assert num_common_ids(Renamed(padding), ours, Renamed(padding), theirs, "d") == min(
        ours, theirs, VOCAB_SIZE
    )


def test_the_first_difference_is_named():
    with pytest.raises(
        ConfigError, match="another vocabulary: token 65 is 'B' there and '<0x41>' in the model"
    ):
        num_common_ids(FakeTokenizer(), 258, Renamed({65: "B", 66: "A"}), 258, "d")


def test_tokens_that_one_alone_knows_are_not_common():
    few = Renamed(dict.fromkeys(range(100, 258), ""))
    assert num_common_ids(FakeTokenizer(), 258, few, 258, "d") == 100


def test_nothing_in_common_is_refused():
    with pytest.raises(ConfigError, match="no token in common"):
        num_common_ids(FakeTokenizer(), 258, Renamed(dict.fromkeys(range(258), "")), 258, "d")
