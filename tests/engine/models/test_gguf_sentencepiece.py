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


# ---- vocabularies that put a space before a text ----------------------------------------------------

# SentencePiece's own ids, of a model file made from the same pieces and scores.
SENTENCEPIECE_IDS = {
    "The mill stands": [379, 388, 545],
    "  two spaces": [316, 316, 323, 305, 298, 334, 299, 343, 332],
    " one space": [316, 498, 334, 299, 343, 289],
    "a\n\tb": [322, 14, 13, 286],
    "x é 水車 🌊": [316, 124, 316, 199, 173, 558, 466],
    "": [],
    "wheel  wheel ": [335, 316, 335, 316],
}


def prefixed(folder: Path, architecture: str = "llama", **changes: Any) -> HFTokenizer:
    write_sentencepiece_gguf(folder / "tiny.gguf", architecture, **changes)
    (folder / "converted").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "converted")
    return load_tokenizer(folder / "converted")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return prefixed(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTokenizer, PreTrainedTokenizerFast]:
    """Ours and transformers' reading of one file."""
    folder = tmp_path_factory.mktemp("phi3")
    ours = prefixed(folder, "phi3")
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
    assert isinstance(theirs, PreTrainedTokenizerFast)
    return ours, theirs


@pytest.mark.parametrize("text", SENTENCEPIECE_IDS)
def test_ids_of_a_prefixed_text_equal_sentencepieces(llama: HFTokenizer, text: str) -> None:
    assert llama.encode(text) == [BOS, *SENTENCEPIECE_IDS[text]]
    assert llama.decode(llama.encode(text)) == text


@given(st.text(alphabet="aehilmrstw .\n<b>é水1", max_size=40) | st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_of_a_prefixed_text_equal_those_of_transformers(
    phi3: tuple[HFTokenizer, PreTrainedTokenizerFast], llama: HFTokenizer, text: str
) -> None:
    ours, theirs = phi3
    text = text.replace("\u2581", " ")
    assert ours.encode(text) == theirs.encode(text) == llama.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_what_follows_a_special_token_begins_like_a_text(llama: HFTokenizer) -> None:
    turn = llama.encode_chat("The")
    assert llama.spellings(turn) == ["▁The"]
    assert llama.encode_chat("<bos>The<eos><bos>The") == [BOS, *turn, EOS, BOS, *turn]


def test_phi_3s_special_tokens_swallow_the_white_space_behind_them(
    phi3: tuple[HFTokenizer, PreTrainedTokenizerFast], llama: HFTokenizer
) -> None:
    ours, _ = phi3
    assert ours.spellings(ours.encode_chat("<eos>\n The")) == ["<eos>", "▁The"]
    assert llama.spellings(llama.encode_chat("<eos>\n The")) == ["<eos>", "▁", "<0x0A>", "▁The"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [BOS, 379]),
        ({"add_bos_token": False}, [379]),
        ({"add_eos_token": True}, [BOS, 379, EOS]),
        ({"add_bos_token": False, "add_eos_token": True}, [379, EOS]),
    ],
    ids=str,
)
def test_a_text_is_put_between_the_tokens_that_the_file_says(
    flags: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    tokenizer = prefixed(tmp_path, **flags)
    assert tokenizer.encode("The") == expected
    assert tokenizer.encode_chat("The") == [379]


def test_a_file_that_does_not_speak_of_the_prefix_has_it(tmp_path: Path) -> None:
    fields = sentencepiece_metadata(has_prefix=True)
    del fields["add_space_prefix"], fields["add_bos_token"]
    write_gguf_tokenizer(
        JsonFields({f"tokenizer.ggml.{key}": value for key, value in fields.items()}, "tiny.gguf"), tmp_path
    )
    assert load_tokenizer(tmp_path).encode("The") == [BOS, 379]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
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
