"""A request as it was asked, and the running state of the sequence that answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NewType

from headrace.engine.errors import InvalidTransition
from headrace.engine.sampling.constraint import CompiledConstraint, ConstraintMatcher, RowConstraint
from headrace.engine.sampling.params import SamplingParams

RequestId = NewType("RequestId", str)
"""Made by the server; a client's own label is scoped to its RPC and never used as a key here."""

SequenceId = NewType("SequenceId", int)
"""Made by the engine, never used twice."""

Rank = tuple[float, SequenceId]
"""A sequence's place among all, least first; see `headrace.engine.scheduling.queue`."""


class SequenceStatus(Enum):
    """Where a sequence stands. "Prefilling" and "preempted" are no states: see `Sequence`."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    """Its reader lags: nothing is computed for it until there is room for more."""
    FINISHED = auto()


_ALLOWED = {
    SequenceStatus.WAITING: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.PAUSED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.WAITING, SequenceStatus.PAUSED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PAUSED: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset[SequenceStatus](),
}


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends.

    Args:
        max_tokens: most tokens to make; None means as many as context and KV pool allow.
        token_ids: ids that end it, beside the model's own end ids.
        ignore_eos: whether the model's own end ids do not end it.
        strings: texts that end it, found across the borders of tokens; none of them empty.
        is_stop_included: whether the stop that ended it stays in the text.
        min_tokens: before so many tokens no end id is drawn and no stop string counts.
    """

    max_tokens: int | None = None
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    strings: tuple[str, ...] = ()
    is_stop_included: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What of the output is wanted.

    Args:
        wants_text: whether ids are turned into text.
        skip_special_tokens: whether special tokens are left out of the text.
        is_echoed: whether the output begins with the prompt.
    """

    wants_text: bool = True
    skip_special_tokens: bool = True
    is_echoed: bool = False


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What a caller says about speculation. It never changes the distribution of the output.

    Args:
        is_enabled: None leaves it to the server.
        num_tokens: how many tokens are proposed per step, none with 0; None leaves it to the server.
        has_own_seed: whether the request brings a seed, so that it wants to be answered alike again.
    """

    is_enabled: bool | None = None
    num_tokens: int | None = None
    has_own_seed: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether the caller wants none."""
        return self.is_enabled is False or self.num_tokens == 0

    @property
    def is_demanded(self) -> bool:
        """Whether the caller counts on it."""
        return self.is_enabled is True or bool(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked. Times are of the monotonic clock, seconds.

    Args:
        time_limit_s: longest time from arrival to the end; past it the request ends normally.
        n: how many sequences are told.
        best_of: how many are made, at least `n`; the `n` of highest mean log-probability are told at the end.
        isolation_key: KV of equal beginnings is shared only between requests of equal keys.
        uses_prefix_cache: whether it takes KV from the prefix cache and leaves its own there.
        deadline_s: moment past which nobody waits for the answer any more.
        priority: higher goes first.
        client: whose share of the server it takes; all requests of equal names are one client's.
        constraint: the form of the text, made ready by `AsyncEngine.constraints`. An end id is drawn
            where the text is complete, and there alone: where it is complete and nothing can follow, it ends,
            `min_tokens` or not. A stop string ends it wherever it comes.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions = field(default_factory=StopConditions)
    output: OutputParams = field(default_factory=OutputParams)
    time_limit_s: float | None = None
    deadline_s: float | None = None
    n: int = 1
    best_of: int = 1
    isolation_key: str = ""
    uses_prefix_cache: bool = True
    priority: int = 0
    client: str = ""
    constraint: CompiledConstraint | None = None
    speculation: SpeculationParams = SpeculationParams()


@dataclass(slots=True, eq=False)
class Sequence:
    """Running state of one sequence. Belongs to the event loop's thread.

    Args:
        token_ids: all known tokens: the prompt, then what was made.
        max_len: length at which it ends with LENGTH, tokens.
        end_token_ids: every id that ends it with STOP.
        arrival_s: when it was submitted, monotonic seconds.
        matcher: watches over the form of its text, where the request gives one.
        leader: the first sequence of the same request, if that isn't this one; the others share its prompt.
        num_computed_tokens: tokens whose KV is valid. Below `num_prompt_tokens` it is still prefilling; after
            a preemption it is 0 and everything known is computed again.
        batch_slot: its place among the `max_num_seqs`, while it runs.
        num_cached_tokens: prompt tokens whose KV was there when it was first admitted.
        num_prompt_logprobs_told: for how many places of the prompt logprobs have been told.
        num_skips: how many others behind it were admitted before it, because it did not fit yet.
        rank: its place for good; the scheduler gives it.
        sharing_key: under which key its KV is shared; None shares none; the scheduler gives it.
        num_prompt_tokens: tokens that the caller gave.
        num_logprobs: so many of the likeliest tokens are wanted beside each drawn one; None: no logprob is.
        is_plain: whether a draw depends on nothing but the KV and `sampling`, and tells of no prompt.
        is_late: whether its first token can't come in time any more, so that others go first.
        paused_s: for how long it has been paused since its first token, seconds.
        early_paused_s: for how long it was paused before its first token, seconds.
        num_draft_tokens: drafts that were judged for it; one behind the end of its text was not.
        num_accepted_draft_tokens: those of them that stand in its text.
    """

    sequence_id: SequenceId
    request: Request
    max_len: int
    end_token_ids: frozenset[int]
    arrival_s: float
    token_ids: list[int]
    index: int = 0
    matcher: ConstraintMatcher | None = None
    leader: Sequence | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_logprobs_told: int = 0
    batch_slot: int | None = None
    num_skips: int = 0
    num_preemptions: int = 0
    rank: Rank = (0.0, SequenceId(0))
    is_late: bool = False
    paused_s: float = 0.0
    early_paused_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    sharing_key: str | None = None
    num_prompt_tokens: int = field(init=False)
    num_logprobs: int | None = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        is_ranked = request.best_of > request.n
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_logprobs = 0 if is_ranked and sampling.num_logprobs is None else sampling.num_logprobs
        self.is_plain = (
            self.matcher is None
            and sampling.num_prompt_logprobs is None
            and request.stop.min_tokens == 0
            and not sampling.needs_history
            and not self.is_read_only
        )

    @property
    def suppressed_token_ids(self) -> frozenset[int]:
        """What may not be drawn next: the end ids, before `min_tokens` are made."""
        is_early = self.num_output_tokens < self.request.stop.min_tokens
        return self.end_token_ids if is_early else frozenset()

    @property
    def num_suppressed(self) -> int:
        """How many tokens have to be made before the end ids may be drawn."""
        return max(0, self.request.stop.min_tokens - self.num_output_tokens)

    @property
    def row_constraint(self) -> RowConstraint | None:
        """What says which token may be drawn next, for a request with a constraint."""
        if self.matcher is None:
            return None
        output = tuple(self.token_ids[self.num_prompt_tokens :])
        return RowConstraint(self.matcher, output, self.end_token_ids)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt, which is told once, with the request's first sequence."""
        is_told = self.index > 0 or self.num_prompt_logprobs_told >= self.num_prompt_tokens - 1
        return None if is_told else self.request.sampling.num_prompt_logprobs

    @property
    def is_waiting_for_leader(self) -> bool:
        """Whether its prompt is being computed already, by the first sequence of its request."""
        leader = self.leader
        return (
            leader is not None
            and not leader.is_finished
            and leader.num_computed_tokens < leader.num_prompt_tokens
        )

    @property
    def is_read_only(self) -> bool:
        """Whether no token is made at all: the prompt is computed for its logprobs alone."""
        return self.max_len == self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        num_known = len(self.token_ids)
        return num_known == self.num_computed_tokens + 1 and num_known > self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status is SequenceStatus.FINISHED

    @property
    def expires_s(self) -> float | None:
        """When its time limit or its deadline ends it, whichever is first; None for never."""
        limit = self.request.time_limit_s
        moments = [
            m
            for m in (self.request.deadline_s, None if limit is None else self.arrival_s + limit)
            if m is not None
        ]
        return min(moments) if moments else None

    def note_pause(self, seconds: float) -> None:
        """Count a pause that is over."""
        if self.first_token_s is None:
            self.early_paused_s += seconds
        else:
            self.paused_s += seconds

    def transition(self, new: SequenceStatus) -> None:
        """Move to `new`.

        Raises:
            InvalidTransition: a sequence's life has no such edge.
        """
        if new not in _ALLOWED[self.status]:
            raise InvalidTransition(f"sequence {self.sequence_id}: {self.status.name} -> {new.name}")
        self.status = new
