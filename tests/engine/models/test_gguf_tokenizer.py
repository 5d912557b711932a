"""Ids of a GGUF file's tokenizer: those of the tokenizer it was made of, or a refusal."""

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
from headrace.engine.tokenizer import Chat, ChatMessage
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, IM_END_ID, IM_START_ID, tiny_tokenizer


def tokenizer_of(folder: Path, **metadata: Any) -> HFTokenizer:
    out = folder / "converted"
    out.mkdir(parents=True)
    convert_gguf(write_tiny_gguf(folder / "tiny.gguf", **metadata), out)
    return load_tokenizer(out)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("smollm"))


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60) | st.text(alphabet="a 19.\n½²١", max_size=40)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_equal_those_of_the_tokenizer_that_the_file_was_made_of(smollm: HFTokenizer, text: str) -> None:
    assert smollm.encode(text) == tiny_tokenizer().backend_tokenizer.encode(text).ids
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_each_digit_stands_apart_from_its_neighbours_and_from_the_spaces_before_it(
    smollm: HFTokenizer,
) -> None:
    assert smollm.spellings(smollm.encode("a 12  345")) == ["a", "Ġ", "1", "2", "ĠĠ", "3", "4", "5"]


@pytest.fixture(scope="module")
def gpt4o(tmp_path_factory: pytest.TempPathFactory) -> tuple[HFTokenizer, PreTrainedTokenizerFast]:
    """Ours and transformers' reading of one file."""
    folder = tmp_path_factory.mktemp("gpt4o")
    ours = tokenizer_of(folder, pre="gpt-4o")
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.gguf")
    assert isinstance(theirs, PreTrainedTokenizerFast)
    return ours, theirs


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
    | st.text(alphabet="aBÀé's/\n 12", max_size=40)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_of_a_vocabulary_cut_like_gpt_4os_equal_those_of_transformers(
    gpt4o: tuple[HFTokenizer, PreTrainedTokenizerFast], text: str
) -> None:
    ours, theirs = gpt4o
    assert ours.encode(text) == theirs.encode(text)


def test_another_pre_tokenizer_cuts_differently(tmp_path: Path) -> None:
    gpt2 = tokenizer_of(tmp_path, pre="gpt-2")
    # GPT-2 leaves the last space to the digit, so the two never merge.
    assert gpt2.spellings(gpt2.encode("a  3")) == ["a", "Ġ", "Ġ", "3"]


@pytest.mark.parametrize("name", ["deepseek-llm", "default", "smol"])
def test_an_unknown_pre_tokenizer_is_refused_and_not_guessed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_of(tmp_path, pre=name)
    assert repr(name) in str(caught.value)
    assert "dbrx, gpt-2, gpt-4o, llama-bpe, qwen2, smollm" in str(caught.value)


def test_a_file_that_names_no_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="the pre-tokenizer 'default' is not known"):
        tokenizer_of(tmp_path, pre=None)


def test_another_tokenizer_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'t5' is not supported; supported: gpt2 .*, llama"):
        tokenizer_of(tmp_path, tokenizer_model="t5")


@pytest.mark.parametrize(
    ("pre", "add_bos", "has_bos"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_raw_text_begins_with_bos_where_the_file_or_its_pre_tokenizer_says_so(
    pre: str, add_bos: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    ids = tokenizer_of(tmp_path, pre=pre, add_bos=add_bos).encode("hi")
    assert ids.count(IM_START_ID) == (1 if has_bos else 0)
    assert (ids[0] == IM_START_ID) is has_bos


def test_control_tokens_are_special_and_found_whole(smollm: HFTokenizer) -> None:
    ids = smollm.encode("a<|im_end|> b")
    assert ids.count(IM_END_ID) == 1
    assert smollm.decode(ids) == "a b"
    assert smollm.eos_token_ids == {IM_END_ID}


def test_the_chat_template_comes_along(smollm: HFTokenizer, tmp_path: Path) -> None:
    chat = Chat((ChatMessage("user", "What is a mill?"),))
    assert smollm.render_chat(chat) == HFTokenizer(tiny_tokenizer(chat_template=CHAT_TEMPLATE)).render_chat(
        chat
    )
    assert not tokenizer_of(tmp_path, chat_template=None).has_chat_template


# ---- metadata that contradicts itself --------------------------------------------------------------


def metadata_with(**changes: Any) -> JsonFields:
    """Metadata of a three-letter vocabulary, as the file's fields; a change to None removes the field."""
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<end>", "a", "b", "ab"],
        "token_type": [3, 1, 1, 1],
        "merges": ["a b"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    fields.update(changes)
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}
    return JsonFields(named, "tiny.gguf")


def test_the_smallest_metadata_makes_a_tokenizer(tmp_path: Path) -> None:
    write_gguf_tokenizer(metadata_with(), tmp_path)
    assert load_tokenizer(tmp_path).encode("aba<end>") == [3, 1, 0]


def test_an_end_token_that_the_file_asks_for_is_added_to_raw_text_alone(tmp_path: Path) -> None:
    write_gguf_tokenizer(metadata_with(add_eos_token=True), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [3, 0]
    assert tokenizer.encode_chat("ab") == [3]


def test_user_defined_tokens_are_found_whole_and_stay_in_the_text(tmp_path: Path) -> None:
    metadata = metadata_with(tokens=["<end>", "a", "b", "a  b"], merges=[], token_type=[3, 1, 1, 4])
    write_gguf_tokenizer(metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("aa  bb") == [1, 3, 2]
    assert tokenizer.decode([1, 3, 2]) == "aa  bb"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens is missing or empty"),
        ({"tokens": ["<end>", "a", "b", "a"]}, "holds 'a' twice"),
        ({"merges": ["ab"]}, "holds 'ab', which is no pair"),
        ({"merges": ["a b c"]}, "holds 'a b c', which is no pair"),
        ({"merges": ["a c"]}, "merges"),
        ({"token_type": [3, 1]}, "token_type has 2 entries for 4 tokens"),
        ({"bos_token_id": 4}, "bos_token_id is 4: there are only 4 tokens"),
        ({"add_space_prefix": True}, "add_space_prefix is not supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        write_gguf_tokenizer(metadata_with(**changes), tmp_path)
    assert words in str(caught.value)
    assert "tiny.gguf" in str(caught.value)
