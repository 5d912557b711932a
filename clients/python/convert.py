"""From the protocol's messages to this package's values."""

from __future__ import annotations

import struct

from google.protobuf.message import Message

from headrace.clients import events
from headrace.clients.errors import ProtocolError
from headrace.clients.latency import duration_s, latency_from_proto
from headrace.v1 import control_pb2, generation_pb2, model_pb2

_REASONS = {
    generation_pb2.FINISH_REASON_STOP: events.FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: events.FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_TIME_LIMIT: events.FinishReason.TIME_LIMIT,
    generation_pb2.FINISH_REASON_CANCELLED: events.FinishReason.CANCELLED,
    generation_pb2.FINISH_REASON_ERROR: events.FinishReason.ERROR,
}


def event_from_proto(message: generation_pb2.GenerationEvent) -> events.Event:
    """The value of an event that is no `error`."""
    match message.WhichOneof("event"):
        case "accepted":
            return accepted_from_proto(message.accepted)
        case "delta":
            return events.Delta(
                text=message.delta.text,
                token_ids=tuple(message.delta.token_ids),
                index=message.index,
                logprobs=tuple(map(logprobs_from_proto, message.delta.logprobs)),
                prompt_logprobs=tuple(map(logprobs_from_proto, message.delta.prompt_logprobs)),
            )
        case "finished":
            return finished_from_proto(message.finished, message.index)
        case other:
            raise ProtocolError(f"request {message.request_id!r}: an event of unknown kind ({other})")


def logprobs_from_proto(message: generation_pb2.TokenLogprobs) -> events.TokenLogprobs:
    """How likely the token at one place was, and which ones were likelier."""
    return events.TokenLogprobs(
        chosen=_logprob_from_proto(message.chosen), top=tuple(map(_logprob_from_proto, message.top))
    )


def _logprob_from_proto(message: generation_pb2.TokenLogprob) -> events.TokenLogprob:
    return events.TokenLogprob(message.token_id, message.logprob, message.rank, message.text)


def accepted_from_proto(message: generation_pb2.Accepted) -> events.Accepted:
    """What a request really runs with."""
    return events.Accepted(
        num_prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        sampling=sampling_from_proto(message.sampling),
        model=message.model,
    )


