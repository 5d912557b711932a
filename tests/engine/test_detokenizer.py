import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.detokenizer import IncrementalDetokenizer
from tests.support.fake_runner import BOS, EOS, FakeTokenizer

HARD_TEXTS = [
    "plain",
    " leading and trailing ",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 tone",
    "e\u0301 combining",
    "שלום",
    "tab\tnewline\n\n",
    "\N{REPLACEMENT CHARACTER} that was meant",
]


KINDS = pytest.mark.parametrize("is_byte_level", [True, False], ids=["byte-level", "other"])


@KINDS
@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_joined_deltas_are_the_text(text, stride, is_byte_level):
    token_ids = list(text.encode())
    detokenizer = IncrementalDetokenizer(FakeTokenizer(is_byte_level=is_byte_level))
    deltas = [detokenizer.push(token_ids[i : i + stride]) for i in range(0, len(token_ids), stride)]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == text


@given(st.lists(st.integers(0, EOS)), st.booleans(), st.booleans(), st.data())
def test_joined_deltas_equal_the_whole_decode_whatever_the_bytes_and_the_cuts(token_ids, skip, kind, data):
    tokenizer = FakeTokenizer(is_byte_level=kind)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    deltas, rest = [], token_ids
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        deltas.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@KINDS
def test_a_character_is_held_back_until_it_is_whole(is_byte_level):
    detokenizer = IncrementalDetokenizer(FakeTokenizer(is_byte_level=is_byte_level))
    assert [detokenizer.push([byte]) for byte in "a🦀b".encode()] == ["a", "", "", "", "🦀", "b"]
    assert detokenizer.flush() == ""


@KINDS
def test_a_character_cut_off_by_the_end_is_told_once(is_byte_level):
    detokenizer = IncrementalDetokenizer(FakeTokenizer(is_byte_level=is_byte_level))
    assert [detokenizer.push([byte]) for byte in "a🦀".encode()[:-1]] == ["a", "", "", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


@KINDS
@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "<s>ab</s>")])
def test_special_tokens_are_left_out_or_not(skip, text, is_byte_level):
    detokenizer = IncrementalDetokenizer(FakeTokenizer(is_byte_level=is_byte_level), skip_special_tokens=skip)
    deltas = [detokenizer.push([token_id]) for token_id in (BOS, *b"ab", EOS)]
    assert "".join([*deltas, detokenizer.flush()]) == text
