"""Vocabularies of pieces that fall back to bytes: a leading space is dropped, bytes are joined run by run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from headrace.engine.detokenizer import IncrementalDetokenizer
from tests.support.fake_runner import FakeTokenizer

PIECES = ["▁", "▁▁", "\n", "a", "b", "▁a", "ab", "e", "\u0301", "é", "日", "日本", "▁日", "🦀", "<0x4"]
FIRST_BYTE, FIRST_PIECE = 3, 3 + 256


@cache
def piece_tokenizer() -> Tokenizer:
    spellings = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {spelling: token_id for token_id, spelling in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


class PieceTokenizer(FakeTokenizer):
    """A Llama 2 kind of vocabulary."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return piece_tokenizer().decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return piece_tokenizer().encode(text, add_special_tokens=add_special_tokens).ids

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> None:
        return None

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        return [piece_tokenizer().id_to_token(token_id) or "" for token_id in token_ids]


def bytes_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def ids_of(*spellings: str) -> list[int]:
    vocab = piece_tokenizer().get_vocab()
    return [vocab[spelling] for spelling in spellings]


runs = st.one_of(
    st.lists(st.integers(FIRST_BYTE, FIRST_PIECE - 1), min_size=1, max_size=4),
    st.sampled_from(["é", "日", "🦀", " a"]).map(bytes_of),
    st.lists(st.sampled_from([1, 2, *range(FIRST_PIECE, FIRST_PIECE + len(PIECES))]), min_size=1, max_size=3),
)


@given(st.lists(runs, max_size=6), st.booleans(), st.data())
def test_joined_deltas_equal_the_whole_decode(runs_of_ids, skip, data):
    token_ids = [token_id for run in runs_of_ids for token_id in run]
    tokenizer = PieceTokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas, rest = [], token_ids
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        deltas.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(st.lists(runs, max_size=6))
def test_where_the_first_space_is_kept_the_deltas_are_what_the_tokens_add_to_a_text(runs_of_ids):
    token_ids = [token_id for run in runs_of_ids for token_id in run]
    detokenizer = IncrementalDetokenizer(PieceTokenizer(), keeps_first_space=True)
    deltas = [detokenizer.push([token_id]) for token_id in token_ids]
    behind = piece_tokenizer().decode([*ids_of("b"), *token_ids], skip_special_tokens=True)
    assert "b" + "".join(deltas) + detokenizer.flush() == behind


@pytest.mark.parametrize("keeps", [False, True])
def test_a_first_space_is_told_where_it_is_kept(keeps):
    detokenizer = IncrementalDetokenizer(PieceTokenizer(), keeps_first_space=keeps)
    assert detokenizer.push(ids_of("▁a", "▁a")) + detokenizer.flush() == (" a a" if keeps else "a a")


@pytest.mark.parametrize(
    ("token_ids", "deltas"),
    [
        (ids_of("▁a", "▁a", "b"), ["a", " a", "b"]),
        ([*bytes_of("🦀"), *ids_of("a")], ["", "", "", "", "🦀a"]),
        (
            [*bytes_of("é"), FIRST_BYTE + 0x80, *ids_of("a")],
            ["", "", "", "\N{REPLACEMENT CHARACTER}" * 3 + "a"],
        ),
        ([*bytes_of("é")[:1], *ids_of("</s>"), *bytes_of("é")[1:], *ids_of("b")], ["", "", "", "éb"]),
    ],
)
def test_a_run_of_bytes_is_told_when_it_is_over(token_ids, deltas):
    detokenizer = IncrementalDetokenizer(PieceTokenizer())
    assert [detokenizer.push([token_id]) for token_id in token_ids] == deltas
    assert detokenizer.flush() == ""
