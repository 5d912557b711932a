"""The border between `headrace.v1` and the engine's types: every translation, either way, is here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from headrace.engine import (
    BlockCounts,
    Chat,
    ChatMessage,
    FieldViolation,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    Load,
    ModelInfo,
    OutputParams,
    SamplingParams,
    StepStats,
    StopConditions,
    TokenEvent,
    Tool,
    ToolCall,
)
from headrace.service.json_value import object_from_struct
from headrace.service.limits import MAX_REQUEST_ID_LEN, Limits, is_valid_request_id
from headrace.service.status import duration
from headrace.service.unsupported import unknown_fields, unsupported_fields
from headrace.v1 import control_pb2, generation_pb2

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: generation_pb2.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}

Prompt = str | tuple[int, ...] | Chat
"""Raw text, token ids, or a conversation to render."""


@dataclass(frozen=True, slots=True)
class Start:
    """A StartGeneration whose fields have been checked; its prompt is not encoded yet.

    Args:
        label: the client's request_id; empty when the server is to make one.
        wants_token_ids: whether events carry ids.
        cache_salt: KV is shared only between requests of equal salts.
        uses_prefix_cache: whether KV is taken from the prefix cache and left there.
    """

    label: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopConditions
    output: OutputParams
    wants_token_ids: bool
    time_limit_s: float | None
    cache_salt: str
    uses_prefix_cache: bool


def start_from_proto(
    start: generation_pb2.StartGeneration, model: ModelInfo, limits: Limits, seed: int, *, needs_label: bool
) -> Start:
    """Check every field of `start`.

    Args:
        seed: taken when the request has none.
        needs_label: whether an empty request_id is refused.

    Raises:
        InvalidRequest: naming everything that is wrong with it at once. Paths are those of StartGeneration.
    """
    violations = [*unknown_fields(start), *unsupported_fields(start)]
    violations += _label_violations(start.request_id, needs_label)
    violations += _prompt_violations(start, model, limits)
    violations += _stop_violations(start.stop, model, limits)
    if len(start.cache.salt) > limits.max_cache_salt_len:
        violations.append(
            FieldViolation("cache.salt", f"must be at most {limits.max_cache_salt_len} characters")
        )
    sampling = SamplingParams()
    try:
        sampling = _sampling_from_proto(start.sampling, seed)
    except InvalidRequest as error:
        violations += error.violations
    time_limit_s = seconds(start.time_limit) if start.HasField("time_limit") else None
    if time_limit_s is not None and not 0 < time_limit_s <= limits.max_request_s:
        violations.append(
            FieldViolation(
                "time_limit",
                f"must be above 0 and at most {limits.max_request_s:g} s, got {time_limit_s:g} s",
            )
        )
    prompt: Prompt = ""
    if not violations:
        try:
            prompt = _prompt_from_proto(start)
        except InvalidRequest as error:
            violations += error.violations
    if violations:
        raise InvalidRequest(*violations)
    wants_text = not start.output.HasField("text") or start.output.text
    skips_special = not start.output.HasField("skip_special_tokens") or start.output.skip_special_tokens
    return Start(
        label=start.request_id,
        prompt=prompt,
        sampling=sampling,
        stop=StopConditions(
            max_tokens=start.stop.max_tokens if start.stop.HasField("max_tokens") else None,
            token_ids=frozenset(start.stop.token_ids),
            ignore_eos=start.stop.ignore_eos,
            strings=tuple(start.stop.strings),
            is_stop_included=start.stop.include_stop,
        ),
        output=OutputParams(wants_text=wants_text, skip_special_tokens=skips_special),
        wants_token_ids=not start.output.HasField("token_ids") or start.output.token_ids,
        time_limit_s=time_limit_s,
        cache_salt=start.cache.salt,
        uses_prefix_cache=not start.cache.bypass,
    )


def chat_from_proto(prompt: generation_pb2.ChatPrompt) -> Chat:
    """A conversation.

    Raises:
        InvalidRequest: a number in it is NaN or infinite.
    """
    return Chat(
        messages=tuple(
            ChatMessage(
                role=message.role,
                content=message.content,
                tool_calls=tuple(
                    ToolCall(
                        call.id,
                        call.name,
                        object_from_struct(call.arguments, f"chat.messages[{i}].tool_calls[{j}].arguments"),
                    )
                    for j, call in enumerate(message.tool_calls)
                ),
                tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
                name=message.name if message.HasField("name") else None,
            )
            for i, message in enumerate(prompt.messages)
        ),
        tools=tuple(
            Tool(
                tool.name,
                tool.description,
                object_from_struct(tool.parameters, f"chat.tools[{i}].parameters"),
            )
            for i, tool in enumerate(prompt.tools)
        ),
        add_generation_prompt=not prompt.HasField("add_generation_prompt") or prompt.add_generation_prompt,
        template_variables=object_from_struct(prompt.template_variables, "chat.template_variables"),
    )


def chat_violations(prompt: generation_pb2.ChatPrompt, limits: Limits) -> Iterator[FieldViolation]:
    """Name what is wrong with a conversation."""
    if prompt.ByteSize() > limits.max_text_bytes:
        yield FieldViolation(
            "chat", f"must be at most {limits.max_text_bytes} bytes, got {prompt.ByteSize()}"
        )
        return
    if not 1 <= len(prompt.messages) <= limits.max_messages:
        yield FieldViolation(
            "chat.messages", f"must hold 1 to {limits.max_messages} messages, got {len(prompt.messages)}"
        )
        return
    if len(prompt.tools) > limits.max_tools:
        yield FieldViolation(
            "chat.tools", f"must hold at most {limits.max_tools} tools, got {len(prompt.tools)}"
        )
    for i, message in enumerate(prompt.messages):
        if not message.role:
            yield FieldViolation(
                f"chat.messages[{i}].role", "must not be empty: use system, user, assistant, …"
            )


def token_id_violations(field: str, token_ids: Iterable[int], model: ModelInfo) -> Iterator[FieldViolation]:
    """Name the first id that the model does not have."""
    foreign = next((token_id for token_id in token_ids if token_id >= model.vocab_size), None)
    if foreign is not None:
        yield FieldViolation(
            field, f"must be from 0 to {model.vocab_size - 1}, the model's vocabulary, got {foreign}"
        )


def text_violations(field: str, text: str, limits: Limits) -> Iterator[FieldViolation]:
    """Name a text that is too long. No encoding of it is made: a character is one to four bytes."""
    num_bytes = len(text) if text.isascii() else len(text.encode())
    if num_bytes > limits.max_text_bytes:
        yield FieldViolation(
            field, f"must be at most {limits.max_text_bytes} bytes of UTF-8, got {num_bytes}"
        )


def sampling_to_proto(sampling: SamplingParams) -> generation_pb2.SamplingOptions:
    """Every value that a request runs with, its seed included."""
    options = default_sampling_to_proto(sampling)
    options.seed = sampling.seed
    return options


def default_sampling_to_proto(sampling: SamplingParams) -> generation_pb2.SamplingOptions:
    """What a field that is not set means. A seed has no default: the server draws one."""
    return generation_pb2.SamplingOptions(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )


def delta_to_proto(event: TokenEvent, *, wants_token_ids: bool) -> generation_pb2.Delta:
    """New output."""
    return generation_pb2.Delta(text=event.text, token_ids=event.token_ids if wants_token_ids else ())


def finished_to_proto(event: FinishEvent) -> generation_pb2.Finished:
    """A normal end."""
    finished = generation_pb2.Finished(
        reason=_FINISH_REASONS[event.reason],
        usage=generation_pb2.Usage(
            prompt_tokens=event.usage.num_prompt_tokens,
            cached_tokens=event.usage.num_cached_tokens,
            completion_tokens=event.usage.num_completion_tokens,
        ),
        timings=generation_pb2.Timings(
            queued=_duration(event.timings.queued_s),
            prefill=_duration(event.timings.prefill_s),
            time_to_first_token=_duration(event.timings.first_token_s),
            decode=_duration(event.timings.decode_s),
        ),
        preemptions=event.num_preemptions,
    )
    if isinstance(event.matched_stop, str):
        finished.matched_stop.text = event.matched_stop
    elif event.matched_stop is not None:
        finished.matched_stop.token_id = event.matched_stop
    return finished


def load_to_proto(load: Load, batching: str, max_num_seqs: int) -> control_pb2.GetLoadResponse:
    """The load now."""
    totals = load.totals
    return control_pb2.GetLoadResponse(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        max_num_seqs=max_num_seqs,
        blocks=_blocks_to_proto(load.blocks),
        totals=control_pb2.StepTotals(
            steps=totals.num_steps,
            rows=totals.num_rows,
            prefill_tokens=totals.num_prefill_tokens,
            decode_tokens=totals.num_decode_tokens,
            preemptions=totals.num_preemptions,
            kv_slots_allocated=totals.num_kv_slots_allocated,
            kv_slots_used=totals.num_kv_slots_used,
            step_seconds=totals.step_s,
        ),
        batching=batching,
    )


def step_to_proto(stats: StepStats, num_missed: int) -> control_pb2.WatchStepsResponse:
    """What one step did."""
    return control_pb2.WatchStepsResponse(
        step=stats.step,
        num_running=len(stats.rows),
        num_waiting=stats.num_waiting,
        prefill_tokens=stats.num_prefill_tokens,
        decode_tokens=stats.num_decode_tokens,
        preemptions=stats.num_preemptions,
        blocks=_blocks_to_proto(stats.blocks),
        schedule_time=duration(stats.schedule_s),
        execute_time=duration(stats.execute_s),
        update_time=duration(stats.update_s),
        rows=[
            control_pb2.StepRow(
                request=row.request_id,
                index=row.index,
                slot=row.slot,
                prefill_tokens=row.num_prefill_tokens,
                decode_tokens=row.num_decode_tokens,
                finished=row.is_finished,
            )
            for row in stats.rows
        ],
        num_missed=num_missed,
    )


def seconds(span: Duration) -> float:
    """A protobuf Duration in seconds."""
    return span.seconds + span.nanos / 1e9


def _label_violations(label: str, needs_label: bool) -> Iterator[FieldViolation]:
    if (label or needs_label) and not is_valid_request_id(label):
        yield FieldViolation(
            "request_id",
            f"must be 1 to {MAX_REQUEST_ID_LEN} printable ASCII characters, got {len(label)} characters",
        )


def _prompt_violations(
    start: generation_pb2.StartGeneration, model: ModelInfo, limits: Limits
) -> Iterator[FieldViolation]:
    match start.WhichOneof("prompt"):
        case "text":
            yield from text_violations("text", start.text, limits)
        case "token_ids":
            ids = start.token_ids.ids
            if not 1 <= len(ids) <= model.max_model_len:
                yield FieldViolation(
                    "token_ids",
                    f"must hold 1 to {model.max_model_len} ids, the model's context, got {len(ids)}",
                )
            else:
                yield from token_id_violations("token_ids", ids, model)
        case "chat":
            yield from chat_violations(start.chat, limits)
        case _:
            yield FieldViolation("prompt", "one of text, token_ids and chat is required, got none")


def _stop_violations(
    stop: generation_pb2.StopOptions, model: ModelInfo, limits: Limits
) -> Iterator[FieldViolation]:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        yield FieldViolation("stop.max_tokens", "must be at least 1, got 0: leave it out for as many as fit")
    if len(stop.token_ids) > limits.max_stop_token_ids:
        yield FieldViolation(
            "stop.token_ids", f"must hold at most {limits.max_stop_token_ids} ids, got {len(stop.token_ids)}"
        )
    else:
        yield from token_id_violations("stop.token_ids", stop.token_ids, model)
    if len(stop.strings) > limits.max_stop_strings:
        yield FieldViolation(
            "stop.strings", f"must hold at most {limits.max_stop_strings} texts, got {len(stop.strings)}"
        )
    elif not all(1 <= len(text.encode()) <= limits.max_stop_string_bytes for text in stop.strings):
        yield FieldViolation(
            "stop.strings", f"each must be 1 to {limits.max_stop_string_bytes} bytes of UTF-8"
        )


def _prompt_from_proto(start: generation_pb2.StartGeneration) -> Prompt:
    match start.WhichOneof("prompt"):
        case "text":
            return start.text
        case "token_ids":
            return tuple(start.token_ids.ids)
        case _:
            return chat_from_proto(start.chat)


def _sampling_from_proto(options: generation_pb2.SamplingOptions, seed: int) -> SamplingParams:
    default = SamplingParams()
    return SamplingParams(
        temperature=options.temperature if options.HasField("temperature") else default.temperature,
        top_k=options.top_k if options.HasField("top_k") else default.top_k,
        top_p=options.top_p if options.HasField("top_p") else default.top_p,
        min_p=options.min_p if options.HasField("min_p") else default.min_p,
        seed=options.seed if options.HasField("seed") else seed,
    )


def _blocks_to_proto(blocks: BlockCounts) -> control_pb2.KvBlocks:
    return control_pb2.KvBlocks(total=blocks.total, free=blocks.free, cached=blocks.cached, live=blocks.live)


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else duration(seconds)
