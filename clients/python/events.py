"""What the server tells, as frozen values. Times are seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum

from headrace.clients.latency import LatencyStatus


class FinishReason(StrEnum):
    """Why a sequence ended."""

    UNSPECIFIED = "unspecified"
    """A reason that this client does not know yet."""
    STOP = "stop"
    """An end id, a stop id or a stop text."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The options of these names in `RequestOptions` say what each of them does.

    Args:
        seed: None where the server draws one per request.
        logit_bias: (token id, what is added to its logit), by id.
        allowed_token_ids: None where every token may be drawn.
        best_of: how many sequences are made; None where nothing is said of a request.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    best_of: int | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued, and this is what it really runs with.

    Args:
        max_tokens: the cap that applies: the request's, or what context and KV pool allow.
        sampling: every value with its default filled in, the seed included.
    """

    num_prompt_tokens: int
    max_tokens: int
    sampling: Sampling
    model: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself found a token, before any sampling option.

    Args:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest; tokens of equal probability share the better rank.
        text: the token alone, U+FFFD where its bytes are no whole character.
    """

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one place, and the likeliest ones there, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sequence. Several steps may be joined in one; nothing is dropped.

    Args:
        index: which of the request's sequences.
        logprobs: one per token made, where they were asked for; an echoed prompt has none.
        prompt_logprobs: where they were asked for, one per token of the prompt but the first; they come with
            index 0, before any token made.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """What `deltas` of one sequence, at least one of them, say together."""
        return Delta(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            index=deltas[0].index,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence; `num_completion_tokens` includes the end token."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    num_draft_tokens_proposed: int = 0
    num_draft_tokens_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went on the server, seconds. None: it never came so far.

    Args:
        queued_s: arrival to the first step that computed a token of it.
        prefill_s: that step's start to the first token.
        time_to_first_token_s: arrival to the first token.
        decode_s: first token to last token.
    """

    queued_s: float | None
    prefill_s: float | None
    time_to_first_token_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """One sequence has ended.

    Args:
        matched_stop: the token id or the text that ended it, for STOP.
        num_preemptions: how often it lost its KV to others and was computed again.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    matched_stop: int | str | None = None
    num_preemptions: int = 0
    index: int = 0


Event = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole sequence: what its deltas say together, and its end."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. The properties are those of its first sequence.

    Args:
        completions: one per sequence, ordered by index.
    """

    request_id: str
    accepted: Accepted
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sequence."""
        return self.completions[0].token_ids

    @property
    def finished(self) -> Finished:
        """How the first sequence ended."""
        return self.completions[0].finished

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """How likely each token of the first sequence was, where that was asked for."""
        return self.completions[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """How likely each token of the prompt but the first was, where that was asked for."""
        return self.completions[0].prompt_logprobs


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a text.

    Args:
        log_likelihood: sum of the logprobs of the scored tokens.
        tokens: one per scored token; the last of them belongs to the last token of the text.
    """

    log_likelihood: float
    tokens: tuple[TokenLogprobs, ...]


class ServingStatus(StrEnum):
    """Whether a server takes requests."""

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    Args:
        family: architecture family, such as "llama".
        max_sequence_length: longest sequence, prompt and output together, tokens.
        end_token_ids: all ids that end a sequence.
        default_sampling: what a sampling option means when it is not given.
        num_kv_cache_tokens: tokens that the KV pool holds, for all sequences together.
        block_size: tokens per KV block.
    """

    name: str
    family: str
    max_sequence_length: int
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    num_parameters: int
    has_chat_template: bool
    default_sampling: Sampling
    num_kv_cache_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids of a text; when asked for, how the vocabulary spells them, and the text of each alone."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt that a conversation becomes."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The KV pool, the null block not counted: free + cached + live = total."""

    total: int
    free: int
    cached: int
    live: int


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all steps of the server.

    Args:
        num_rows: sequences that had a place in a step, summed over steps.
        num_kv_slots_allocated, num_kv_slots_used: KV slots of allocated blocks, and those that hold a token,
            summed over steps.
        step_s: time spent in steps.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_kv_slots_allocated: int = 0
    num_kv_slots_used: int = 0
    step_s: float = 0.0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def since(self, earlier: StepTotals) -> StepTotals:
        """What was added after `earlier`."""
        return StepTotals(
            *(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A server's load now.

    Args:
        batching: "continuous" or "static".
        model: what is served; empty where an older server doesn't say.
        uptime_s: time since the server began to take requests.
        num_paused: sequences that neither run nor wait, because their readers lag.
        num_detached: requests that no stream holds, and that may be resumed.
    """

    num_running: int
    num_waiting: int
    max_num_seqs: int
    blocks: KvBlocks
    totals: StepTotals
    batching: str
    model: str = ""
    uptime_s: float = 0.0
    latency: LatencyStatus = field(default_factory=LatencyStatus)
    num_paused: int = 0
    num_detached: int = 0


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one slot did in a step; `request` is the server's own id of the request."""

    request: str
    index: int
    slot: int
    num_prefill_tokens: int
    num_decode_tokens: int
    is_finished: bool
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Args:
        num_missed: steps that this watcher was too slow to receive, just before this one.
        start_s: when it began, counted from when the server began to take requests.
    """

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    blocks: KvBlocks
    schedule_s: float
    execute_s: float
    update_s: float
    rows: tuple[StepRow, ...]
    num_missed: int = 0
    start_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Its three parts together."""
        return self.schedule_s + self.execute_s + self.update_s
