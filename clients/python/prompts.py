"""What a caller asks, and how it becomes a `StartGeneration` message."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast
from uuid import uuid4

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from headrace.clients.errors import InvalidArgument
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import model_pb2

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

    What the server's build does not offer is refused with `InvalidArgument`, never ignored.

    Args:
        request_id: label, unique among the live requests of its stream; made when not given.
        model: name of a served model.
        n: how many independent sequences to make from the prompt, 1 to 128.
        priority: higher goes first.
        time_limit_s: longest time from arrival to the end; past it the request ends normally.
        temperature: 0 is greedy; 0 to 100.
        top_k: keep the k likeliest tokens; 0 is off.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p, (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, [0, 1].
        typical_p: keep the smallest set of tokens whose information is nearest to the expected one and whose
            probability reaches typical_p, (0, 1].
        seed: same seed, same tokens, whatever else the server runs.
        frequency_penalty: taken off a token's logit once for each time that it stands in the output, -2 to 2.
        presence_penalty: taken off once if it stands in the output at all, -2 to 2.
        repetition_penalty: divides a positive logit, multiplies a negative one, of each token in prompt or
            output, (0, 10].
        logit_bias: added to the logit of each token id, -100 to 100.
        allowed_token_ids, banned_token_ids: only these, none of these.
        bad_words: texts that are never produced, as they are usually divided into tokens.
        best_of: make this many sequences, tell the `n` of highest mean log-likelihood, the best first; then
            nothing is told before all have ended.
        max_tokens: most tokens to make; as many as context and KV pool allow when not given.
        min_tokens: no end before this many.
        stop: texts that end the sequence; a special token's text does, too.
        stop_token_ids: ids that end the sequence, beside the model's own end ids.
        ignore_eos: do not stop at the model's end ids.
        include_stop: leave the matched stop in the output.
        wants_text, wants_token_ids: what deltas carry.
        logprobs: tell how likely the model found each token made, and this many likeliest beside it, 0 to 64.
        prompt_logprobs: the same for each token of the prompt but the first.
        echo: send the prompt as the beginning of the output.
        skip_special_tokens: leave special tokens out of the text.
        json_schema: the answer is JSON of this schema, itself given as JSON text.
        json_object: the answer is some JSON object.
        regex, grammar, choice: the answer matches; at most one of these five.
        cache_salt: KV of equal beginnings is shared only between requests of equal salt.
        cache_bypass: neither use nor fill the prefix cache.
        speculation: whether a draft may be used.
        num_speculative_tokens: most draft tokens per step.
        detach: of a `Session` alone: whether the request outlives a stream that breaks, to be resumed.
    """

    request_id: str
    model: str
    n: int
    priority: int
    time_limit_s: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    bad_words: Sequence[str]
    best_of: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    wants_text: bool
    wants_token_ids: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    skip_special_tokens: bool
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    cache_salt: str
    cache_bypass: bool
    speculation: bool
    num_speculative_tokens: int
    detach: bool


_ENVELOPE_BYTES = 64

PATHS = {
    "request_id": "request_id",
    "detach": "detach",
    "model": "model",
    "n": "n",
    "priority": "priority",
    "time_limit_s": "time_limit",
    "max_tokens": "stop.max_tokens",
    "min_tokens": "stop.min_tokens",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "include_stop": "stop.include_stop",
    "wants_text": "output.text",
    "wants_token_ids": "output.token_ids",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "skip_special_tokens": "output.skip_special_tokens",
    "json_schema": "constraint.json_schema",
    "json_object": "constraint.json_object",
    "regex": "constraint.regex",
    "grammar": "constraint.grammar",
    "choice": "constraint.choice.options",
    "cache_salt": "cache.salt",
    "cache_bypass": "cache.bypass",
    "speculation": "speculation.enabled",
    "num_speculative_tokens": "speculation.num_speculative_tokens",
    "allowed_token_ids": "sampling.allowed_token_ids.ids",
    "banned_token_ids": "sampling.banned_token_ids.ids",
}
"""Option to the protocol's field; one that is not listed is a field of `sampling` by the same name."""
_FORMS = [option for option, path in PATHS.items() if path.startswith("constraint.")]


def start_message(prompt: Prompt, options: RequestOptions, max_bytes: int) -> pb.StartGeneration:
    """The protocol's message for a request. What was not given is not set, the label aside, which is made.

    Args:
        max_bytes: longest message.

    Raises:
        InvalidArgument: a value does not fit the protocol's type. Ranges are the server's to judge.
        TypeError: an option of another name.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no such request option: {', '.join(sorted(unknown))}")
    forms = [option for option in _FORMS if options.get(option) is not None]
    if len(forms) > 1:
        raise InvalidArgument.of("constraint", f"can be one thing only, got {' and '.join(forms)}")
    start = pb.StartGeneration()
    _set_prompt(start, prompt)
    for option, value in options.items():
        if value is not None:
            _set(start, PATHS.get(option, f"sampling.{option}"), value)
    start.request_id = start.request_id or uuid4().hex
    # Some room for what the message is sent in.
    if start.ByteSize() > max_bytes - _ENVELOPE_BYTES:
        raise InvalidArgument.of(
            "prompt", f"makes a message of {start.ByteSize()} bytes: the connection takes up to {max_bytes}"
        )
    return start


def score_message(
    text: str | Sequence[int], model: str, num_context_tokens: int, logprobs: int
) -> model_pb2.ScoreRequest:
    """The protocol's message for a text to score.

    Raises:
        InvalidArgument: a value does not fit the protocol's type.
    """
    request = model_pb2.ScoreRequest(model=model)
    if isinstance(text, str):
        request.text = text
    else:
        request.token_ids.SetInParent()
        extend_ids(request.token_ids.ids, text, "text")
    _set(request, "num_context_tokens", num_context_tokens)
    _set(request, "logprobs", logprobs)
    return request


def chat_message(chat: Chat) -> pb.ChatPrompt:
    """The protocol's message for a conversation."""
    prompt = pb.ChatPrompt(add_generation_prompt=chat.add_generation_prompt)
    for message in chat.messages:
        added = prompt.messages.add(role=message.role, content=message.content)
        for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
            if value is not None:
                _set(added, name, value)
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


_INTEGER_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
"""What a field of each integer type can hold, both ends included."""


def _set(message: Message, path: str, value: object) -> None:
    """Set the field at `path` below `message`; a text is no list of texts."""
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    try:
        if descriptor.message_type is Duration.DESCRIPTOR:
            getattr(message, name).FromNanoseconds(round(cast("float", value) * 1e9))
        elif descriptor.is_repeated and descriptor.message_type is not None:
            getattr(message, name).update(value)
        elif descriptor.is_repeated and not isinstance(value, str):
            message.SetInParent()
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        bounds = _INTEGER_BOUNDS.get(descriptor.type)
        if bounds is not None and isinstance(value, int):
            raise InvalidArgument.of(path, f"must be from {bounds[0]} to {bounds[1]}, got {value}") from None
        raise InvalidArgument.of(path, f"can't be {value!r}: {error}") from error


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
