"""The tokenizer against the library it wraps, and the chat template in its sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.engine.config import EngineConfig, ModelConfig
from headrace.engine.errors import InvalidRequest, ModelLoadError, NoChatTemplate
from headrace.engine.loading import load_model
from headrace.engine.models.tokenizer import HFTokenizer, load_tokenizer
from headrace.engine.tokenizer import Chat, ChatMessage, Tool, ToolCall
from tests.support.model_files import edited_json
from tests.support.tiny_models import (
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    VOCAB_SIZE,
    tiny_tokenizer,
    write_tiny_llama,
)

TEXTS = [
    "",
    " ",
    "The wheel turns.",
    "In 1847  the old\twheel\n\nbroke,  didn't it?  ",
    "水車 and 🌊, ZWJ 👩‍👩‍👧, flag 🇨🇭, שלום",
    "a<|im_end|>b<|endoftext|> c",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def byte_level(chat_template: str | None = None) -> HFTokenizer:
    return HFTokenizer(tiny_tokenizer(chat_template=chat_template))


def adding_bos(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS before raw text."""
    tokenizer = tiny_tokenizer(chat_template=chat_template)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END_OF_TEXT_ID)]
    )
    return tokenizer


def chat_of(*contents: str, **settings: object) -> Chat:
    return Chat(messages=tuple(ChatMessage("user", content) for content in contents), **settings)  # type: ignore[arg-type]


# ---- text and ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_the_librarys(text: str, add_special_tokens: bool, tmp_path: Path) -> None:
    adding_bos().save_pretrained(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference(text, add_special_tokens=add_special_tokens).input_ids
    assert load_tokenizer(tmp_path).encode(text, add_special_tokens=add_special_tokens) == expected


def test_raw_text_gets_a_bos_only_where_the_tokenizer_adds_one() -> None:
    assert HFTokenizer(adding_bos()).encode("hi").count(END_OF_TEXT_ID) == 1
    assert byte_level().encode("hi").count(END_OF_TEXT_ID) == 0


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_text_equals_the_librarys_without_tidying(text: str, skip: bool) -> None:
    ids = byte_level().encode(text)
    reference = tiny_tokenizer()
    expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert byte_level().decode(ids, skip_special_tokens=skip) == expected


def test_a_long_prompt_is_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=32)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "The wheel turns as long as the channel is full, and the keeper opens the gate."
    assert loaded.decode(loaded.encode(text)) == text


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    tokenizer, text = byte_level(), "The wheel turns. " * 50_000
    began, ended = threading.Event(), threading.Event()

    def encode() -> None:
        began.set()
        tokenizer.encode(text)
        ended.set()

    encoding = threading.Thread(target=encode)
    encoding.start()
    began.wait()
    num_turns = 0
    while not ended.is_set():
        # Each wait gives the interpreter away, which a text that held it would not give back before its end.
        ended.wait(1e-3)
        num_turns += 1
    encoding.join()
    assert num_turns > 10


def test_spellings_are_the_vocabularys_and_empty_for_ids_without_one() -> None:
    tokenizer = byte_level()
    [space_wheel] = tokenizer.encode(" wheel")
    assert tokenizer.spellings([space_wheel, IM_END_ID, VOCAB_SIZE + 5]) == ["Ġwheel", "<|im_end|>", ""]


# ---- bytes -----------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40),
    st.booleans(),
)
def test_joined_bytes_decode_to_the_text_of_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    pieces = [tokenizer.token_bytes(token_id, skip_special_tokens=skip) for token_id in ids]
    joined = b"".join(piece for piece in pieces if piece is not None)
    assert None not in pieces
    assert joined.decode("utf-8", errors="replace") == tokenizer.decode(ids, skip_special_tokens=skip)


def test_an_added_token_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    library = tiny_tokenizer()
    library.add_tokens([AddedToken("mill pond 水", special=False)])
    tokenizer = HFTokenizer(library)
    [added] = tokenizer.encode("mill pond 水")
    assert tokenizer.token_bytes(added) == "mill pond 水".encode()
    assert tokenizer.decode([added]) == "mill pond 水"


def test_ids_without_a_spelling_and_skipped_special_tokens_have_no_bytes() -> None:
    tokenizer = byte_level()
    assert tokenizer.token_bytes(VOCAB_SIZE + 5) == b""
    assert tokenizer.token_bytes(IM_END_ID) == b""
    assert tokenizer.token_bytes(IM_END_ID, skip_special_tokens=False) == b"<|im_end|>"


def test_a_special_tokens_text_is_told_from_any_other() -> None:
    tokenizer = byte_level()
    assert tokenizer.special_token_id("<|im_end|>") == IM_END_ID
    for text in ("", "<|im_end|", " <|im_end|>", "a", "<|im_end|><|im_end|>"):
        assert tokenizer.special_token_id(text) is None


