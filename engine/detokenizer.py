"""Text of a growing list of token ids, delta by delta."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """Turns ids into text as they come. What was handed out is never taken back.

    The joined deltas, `flush` included, equal the tokenizer's decode of all ids at once. A tail that ends
    inside a character is held back until the character is whole, or until `flush`.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # A window over the ids: `_window[:_num_told]` gives `_told`, which is out already and stands there
        # only because the text of an id may depend on the one before it.
        self._window: list[int] = []
        self._num_told = 0
        self._told = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids, get the text that is certain now."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if len(text) <= len(self._told) or text.endswith(_REPLACEMENT):
            return ""
        delta = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return delta

    def flush(self) -> str:
        """Get what is held back: no more ids follow."""
        text = self._decode(self._window)
        delta = text[len(self._told) :]
        self._told, self._num_told = text, len(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
