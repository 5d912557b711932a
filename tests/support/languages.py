"""Small finite languages: as a regular expression, and as all of their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

MAX_TEXTS = 300


@dataclass(frozen=True)
class Language:
    """An expression and the texts that it matches, in bytes."""

    regex: str
    texts: frozenset[bytes]

    def allowed(self, tokens: Sequence[bytes], written: bytes) -> set[int]:
        """Ids of the tokens behind which some text of the language can still come about, tried one by one."""
        return {
            token_id
            for token_id, token in enumerate(tokens)
            if token and any(text.startswith(written + token) for text in self.texts)
        }


def literal(text: str) -> Language:
    """The text itself."""
    return Language(re.escape(text), frozenset({text.encode()}))


def joined(one: Language, other: Language) -> Language:
    """Each text of the one before each of the other."""
    texts = frozenset(a + b for a in one.texts for b in other.texts)
    return Language(f"(?:{one.regex})(?:{other.regex})", texts)


def either(one: Language, other: Language) -> Language:
    """Texts of both."""
    return Language(f"(?:{one.regex}|{other.regex})", one.texts | other.texts)


def repeated(one: Language, least: int, most: int) -> Language:
    """Between `least` and `most` texts of the language, one behind the other."""
    texts, run = set[bytes](), frozenset({b""})
    for num in range(most + 1):
        if num >= least:
            texts |= run
        run = frozenset(a + b for a in run for b in one.texts)
    return Language(f"(?:{one.regex}){{{least},{most}}}", frozenset(texts))


_LITERALS = st.text("abü", min_size=1, max_size=2).map(literal)

LANGUAGES = st.recursive(
    _LITERALS,
    lambda inner: st.one_of(
        st.builds(joined, inner, inner),
        st.builds(either, inner, inner),
        st.builds(
            lambda one, bounds: repeated(one, *sorted(bounds)),
            inner,
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
        ),
    ),
    max_leaves=5,
).filter(lambda language: len(language.texts) <= MAX_TEXTS and language.texts != {b""})
"""Languages over a, b and ü, whose two bytes are tokens of their own here and there."""

VOCABULARIES = st.lists(
    st.one_of(
        st.text("abü", min_size=1, max_size=3).map(str.encode),
        st.sampled_from([b"", b"\xc3", b"\xbc", b"\xbca", b"a\xc3", b"x", b"\xff"]),
    ),
    max_size=12,
).map(lambda more: [b"a", b"b", b"\xc3", b"\xbc", *more])
"""Tokens that can spell every text, among them equal ones, empty ones, and pieces of characters."""
