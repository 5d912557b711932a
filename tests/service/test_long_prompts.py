"""A prompt that can't possibly fit costs next to nothing; one that might is never refused for its looks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.engine import Chat, ChatMessage, InvalidRequest
from headrace.service.convert import Prompt
from headrace.service.limits import Limits
from headrace.service.long_prompts import refuse_hopeless
from headrace.service.text import TextWorkers
from tests.support.fake_runner import FakeTokenizer

LONG = "The wheel turns. " * 100_000


class CountingTokenizer(FakeTokenizer):
    """A token for so many characters; keeps the lengths of the texts that it was given.

    Args:
        token_len: characters.
    """

    def __init__(self, token_len: int = 1) -> None:
        super().__init__()
        self.token_len = token_len
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode("x" * (len(text) // self.token_len), add_special_tokens=add_special_tokens)


@pytest.fixture
def workers() -> Iterator[TextWorkers]:
    made = TextWorkers(1, Limits())
    yield made
    made.close()


@pytest.mark.parametrize("prompt", [LONG, Chat((ChatMessage("user", LONG),))], ids=["text", "chat"])
async def test_what_has_far_too_many_tokens_is_never_encoded_whole(
    workers: TextWorkers, prompt: Prompt
) -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(InvalidRequest, match=r"prompt: .*more than 16384 tokens; .*holds 8192 tokens"):
        await workers.encode_prompt(tokenizer, prompt, 8192)
    assert sum(tokenizer.lengths) < 50_000


@pytest.mark.parametrize("token_len", [17, 40, 200])
def test_a_long_text_of_few_tokens_passes(token_len: int) -> None:
    # Its tokens are up to twice as many as fit: of those the engine tells exactly.
    refuse_hopeless("x" * (2 * 8192 * token_len), 8192, CountingTokenizer(token_len))


def test_one_token_more_than_the_margin_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        refuse_hopeless("x" * (2 * 100 * 20 + 20), 100, CountingTokenizer(20))


def test_a_text_that_looks_as_if_it_fits_is_encoded_once() -> None:
    tokenizer = CountingTokenizer()
    refuse_hopeless("x" * 16 * 8192, 8192, tokenizer)
    assert tokenizer.lengths == []
