"""How tokens are drawn and when a sequence ends, across the border: checks, and translation either way."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.engine import (
    FieldViolation,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    SpeculationParams,
    StopConditions,
)
from headrace.service.limits import Limits
from headrace.service.violations import (
    text_list_violations,
    token_id_list_violations,
    token_id_violations,
)
from headrace.v1 import generation_pb2 as pb


def sampling_from_proto(
    options: pb.SamplingOptions, output: pb.OutputOptions, seed: int, model: ModelInfo, limits: Limits
) -> SamplingParams:
    """How tokens are drawn, bad words aside: those are texts until they are encoded.

    Args:
        output: how many logprobs are told.
        seed: taken when the request has none.

    Raises:
        InvalidRequest: naming everything that is wrong at once.
    """
    violations = [
        *_token_set_violations(options, model, limits),
        *text_list_violations(
            "sampling.bad_words", options.bad_words, limits.max_bad_words, limits.max_bad_word_bytes
        ),
        *_logprobs_violations(output, limits),
    ]
    wrong = {violation.field for violation in violations}
    default = default_sampling(model)
    sampling = default

    def allowed() -> frozenset[int] | None:
        field = "sampling.allowed_token_ids"
        is_given = options.HasField("allowed_token_ids") and field not in wrong
        return frozenset(options.allowed_token_ids.ids) if is_given else None

    try:
        sampling = SamplingParams(
            temperature=options.temperature if options.HasField("temperature") else default.temperature,
            top_k=options.top_k if options.HasField("top_k") else default.top_k,
            top_p=options.top_p if options.HasField("top_p") else default.top_p,
            min_p=options.min_p if options.HasField("min_p") else default.min_p,
            seed=options.seed if options.HasField("seed") else seed,
            typical_p=options.typical_p if options.HasField("typical_p") else default.typical_p,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            repetition_penalty=(
                options.repetition_penalty
                if options.HasField("repetition_penalty")
                else default.repetition_penalty
            ),
            logit_bias=(
                tuple(sorted(options.logit_bias.items())) if "sampling.logit_bias" not in wrong else ()
            ),
            allowed_token_ids=allowed(),
            banned_token_ids=frozenset(
                options.banned_token_ids.ids if "sampling.banned_token_ids" not in wrong else ()
            ),
            num_logprobs=_logprobs(output, "logprobs", wrong),
            num_prompt_logprobs=_logprobs(output, "prompt_logprobs", wrong),
        )
    except InvalidRequest as error:
        violations += error.violations
    if violations:
        raise InvalidRequest(*violations)
    return sampling


def default_sampling(model: ModelInfo) -> SamplingParams:
    """What a control that a request leaves open means."""
    suggested = model.sampling_defaults
    return SamplingParams(
        temperature=suggested.temperature,
        top_k=suggested.top_k,
        top_p=suggested.top_p,
        min_p=suggested.min_p,
        repetition_penalty=suggested.repetition_penalty,
    )


def count_violations(start: pb.StartGeneration, limits: Limits) -> Iterator[FieldViolation]:
    """Name what is wrong with the numbers of sequences, and with the priority."""
    if not limits.min_priority <= start.priority <= limits.max_priority:
        wanted = f"must be from {limits.min_priority} to {limits.max_priority}"
        yield FieldViolation("priority", f"{wanted}, got {start.priority}")
    n, most = num_sequences(start), limits.max_sequences
    if not 1 <= n <= most:
        yield FieldViolation("n", f"must be from 1 to {most}, got {n}")
        n = 1
    if not n <= num_made(start) <= most and start.sampling.HasField("best_of"):
        yield FieldViolation("sampling.best_of", f"must be from n={n} to {most}, got {num_made(start)}")


def num_sequences(start: pb.StartGeneration) -> int:
    """How many sequences are told."""
    return start.n if start.HasField("n") else 1


def num_made(start: pb.StartGeneration) -> int:
    """How many sequences are made."""
    return start.sampling.best_of if start.sampling.HasField("best_of") else num_sequences(start)


def speculation_from_proto(options: pb.SpeculationOptions, *, has_own_seed: bool) -> SpeculationParams:
    """Whether tokens are proposed, and how many. What of it the server has is the engine's to say.

    Args:
        has_own_seed: whether the request brings a seed.
    """
    return SpeculationParams(
        is_enabled=options.enabled if options.HasField("enabled") else None,
        num_tokens=options.num_speculative_tokens if options.HasField("num_speculative_tokens") else None,
        has_own_seed=has_own_seed,
    )


def stop_from_proto(stop: pb.StopOptions) -> StopConditions:
    """When a sequence ends."""
    return StopConditions(
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        token_ids=frozenset(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        strings=tuple(stop.strings),
        is_stop_included=stop.include_stop,
        min_tokens=stop.min_tokens,
    )


def stop_violations(
    stop: pb.StopOptions, output: pb.OutputOptions, model: ModelInfo, limits: Limits
) -> Iterator[FieldViolation]:
    """Name what is wrong with a request's ends."""
    if stop.HasField("max_tokens") and stop.max_tokens < 1 and not output.HasField("prompt_logprobs"):
        yield FieldViolation(
            "stop.max_tokens",
            "must be at least 1, got 0: leave it out for as many as fit, or ask for prompt_logprobs too",
        )
    else:
        most, name = model.max_model_len, "the model's context"
        if stop.HasField("max_tokens"):
            most, name = stop.max_tokens, "max_tokens"
        if stop.min_tokens > most:
            yield FieldViolation("stop.min_tokens", f"must be at most {name}={most}, got {stop.min_tokens}")
    yield from token_id_list_violations("stop.token_ids", stop.token_ids, model, limits.max_stop_token_ids)
    yield from text_list_violations(
        "stop.strings", stop.strings, limits.max_stop_strings, limits.max_stop_string_bytes
    )


