"""The border between `headrace.v1` and the engine's types. What says how tokens are drawn is in `options`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from headrace.engine import (
    BlockCounts,
    Chat,
    ChatMessage,
    Constraint,
    ConstraintKind,
    FieldViolation,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    Load,
    ModelInfo,
    OutputParams,
    SamplingParams,
    SpeculationParams,
    StepStats,
    StopConditions,
    TokenEvent,
    Tokenizer,
    Tool,
    ToolCall,
)
from headrace.service.json_value import object_from_struct
from headrace.service.limits import Limits
from headrace.service.logprobs import logprobs_to_proto
from headrace.service.options import (
    count_violations,
    num_made,
    num_sequences,
    sampling_from_proto,
    speculation_from_proto,
    stop_from_proto,
    stop_violations,
)
from headrace.service.status import duration
from headrace.service.unsupported import unknown_fields
from headrace.service.violations import (
    chat_violations,
    duration_violations,
    label_violations,
    text_violations,
    token_id_violations,
)
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
        sampling: all but the bad words.
        bad_words: texts that are never produced.
        constraint: the form of the text, not compiled yet; None for any.
        n, best_of: how many sequences are told, and made.
        priority: higher goes first.
        wants_token_ids: whether events carry ids.
        cache_salt: KV is shared only between requests of equal salts.
        uses_prefix_cache: whether KV is taken from the prefix cache and left there.
        speculation: whether tokens are proposed, and how many.
    """

    label: str
    prompt: Prompt
    sampling: SamplingParams
    bad_words: tuple[str, ...]
    constraint: Constraint | None
    stop: StopConditions
    output: OutputParams
    n: int
    best_of: int
    priority: int
    wants_token_ids: bool
    time_limit_s: float | None
    cache_salt: str
    uses_prefix_cache: bool
    speculation: SpeculationParams


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
    # What is far too large is refused before anything walks through it.
    if start.chat.ByteSize() > limits.max_text_bytes:
        raise InvalidRequest(*chat_violations(start.chat, limits))
    violations = [*unknown_fields(start)]
    if start.HasField("initial_credit") and not needs_label:
        violations.append(FieldViolation("initial_credit", "is for a Session alone: leave it out"))
    if start.detach and not needs_label:
        violations.append(FieldViolation("detach", "is for a Session alone: leave it out"))
    violations += label_violations(start.request_id, needs_label=needs_label)
    violations += _prompt_violations(start, model, limits)
    violations += count_violations(start, limits)
    violations += stop_violations(start.stop, start.output, model, limits)
    if len(start.cache.salt) > limits.max_cache_salt_len:
        violations.append(
            FieldViolation("cache.salt", f"must be at most {limits.max_cache_salt_len} characters")
        )
    violations += _time_limit_violations(start, limits)
    sampling = SamplingParams()
    try:
        sampling = sampling_from_proto(start.sampling, start.output, seed, model, limits)
    except InvalidRequest as error:
        violations += error.violations
    constraint = None
    try:
        constraint = constraint_from_proto(start.constraint)
    except InvalidRequest as error:
        violations += error.violations
    if violations:
        raise InvalidRequest(*violations)
    return Start(
        label=start.request_id,
        prompt=_prompt_from_proto(start),
        sampling=sampling,
        bad_words=tuple(start.sampling.bad_words),
        constraint=constraint,
        stop=stop_from_proto(start.stop),
        output=_output_from_proto(start.output),
        n=num_sequences(start),
        best_of=num_made(start),
        priority=start.priority,
        wants_token_ids=not start.output.HasField("token_ids") or start.output.token_ids,
        time_limit_s=seconds(start.time_limit) if start.HasField("time_limit") else None,
        cache_salt=start.cache.salt,
        uses_prefix_cache=not start.cache.bypass,
        speculation=speculation_from_proto(start.speculation, has_own_seed=start.sampling.HasField("seed")),
    )