def sampling_from_proto(message: generation_pb2.SamplingOptions) -> events.Sampling:
    """Sampling values; those that a server leaves out are off."""
    return events.Sampling(
        temperature=_shortest(message.temperature) if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=_shortest(message.top_p) if message.HasField("top_p") else 1.0,
        min_p=_shortest(message.min_p),
        seed=message.seed if message.HasField("seed") else None,
        typical_p=_shortest(message.typical_p) if message.HasField("typical_p") else 1.0,
        frequency_penalty=_shortest(message.frequency_penalty),
        presence_penalty=_shortest(message.presence_penalty),
        repetition_penalty=(
            _shortest(message.repetition_penalty) if message.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=tuple(
            (token_id, _shortest(bias)) for token_id, bias in sorted(message.logit_bias.items())
        ),
        allowed_token_ids=(
            tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None
        ),
        banned_token_ids=tuple(message.banned_token_ids.ids),
        bad_words=tuple(message.bad_words),
        best_of=message.best_of if message.HasField("best_of") else None,
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same in the 32 bits of the protocol: 0.2, not 0.20000000298023224."""
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("f", struct.pack("f", short)) == (value,):
            return short
    return value


def finished_from_proto(message: generation_pb2.Finished, index: int) -> events.Finished:
    """How a sequence ended."""
    usage, timings, stop = message.usage, message.timings, message.matched_stop
    matched: int | str | None = None
    if (kind := stop.WhichOneof("kind")) is not None:
        matched = stop.token_id if kind == "token_id" else stop.text
    return events.Finished(
        reason=_REASONS.get(message.reason, events.FinishReason.UNSPECIFIED),
        usage=events.Usage(
            num_prompt_tokens=usage.prompt_tokens,
            num_completion_tokens=usage.completion_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_draft_tokens_proposed=usage.draft_tokens_proposed,
            num_draft_tokens_accepted=usage.draft_tokens_accepted,
        ),
        timings=events.Timings(
            queued_s=_seconds(timings, "queued"),
            prefill_s=_seconds(timings, "prefill"),
            time_to_first_token_s=_seconds(timings, "time_to_first_token"),
            decode_s=_seconds(timings, "decode"),
        ),
        matched_stop=matched,
        num_preemptions=message.preemptions,
        index=index,
    )


def answer_from_proto(message: generation_pb2.GenerateOnceResponse) -> events.Answer:
    """A whole answer."""
    if not message.completions:
        raise ProtocolError(f"request {message.request_id!r}: an answer without a completion")
    return events.Answer(
        request_id=message.request_id,
        accepted=accepted_from_proto(message.accepted),
        completions=tuple(
            events.Completion(
                text=completion.text,
                token_ids=tuple(completion.token_ids),
                finished=finished_from_proto(completion.finished, completion.index),
                index=completion.index,
                logprobs=tuple(map(logprobs_from_proto, completion.logprobs)),
                prompt_logprobs=tuple(map(logprobs_from_proto, completion.prompt_logprobs)),
            )
            for completion in message.completions
        ),
    )


def score_from_proto(message: model_pb2.ScoreResponse) -> events.Score:
    """How likely a text is."""
    return events.Score(message.log_likelihood, tuple(map(logprobs_from_proto, message.tokens)))


def model_from_proto(message: model_pb2.Model) -> events.Model:
    """A served model."""
    return events.Model(
        name=message.name,
        family=message.family,
        max_sequence_length=message.max_sequence_length,
        vocabulary_size=message.vocabulary_size,
        end_token_ids=tuple(message.end_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        dtype=message.dtype,
        num_parameters=message.num_parameters,
        has_chat_template=message.has_chat_template,
        default_sampling=sampling_from_proto(message.default_sampling),
        num_kv_cache_tokens=message.kv_cache_tokens,
        block_size=message.block_size,
    )


def load_from_proto(message: control_pb2.GetLoadResponse) -> events.Load:
    """A server's load."""
    totals = message.totals
    return events.Load(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_paused=message.num_paused,
        num_detached=message.num_detached,
        max_num_seqs=message.max_num_seqs,
        blocks=blocks_from_proto(message.blocks),
        totals=events.StepTotals(
            num_steps=totals.steps,
            num_rows=totals.rows,
            num_prefill_tokens=totals.prefill_tokens,
            num_decode_tokens=totals.decode_tokens,
            num_preemptions=totals.preemptions,
            num_kv_slots_allocated=totals.kv_slots_allocated,
            num_kv_slots_used=totals.kv_slots_used,
            step_s=totals.step_seconds,
            num_output_tokens=totals.output_tokens,
            num_draft_tokens=totals.draft_tokens,
            num_accepted_tokens=totals.accepted_tokens,
        ),
        batching=message.batching,
        model=message.model,
        uptime_s=duration_s(message.uptime),
        latency=latency_from_proto(message.latency),
    )


def blocks_from_proto(message: control_pb2.KvBlocks) -> events.KvBlocks:
    """The KV pool."""
    return events.KvBlocks(message.total, message.free, message.cached, message.live)


def step_from_proto(message: control_pb2.WatchStepsResponse) -> events.StepReport:
    """What one step did."""
    return events.StepReport(
        step=message.step,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_prefill_tokens=message.prefill_tokens,
        num_decode_tokens=message.decode_tokens,
        num_preemptions=message.preemptions,
        blocks=blocks_from_proto(message.blocks),
        schedule_s=duration_s(message.schedule_time),
        execute_s=duration_s(message.execute_time),
        update_s=duration_s(message.update_time),
        rows=tuple(
            events.StepRow(
                request=row.request,
                index=row.index,
                slot=row.slot,
                num_prefill_tokens=row.prefill_tokens,
                num_decode_tokens=row.decode_tokens,
                is_finished=row.finished,
                num_output_tokens=row.output_tokens,
                num_draft_tokens=row.draft_tokens,
                num_accepted_tokens=row.accepted_tokens,
            )
            for row in message.rows
        ),
        num_missed=message.num_missed,
        start_s=duration_s(message.start_time),
    )


def _seconds(message: Message, name: str) -> float | None:
    return duration_s(getattr(message, name)) if message.HasField(name) else None
