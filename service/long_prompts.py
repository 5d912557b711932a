"""A text that can't possibly fit in the context is refused before it is encoded whole.

To encode a text takes a hundred times its size in memory, and a second or so for each megabyte. Its pieces
take little, and together they have about as many tokens as the whole: only at their ends may it be more.
"""

from __future__ import annotations

from headrace.engine import InvalidRequest, Tokenizer

_PIECE_LEN = 16_384
_UNSUSPICIOUS_LEN = 16
"""Characters per token that fits: of a text without more of them nothing is said before it is encoded."""
_MARGIN = 2
"""How many times as many tokens as fit the pieces must have: much more than their ends can make of it."""


def refuse_hopeless(text: str, most_tokens: int, tokenizer: Tokenizer, field: str = "prompt") -> None:
    """Check a prompt's text. What passes may still be too long; the engine counts its tokens.

    Args:
        most_tokens: that a prompt may have.
        field: what the request calls it.

    Raises:
        InvalidRequest: it has far more.
    """
    if len(text) <= _UNSUSPICIOUS_LEN * most_tokens:
        return
    num_tokens = 0
    for first in range(0, len(text), _PIECE_LEN):
        num_tokens += len(tokenizer.encode(text[first : first + _PIECE_LEN], add_special_tokens=False))
        if num_tokens > _MARGIN * most_tokens:
            raise InvalidRequest.of(
                field,
                f"is {len(text)} characters long and of more than {_MARGIN * most_tokens} tokens; the "
                f"model's context, or the whole KV pool of this server, holds {most_tokens} tokens",
            )
