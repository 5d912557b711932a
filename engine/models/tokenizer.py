"""The model's own tokenizer and chat template, run by the libraries that they were written for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders

from headrace.engine.errors import InvalidRequest, ModelLoadError, NoChatTemplate
from headrace.engine.models.json_file import read_json_object
from headrace.engine.tokenizer import Chat, ChatMessage, Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

_MISTRAL_FILE = "tekken.json"


def load_tokenizer(folder: Path) -> HFTokenizer:
    """Read the tokenizer of a model folder. No code from the folder is run, and nothing is fetched.

    Raises:
        ModelLoadError: the folder has no tokenizer, or one that can't be read.
    """
    # transformers imports torch: only where a model is really wanted.
    from transformers import TokenizersBackend  # noqa: PLC0415

    try:
        tokenizer = _read(folder)
    except Exception as error:
        # The readers of many formats stand behind this call, and each raises what it likes.
        raise ModelLoadError(f"the tokenizer in {folder} can't be read: {error}") from error
    if not isinstance(tokenizer, TokenizersBackend):
        raise ModelLoadError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which has no fast form: "
            "add a tokenizer.json"
        )
    _check_templates(tokenizer.chat_template, folder)
    return HFTokenizer(tokenizer)


def _read(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import TokenizersBackend  # noqa: PLC0415

    settings = folder / "tokenizer_config.json"
    declared = read_json_object(settings) if settings.is_file() else {}
    is_plain = declared.get("tokenizer_class") == TokenizersBackend.__name__ and "auto_map" not in declared
    if is_plain and (folder / "tokenizer.json").is_file() and not (folder / _MISTRAL_FILE).is_file():
        # What the choice below would take, without the second that its imports take.
        plain: TokenizersBackend = TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
        return plain
    from transformers import AutoTokenizer  # noqa: PLC0415

    chosen: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True
    )
    return chosen


def _check_templates(templates: str | Mapping[str, str] | None, folder: Path) -> None:
    """Compile them as the library will, with its own extensions: a fault is found now, not by a sender."""
    from jinja2 import TemplateError  # noqa: PLC0415
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

    named = {"default": templates} if isinstance(templates, str) else templates or {}
    for name, template in named.items():
        try:
            _compile_jinja_template(template)
        except (TemplateError, ValueError, RecursionError) as error:
            raise ModelLoadError(f"the chat template {name!r} in {folder} does not parse: {error}") from error


class HFTokenizer:
    """The `Tokenizer` of a Hugging Face folder.

    Encoding and decoding go straight to the compiled tokenizer, which keeps no state and lets other
    threads run meanwhile.
    """

    def __init__(self, tokenizer: TokenizersBackend) -> None:
        """Take over a loaded tokenizer.

        Args:
            tokenizer: nobody else may change it from now on.
        """
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A folder may bring the settings of the training run; a prompt is never cut or filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Made now, in tenths of a second: later it would be made while tokens are waited for.
        self._byte_table = _byte_table(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special_ids_by_text = {token.content: i for i, token in added.items() if token.special}
        self._special_token_ids = frozenset(self._special_ids_by_text.values())

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a spelling, added tokens included."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End ids that the tokenizer declares: one or none."""
        eos = self._tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({int(eos)})

    @property
    def has_chat_template(self) -> bool:
        """See `Tokenizer`."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        # The batch form without offsets: it takes half the time, and other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`. No spaces are tidied up: the text is what the tokens spell."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """See `Tokenizer`; an id without a spelling gives an empty string."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def special_token_id(self, text: str) -> int | None:
        """See `Tokenizer`."""
        return self._special_ids_by_text.get(text)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        """See `Tokenizer`."""
        if self._byte_table is None:
            return None
        if skip_special_tokens and token_id in self._special_token_ids:
            return b""
        return self._byte_table.get(token_id, b"")

    def render_chat(self, chat: Chat) -> str:
        """See `Tokenizer`."""
        if not self.has_chat_template:
            raise NoChatTemplate(
                "the model brings no chat template: send the prompt as text or token ids, "
                "or add a chat_template.jinja to the model folder"
            )
        variables: dict[str, Any] = dict(chat.template_variables)
        if reserved := sorted(variables.keys() & self._reserved_variables):
            raise InvalidRequest.of(
                "chat", f"the template variables {', '.join(reserved)} are not free to set"
            )
        try:
            # The library compiles and renders in jinja2's ImmutableSandboxedEnvironment.
            rendered = self._tokenizer.apply_chat_template(
                [_message_fields(message) for message in chat.messages],
                tools=[_tool_fields(tool) for tool in chat.tools] or None,
                add_generation_prompt=chat.add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except Exception as error:
            # A template is a program out of the model's folder: it may stop in any way at all.
            refusal = f"the model's chat template refuses the messages: {error}"
            raise InvalidRequest.of("chat", refusal) from error
        if not isinstance(rendered, str):
            raise InvalidRequest.of("chat", "the model's chat template gave no text")
        return rendered

    def encode_chat(self, rendered: str) -> list[int]:
        """See `Tokenizer`."""
        return self.encode(rendered, add_special_tokens=False)

    @cached_property
    def _reserved_variables(self) -> frozenset[str]:
        """Names that a caller may not hand to the template: they would steer the library instead."""
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        parameters = {
            *inspect.signature(self._tokenizer.apply_chat_template).parameters,
            *inspect.signature(render_jinja_template).parameters,
        }
        return frozenset({*parameters, *self._tokenizer.special_tokens_map, "messages", "self"})


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with, as GPT-2 laid down.

    A printable byte is its own character; the others take the characters from 256 on, in order.
    """
    spans = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = {byte for first, last in spans for byte in range(ord(first), ord(last) + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_table(backend: Tokenizer) -> Mapping[int, bytes] | None:
    """Bytes of every id of a byte-level vocabulary; None for any other."""
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    return {token_id: _bytes_of(spelling) for spelling, token_id in vocabulary.items()}


def _bytes_of(spelling: str) -> bytes:
    """Bytes that a byte-level decoder makes of a token; one spelt outside the alphabet is its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in spelling)
    except KeyError:
        return spelling.encode("utf-8")


def _message_fields(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: a field that isn't there is left out, for templates test for that."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call_fields(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _tool_call_fields(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def _tool_fields(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