def test_other_vocabularies_say_that_their_bytes_are_not_known() -> None:
    words = Tokenizer(models.WordLevel({"mill": 0, "pond": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    assert tokenizer.token_bytes(0) is None


# ---- end ids ---------------------------------------------------------------------------------------


def test_the_tokenizers_end_id_is_told_in_both_forms_that_files_use(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_ids == {IM_END_ID}
    with edited_json(tmp_path / "tokenizer_config.json") as config:
        config["eos_token"] = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    assert load_tokenizer(tmp_path).eos_token_ids == {IM_START_ID}


def test_a_tokenizer_without_settings_declares_no_end_id_and_still_works(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.encode("The wheel 42") == byte_level().encode("The wheel 42")


# ---- chat ------------------------------------------------------------------------------------------


def test_a_chat_renders_and_encodes_as_the_library_does(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = (ChatMessage("system", "Be short."), ChatMessage("user", "What is a mill?"))
    plain = [{"role": message.role, "content": message.content} for message in messages]
    rendered = tokenizer.render_chat(Chat(messages))
    assert rendered == reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    expected = reference.apply_chat_template(
        plain, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_chat(rendered) == expected
    assert rendered.endswith("<|im_start|>assistant\n")


def test_the_generation_prompt_can_be_left_out() -> None:
    tokenizer = HFTokenizer(tiny_tokenizer())
    assert not tokenizer.render_chat(chat_of("hi", add_generation_prompt=False)).endswith("assistant\n")


def test_a_template_that_writes_bos_gives_exactly_one_where_the_tokenizer_adds_one_too() -> None:
    tokenizer = HFTokenizer(adding_bos("{{ bos_token }}{{ messages[0]['content'] }}"))
    assert tokenizer.encode_chat(tokenizer.render_chat(chat_of("hi"))).count(END_OF_TEXT_ID) == 1


def test_a_template_in_its_own_file_alone_is_found(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("file:{{ messages[0]['content'] }}")
    assert load_tokenizer(tmp_path).render_chat(chat_of("hi")) == "file:hi"


def test_of_several_templates_the_one_for_tools_serves_tools(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with edited_json(tmp_path / "tokenizer_config.json") as config:
        config["chat_template"] = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools:{{ tools[0]['function']['name'] }}"},
        ]
    tokenizer = load_tokenizer(tmp_path)
    tool = Tool("open_gate", "Opens the gate.", {"type": "object", "properties": {}})
    assert tokenizer.render_chat(chat_of("hi")) == "plain"
    assert tokenizer.render_chat(chat_of("hi", tools=(tool,))) == "tools:open_gate"


def test_a_template_sees_every_field_of_a_message_and_none_that_is_not_there() -> None:
    template = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    call = ToolCall("call-1", "open_gate", {"width": 3})
    messages = (
        ChatMessage("user", "hi", name="miller"),
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "done", tool_call_id="call-1"),
    )
    lines = byte_level(template).render_chat(Chat(messages)).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"role": "user", "content": "hi", "name": "miller"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "open_gate", "arguments": {"width": 3}},
                }
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "call-1"},
    ]


def test_without_a_template_chat_is_refused_and_raw_text_works() -> None:
    tokenizer = byte_level()
    assert not tokenizer.has_chat_template
    with pytest.raises(NoChatTemplate, match=r"chat_template\.jinja"):
        tokenizer.render_chat(chat_of("hi"))
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'].no_such.field }}",
        "{{ messages[7]['content'] + 1 }}",
        "{% for %}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_stops_is_the_senders_answer(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        byte_level(template).render_chat(chat_of("hi"))
    assert [violation.field for violation in caught.value.violations] == ["chat"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest):
        byte_level(template).render_chat(chat_of("hi"))
    assert list(tmp_path.iterdir()) == []


def test_variables_reach_the_template() -> None:
    tokenizer = byte_level("{{ 'think' if enable_thinking else 'answer' }}")
    assert tokenizer.render_chat(chat_of("hi", template_variables={"enable_thinking": True})) == "think"
    assert tokenizer.render_chat(chat_of("hi")) == "answer"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "tools", "eos_token", "conversations"]
)
def test_variables_cannot_steer_the_library(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        HFTokenizer(tiny_tokenizer()).render_chat(chat_of("hi", template_variables={name: "{{ 1 }}"}))


def test_special_tokens_spelt_in_a_message_become_special_as_in_the_library() -> None:
    tokenizer = HFTokenizer(tiny_tokenizer())
    ids = tokenizer.encode_chat(tokenizer.render_chat(chat_of("a<|im_end|>b")))
    assert ids.count(IM_END_ID) == 2


# ---- folders ---------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_class_that_the_folder_names_is_taken_at_its_word_and_gives_the_librarys_ids(
    tmp_path: Path,
) -> None:
    write_tiny_llama(tmp_path)
    for name in ("TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        with edited_json(tmp_path / "tokenizer_config.json") as config:
            config["tokenizer_class"] = name
        reference = AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path)
        assert [ours.encode(text) for text in TEXTS] == [reference(text).input_ids for text in TEXTS]
        assert ours.eos_token_ids == {reference.eos_token_id}


def test_a_plain_tokenizer_is_read_without_the_librarys_models(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    program = (
        "import sys; from pathlib import Path; from headrace.engine.models.tokenizer import load_tokenizer; "
        f"load_tokenizer(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    marker = tmp_path / "marker"
    (tmp_path / "custom.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Custom: ...\n")
    with edited_json(tmp_path / "tokenizer_config.json") as config:
        config["tokenizer_class"] = "Custom"
        config["auto_map"] = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    try:
        load_tokenizer(tmp_path)
    except ModelLoadError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  refusing is as good as reading tokenizer.json alone
    assert not marker.exists()


def test_the_module_can_be_imported_without_torch() -> None:
    program = "import sys, headrace.engine.models.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_template_that_does_not_parse_is_found_when_the_folder_is_loaded(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelLoadError, match=r"the chat template 'default' in .* does not parse"):
        load_tokenizer(tmp_path)


def test_a_config_that_cannot_be_served_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    with edited_json(folder / "config.json") as fields:
        fields["num_attention_heads"] = 0
    with pytest.raises(ModelLoadError, match=r"config.json: num_attention_heads is 0"):
        load_model(EngineConfig(model=ModelConfig(folder)))