def constraint_from_proto(constraint: generation_pb2.Constraint) -> Constraint | None:
    """The form that the text must have; None for any.

    Raises:
        InvalidRequest: it says nothing, or too much. What its content is worth only its compilation shows.
    """
    match constraint.WhichOneof("kind"):
        case "choice":
            return Constraint(ConstraintKind.CHOICE, choices=tuple(constraint.choice.options))
        case "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT) if constraint.json_object else None
        case "json_schema" | "regex" | "grammar" as kind:
            return Constraint(ConstraintKind(kind), str(getattr(constraint, kind)))
        case _:
            return None


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


def delta_into_proto(
    event: TokenEvent, start: Start, tokenizer: Tokenizer, delta: generation_pb2.Delta
) -> None:
    """Put into `delta` what a request asked for of its new output.

    It is filled in where it will be sent from: to copy a message takes as long as to make it.
    """
    delta.text = event.text
    if start.wants_token_ids:
        delta.token_ids.extend(event.token_ids)
    if event.logprobs and start.sampling.num_logprobs is not None:
        delta.logprobs.extend(logprobs_to_proto(event.logprobs, tokenizer))
    if event.prompt_logprobs:
        delta.prompt_logprobs.extend(logprobs_to_proto(event.prompt_logprobs, tokenizer))


def finished_to_proto(event: FinishEvent) -> generation_pb2.Finished:
    """A normal end."""
    finished = generation_pb2.Finished(
        reason=_FINISH_REASONS[event.reason],
        usage=generation_pb2.Usage(
            prompt_tokens=event.usage.num_prompt_tokens,
            cached_tokens=event.usage.num_cached_tokens,
            completion_tokens=event.usage.num_completion_tokens,
            draft_tokens_proposed=event.usage.num_draft_tokens,
            draft_tokens_accepted=event.usage.num_accepted_draft_tokens,
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
        num_paused=load.num_paused,
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
            output_tokens=totals.speculation.num_output_tokens,
            draws=totals.speculation.num_draws,
            draft_tokens=totals.speculation.num_draft_tokens,
            accepted_tokens=totals.speculation.num_accepted_tokens,
            drafted_draws=totals.speculation.num_drafted_draws,
            drafted_by_place=totals.speculation.drafted_by_place,
            accepted_by_place=totals.speculation.accepted_by_place,
        ),
        batching=batching,
    )


def step_to_proto(stats: StepStats, num_missed: int, epoch_s: float = 0.0) -> control_pb2.WatchStepsResponse:
    """What one step did.

    Args:
        epoch_s: moment of the engine's clock from which its beginning is counted.
    """
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
                output_tokens=row.num_output_tokens,
                draft_tokens=row.num_draft_tokens,
                accepted_tokens=row.num_accepted_tokens,
            )
            for row in stats.rows
        ],
        num_missed=num_missed,
        start_time=duration(stats.started_s - epoch_s),
    )


def seconds(span: Duration) -> float:
    """A protobuf Duration in seconds."""
    return span.seconds + span.nanos / 1e9


def _time_limit_violations(start: generation_pb2.StartGeneration, limits: Limits) -> Iterator[FieldViolation]:
    limit_s = seconds(start.time_limit)
    wrong = [*duration_violations("time_limit", start.time_limit)]
    if wrong:
        yield from wrong
    elif start.HasField("time_limit") and not 0 < limit_s <= limits.max_request_s:
        yield FieldViolation(
            "time_limit", f"must be above 0 and at most {limits.max_request_s:g} s, got {limit_s:g} s"
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


def _prompt_from_proto(start: generation_pb2.StartGeneration) -> Prompt:
    match start.WhichOneof("prompt"):
        case "text":
            return start.text
        case "token_ids":
            return tuple(start.token_ids.ids)
        case _:
            return chat_from_proto(start.chat)


def _output_from_proto(output: generation_pb2.OutputOptions) -> OutputParams:
    return OutputParams(
        wants_text=not output.HasField("text") or output.text,
        skip_special_tokens=not output.HasField("skip_special_tokens") or output.skip_special_tokens,
        is_echoed=output.echo,
    )


def _blocks_to_proto(blocks: BlockCounts) -> control_pb2.KvBlocks:
    return control_pb2.KvBlocks(total=blocks.total, free=blocks.free, cached=blocks.cached, live=blocks.live)


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else duration(seconds)
