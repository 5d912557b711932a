"""What a caller asks, and how it becomes a `StartGeneration` message."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from headrace.clients.errors import InvalidArgument
from headrace.v1 import generation_pb2 as pb

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
    """One message of a conversation; `role` is what the template knows: "system", "user", "assistant", ..."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the template may describe to the model; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: JsonObject


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with more than messages; a plain sequence of messages does where these are not needed.

    Args:
        add_generation_prompt: whether the template opens the assistant's turn.
        template_variables: further variables of the template.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    template_variables: JsonObject = field(default_factory=dict)


Prompt = str | Sequence[int] | Sequence[ChatMessage] | Chat
"""Raw text, token ids, or a conversation."""


class RequestOptions(TypedDict, total=False):
    """Options of a request, all keywords. What is not given takes the server's default.

    Args:
        request_id: label, unique among the live requests of its stream; made when not given.
        model: name of a served model.
        max_tokens: most tokens to make; as many as context and KV pool allow when not given.
        temperature: 0 is greedy; 0 to 100.
        top_k: keep the k likeliest tokens; 0 is off.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it, (0, 1].
        min_p: drop tokens less likely than this times the likeliest, [0, 1].
        seed: same seed, same tokens, whatever else the server runs.
        stop_token_ids: ids that end the sequence, beside the model's own end ids.
        ignore_eos: do not stop at the model's end ids.
        time_limit_s: longest time from arrival to the end; past it the request ends normally.
        skip_special_tokens: leave special tokens out of the text.
        wants_text, wants_token_ids: what deltas carry.
        cache_salt: KV of equal beginnings is shared only between requests of equal salt.
        cache_bypass: neither use nor fill the prefix cache.
    """

    request_id: str
    model: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    time_limit_s: float
    skip_special_tokens: bool
    wants_text: bool
    wants_token_ids: bool
    cache_salt: str
    cache_bypass: bool


def start_message(prompt: Prompt, options: RequestOptions) -> pb.StartGeneration:
    """The protocol's message for a request. Only what was given is set.

    Raises:
        InvalidArgument: a value does not fit the protocol's type. Ranges are the server's to judge.
        TypeError: an option of another name.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such request option: {', '.join(sorted(unknown))}")
    start = pb.StartGeneration()
    _set_prompt(start, prompt)
    _set(start, "request_id", options.get("request_id"))
    _set(start, "model", options.get("model"))
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        _set(start.sampling, name, options.get(name), "sampling")
    _set(start.stop, "max_tokens", options.get("max_tokens"), "stop")
    _set(start.stop, "ignore_eos", options.get("ignore_eos"), "stop")
    if stop_token_ids := options.get("stop_token_ids"):
        extend_ids(start.stop.token_ids, stop_token_ids, "stop.token_ids")
    _set(start.output, "text", options.get("wants_text"), "output")
    _set(start.output, "token_ids", options.get("wants_token_ids"), "output")
    _set(start.output, "skip_special_tokens", options.get("skip_special_tokens"), "output")
    _set(start.cache, "salt", options.get("cache_salt"), "cache")
    _set(start.cache, "bypass", options.get("cache_bypass"), "cache")
    if (time_limit_s := options.get("time_limit_s")) is not None:
        try:
            start.time_limit.FromNanoseconds(round(time_limit_s * 1e9))
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidArgument.of("time_limit", f"must be seconds, got {time_limit_s!r}") from error
    return start


def chat_message(chat: Chat) -> pb.ChatPrompt:
    """The protocol's message for a conversation."""
    prompt = pb.ChatPrompt(add_generation_prompt=chat.add_generation_prompt)
    for message in chat.messages:
        added = prompt.messages.add(role=message.role, content=message.content)
        _set(added, "tool_call_id", message.tool_call_id, "chat.messages")
        _set(added, "name", message.name, "chat.messages")
        for call in message.tool_calls:
            added.tool_calls.add(id=call.call_id, name=call.name, arguments=_struct(call.arguments))
    for tool in chat.tools:
        prompt.tools.add(name=tool.name, description=tool.description, parameters=_struct(tool.parameters))
    if chat.template_variables:
        prompt.template_variables.CopyFrom(_struct(chat.template_variables))
    return prompt


def _set_prompt(start: pb.StartGeneration, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        start.text = prompt
    elif isinstance(prompt, Chat):
        start.chat.CopyFrom(chat_message(prompt))
    elif messages := [part for part in prompt if isinstance(part, ChatMessage)]:
        if len(messages) < len(prompt):
            raise InvalidArgument.of("prompt", "must be token ids or chat messages, not a mixture")
        start.chat.CopyFrom(chat_message(Chat(messages)))
    else:
        start.token_ids.SetInParent()
        token_ids = [part for part in prompt if not isinstance(part, ChatMessage)]
        extend_ids(start.token_ids.ids, token_ids, "prompt")


def _set(message: Message, name: str, value: object, path: str = "") -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(
            f"{path}.{name}" if path else name, f"can't be {value!r}: {error}"
        ) from error


def extend_ids(target: MutableSequence[int], token_ids: Sequence[int], path: str) -> None:
    """Append token ids to a message's field.

    Raises:
        InvalidArgument: one of them is no token id.
    """
    try:
        target.extend(token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(path, f"must be token ids: {error}") from error


def _struct(value: JsonObject) -> Struct:
    try:
        return json_format.ParseDict(dict(value), Struct())
    except (TypeError, ValueError, json_format.ParseError) as error:
        raise InvalidArgument.of("chat", f"must be a JSON object: {error}") from error
