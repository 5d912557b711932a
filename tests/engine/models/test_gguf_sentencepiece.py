"""SentencePiece vocabularies out of GGUF files: transformers' ids, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.gguf import convert_gguf
from headrace.engine.models.gguf_tokenizer import write_gguf_tokenizer
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.tokenizer import HFTokenizer, load_tokenizer
from tests.support.tiny_gguf import sentencepiece_metadata, write_sentencepiece_gguf

BOS, EOS = 2, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    write_sentencepiece_gguf(folder / "tiny.gguf")
    (folder / "converted").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "converted")
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> HFTokenizer:
    return load_tokenizer(folder / "converted")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@given(st.text(alphabet="aehilmrstw .\n<b>é水1\u2581", max_size=40) | st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_equal_those_of_transformers(
    ours: HFTokenizer, theirs: PreTrainedTokenizerFast, text: str
) -> None:
    # Four spaces or more: transformers cuts them its own way, and here SentencePiece's is taken.
    text = text.replace("\u2581", " ")
    while "    " in text:
        text = text.replace("    ", " ")
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ids[0] == BOS
    assert ours.decode(ids[1:], skip_special_tokens=False) == text


def test_runs_of_spaces_are_the_longest_tokens_from_the_left_as_in_sentencepiece(ours: HFTokenizer) -> None:
    assert ours.spellings(ours.encode_chat("a       b")) == ["a", "▁▁▁", "▁▁▁", "▁", "b"]


def test_what_the_vocabulary_lacks_is_spelt_in_bytes(ours: HFTokenizer) -> None:
    assert ours.spellings(ours.encode_chat("€")) == ["<0xE2>", "<0x82>", "<0xAC>"]


def test_nothing_is_put_before_a_text_but_its_first_token(ours: HFTokenizer) -> None:
    assert ours.spellings(ours.encode("a"))[1:] == ["a"]
    assert ours.encode_chat("a") == ours.encode("a")[1:]
    assert ours.eos_token_ids == {EOS}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"add_space_prefix": True}, "puts a space before a text"),
        ({"add_space_prefix": None}, "puts a space before a text"),
        ({"scores": None}, "scores has 0 entries"),
        ({"scores": "rising"}, "does not fall from token to token"),
        ({"token_type": None}, "token_type is missing"),
        ({"unknown_token_id": None}, "unknown_token_id is missing"),
        ({"tokens": "no byte 0x41"}, "255 of the 256 byte tokens"),
        ({"tokens": "no letter e"}, "'e' is part of tokens and no token itself"),
    ],
)
def test_what_leaves_ids_uncertain_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    fields = sentencepiece_metadata()
    match changes:
        case {"scores": "rising"}:
            changes = {"scores": fields["scores"][::-1]}
        case {"tokens": "no byte 0x41"}:
            changes = {"tokens": ["ŧŧ" if token == "<0x41>" else token for token in fields["tokens"]]}
        case {"tokens": "no letter e"}:
            changes = {"tokens": ["ŧ" if token == "e" else token for token in fields["tokens"]]}
    fields.update(changes)
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    with pytest.raises(ModelLoadError) as caught:
        write_gguf_tokenizer(JsonFields(named, "tiny.gguf"), tmp_path)
    assert words in str(caught.value)
