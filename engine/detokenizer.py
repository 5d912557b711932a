"""Text of a growing list of token ids, delta by delta."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from headrace.engine.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class IncrementalDetokenizer:
    """Turns ids into text as they come. What was handed out is never taken back.

    The joined deltas, `flush` included, equal the tokenizer's decode of all ids at once. A tail that ends
    inside a character is held back until the character is whole, or until `flush`. So is a run of byte tokens
    in a vocabulary that falls back to them: one wrong byte turns the whole run into U+FFFD.

    Args:
        tokenizer: the model's.
        skip_special_tokens: whether special tokens are left out.
        keeps_first_space: whether a space at the beginning is told although the tokenizer's decode would drop
            it, as that of a vocabulary that puts a space before every text does. Then the deltas are what the
            tokens spell.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, keeps_first_space: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # A byte-level vocabulary spells bytes, whatever stands beside a token: they are decoded as they come.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # In any other the text of an id may depend on the one before it, so a window over the ids is decoded
        # again and again: `_window[:_num_told]` gives `_told`, which is out already.
        self._window: list[int] = []
        self._num_told = 0
        self._told = ""
        self._is_in_byte_run = False
        if keeps_first_space and not _spells_bytes(tokenizer):
            # Behind a letter no space is the first one.
            self._window = tokenizer.encode("a", add_special_tokens=False)[-1:]
            self._num_told, self._told = len(self._window), self._decode(self._window)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids, get the text that is certain now."""
        text = ""
        for token_id in token_ids:
            spelled = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
            if spelled is None:
                self._take_into_window(token_id)
            else:
                text += self._utf8.decode(spelled)
        return text + self._decode_window()

    def flush(self) -> str:
        """Get what is held back: no more ids follow."""
        text = self._decode(self._window)
        delta = text[len(self._told) :]
        self._told, self._num_told = text, len(self._window)
        held = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return held + delta

    def _take_into_window(self, token_id: int) -> None:
        self._window.append(token_id)
        is_byte = _BYTE.fullmatch(self._tokenizer.spellings((token_id,))[0]) is not None
        # A token that is left out stands between no two bytes: the run goes on behind it.
        self._is_in_byte_run = is_byte or (self._is_in_byte_run and not self._decode([token_id]))

    def _decode_window(self) -> str:
        if len(self._window) == self._num_told or self._is_in_byte_run:
            return ""
        text = self._decode(self._window)
        if len(text) <= len(self._told) or text.endswith(_REPLACEMENT):
            return ""
        delta = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _spells_bytes(tokenizer: Tokenizer) -> bool:
    """Whether the bytes of every id are known: then no decode drops anything."""
    return tokenizer.token_bytes(0) is not None
