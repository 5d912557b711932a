"""The text side of a model, as the engine sees it. The real one is `headrace.engine.models.tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

JsonObject = Mapping[str, object]
"""A JSON object: strings to JSON values."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's message made."""

    call_id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, as chat templates know it."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the template may describe to the model."""

    name: str
    description: str
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to render."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    add_generation_prompt: bool = True
    template_variables: JsonObject = field(default_factory=dict)


class Tokenizer(Protocol):
    """Text to ids and back. Every method is synchronous, safe to call from several threads, and may take
    milliseconds on long input: call it off the event loop, `decode` of a few tokens aside."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds to raw text unless told not to."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The special token that `text` is exactly, if it is one: decoded text may leave it out."""
        ...

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        """The bytes that a token stands for, whatever stands beside it.

        Where they are known, the joined bytes of a run of tokens, decoded as UTF-8 with ``errors="replace"``,
        are `decode` of the run.

        Returns:
            No bytes for an id without a spelling and for a skipped special token; None for every id of a
            vocabulary that isn't byte-level.
        """
        ...

    def render_chat(self, chat: Chat) -> str:
        """The prompt text of a conversation, by the model's own template in a sandbox.

        Raises:
            NoChatTemplate: the model brings none.
            InvalidRequest: the template refuses these messages.
        """
        ...

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of `render_chat`'s text: no special token is added, for the template has written them."""
        ...
