"""Logprobs as messages, many of them piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headrace.engine import TokenEvent, Tokenizer, TokenLogprob, TokenLogprobs
from headrace.v1 import generation_pb2 as pb

MAX_TOLD_AT_ONCE = 4096
"""Logprobs of one message: it stays far below the longest one, and is made within some milliseconds."""


def pieces(event: TokenEvent) -> Iterable[TokenEvent]:
    """`event` as events of at most `MAX_TOLD_AT_ONCE` logprobs each; most often it is the only one."""
    if _num_logprobs(event.prompt_logprobs) + _num_logprobs(event.logprobs) <= MAX_TOLD_AT_ONCE:
        return (event,)
    return _cut(event)


def _cut(event: TokenEvent) -> Iterator[TokenEvent]:
    for told in _runs(event.prompt_logprobs):
        yield TokenEvent(event.index, (), "", prompt_logprobs=told)
    first, *others = [*_runs(event.logprobs)] or [()]
    if event.token_ids or event.text or first:
        yield event._replace(logprobs=first, prompt_logprobs=())
    for told in others:
        yield TokenEvent(event.index, (), "", told)


def logprobs_to_proto(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> Iterator[pb.TokenLogprobs]:
    """How likely the token at each place was, and which ones were likeliest there."""
    for entry in entries:
        yield pb.TokenLogprobs(
            chosen=_to_proto(entry.chosen, tokenizer), top=[_to_proto(top, tokenizer) for top in entry.top]
        )


def _to_proto(entry: TokenLogprob, tokenizer: Tokenizer) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        text=text_of(entry.token_id, tokenizer),
    )


def text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """A token alone: its bytes as text, or its spelling in a vocabulary that doesn't spell bytes."""
    spelled = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    return tokenizer.spellings((token_id,))[0] if spelled is None else spelled.decode(errors="replace")


def _num_logprobs(entries: Sequence[TokenLogprobs]) -> int:
    # All entries of one kind tell as many.
    return len(entries) * (1 + len(entries[0].top)) if entries else 0


def _runs(entries: tuple[TokenLogprobs, ...]) -> Iterator[tuple[TokenLogprobs, ...]]:
    if entries:
        length = max(1, MAX_TOLD_AT_ONCE // (1 + len(entries[0].top)))
        for first in range(0, len(entries), length):
            yield entries[first : first + length]