def sampling_to_proto(
    sampling: SamplingParams, bad_words: tuple[str, ...], best_of: int
) -> pb.SamplingOptions:
    """Every value that a request runs with, its seed included."""
    options = default_sampling_to_proto(sampling)
    options.seed = sampling.seed
    options.best_of = best_of
    options.bad_words.extend(bad_words)
    for token_id, bias in sampling.logit_bias:
        options.logit_bias[token_id] = bias
    if sampling.allowed_token_ids is not None:
        options.allowed_token_ids.ids.extend(sorted(sampling.allowed_token_ids))
    if sampling.banned_token_ids:
        options.banned_token_ids.ids.extend(sorted(sampling.banned_token_ids))
    return options


def default_sampling_to_proto(sampling: SamplingParams) -> pb.SamplingOptions:
    """What a field that is not set means. A seed has no default: the server draws one."""
    return pb.SamplingOptions(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
    )


def _token_set_violations(
    options: pb.SamplingOptions, model: ModelInfo, limits: Limits
) -> Iterator[FieldViolation]:
    if len(options.logit_bias) > limits.max_logit_biases:
        yield FieldViolation(
            "sampling.logit_bias",
            f"must hold at most {limits.max_logit_biases} ids, got {len(options.logit_bias)}",
        )
    else:
        yield from token_id_violations("sampling.logit_bias", options.logit_bias, model)
    for name, token_ids in (
        ("allowed_token_ids", options.allowed_token_ids.ids),
        ("banned_token_ids", options.banned_token_ids.ids),
    ):
        yield from token_id_list_violations(f"sampling.{name}", token_ids, model, limits.max_listed_token_ids)


def _logprobs_violations(output: pb.OutputOptions, limits: Limits) -> Iterator[FieldViolation]:
    for name, number in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if number > limits.max_logprobs:
            yield FieldViolation(f"output.{name}", f"must be from 0 to {limits.max_logprobs}, got {number}")


def _logprobs(output: pb.OutputOptions, name: str, wrong: set[str]) -> int | None:
    number: int = getattr(output, name)
    return number if output.HasField(name) and f"output.{name}" not in wrong else None
