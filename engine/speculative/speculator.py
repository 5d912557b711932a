"""Decides in every step who gets how many drafts, and sees what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from headrace.engine.config import Speculation, SpeculationConfig
from headrace.engine.errors import ConfigError
from headrace.engine.kv.manager import KVCacheManager
from headrace.engine.scheduling.plan import DraftWork, RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.sequence import Sequence, SequenceId
from headrace.engine.speculative.draft_proposer import DraftModelProposer
from headrace.engine.speculative.length import StepSeconds, choose_lengths
from headrace.engine.speculative.prompt_lookup import PromptLookup
from headrace.engine.speculative.proposer import Drafts, Proposer

_PROBE_EVERY = 32
_PROBE_EVERY_AT_MOST = 512
_HOPE = 0.8
"""A sequence that gets no drafts is given one now and then where so high an acceptance would pay."""
_FEW = 16
"""A draft model that computes no more known tokens than these before it proposes shows what proposing
takes."""

SecondsOfDecodes = Callable[[int, int], float]
"""What a step without prompts takes: (tokens that it computes, KV tokens that it reads) -> seconds."""


class Speculator:
    """Between the scheduler and whoever proposes.

    Args:
        config: the server's limits.
        proposer: None proposes nothing to anybody.
        seconds_of: what steps cost.
    """

    def __init__(
        self, config: SpeculationConfig, proposer: Proposer | None, seconds_of: SecondsOfDecodes
    ) -> None:
        self._config = config
        self._proposer = proposer
        self._seconds_of = seconds_of
        self._pauses: dict[SequenceId, _Pause] = {}

    @property
    def is_active(self) -> bool:
        """Whether anybody proposes anything."""
        return self._proposer is not None

    def plan(self, decoding: List[Sequence], num_tokens_left: int) -> dict[Sequence, Drafts]:
        """Choose drafts for the next step.

        Args:
            decoding: the running sequences that make a token in it.
            num_tokens_left: of the step's budget, their own tokens taken off.
        """
        proposer = self._proposer
        if proposer is None or not decoding or num_tokens_left <= 0:
            return {}
        lengths: dict[Sequence, int] = {}
        offers: dict[Sequence, tuple[float, ...]] = {}
        context = sum(len(sequence.token_ids) for sequence in decoding)
        least_gain = self._least_gain(len(decoding), context)
        for sequence in decoding:
            wanted = self._fixed_length(sequence)
            # One token comes behind the drafts, so that no draft stands in the last place.
            room = min(self._config.max_speculative_tokens, sequence.max_len - len(sequence.token_ids) - 1)
            most = room if wanted is None else min(room, wanted)
            if most <= 0:
                continue
            offer = proposer.offer(sequence, most, least_gain if wanted is None else 0.0)
            if offer and wanted is None:
                offers[sequence] = offer
            elif offer:
                lengths[sequence] = min(len(offer), num_tokens_left)
                num_tokens_left -= lengths[sequence]
        if offers:
            seconds = self._step_seconds(len(decoding) + sum(lengths.values()), context)
            lengths |= self._adapted(offers, len(decoding), context, num_tokens_left, seconds)
        return {sequence: proposer.drafts(sequence, number) for sequence, number in lengths.items() if number}

    def catch_up(self, sequence: Sequence, end_position: int, num_running: int) -> DraftWork | None:
        """What is to be done beside a step that brings a prompt as far as `end_position`; None for nothing.

        Args:
            num_running: sequences that share the batch: where so many leave nothing to be gained, a prompt's
                draft KV can wait.
        """
        proposer = self._proposer
        if proposer is None or self._fixed_length(sequence) == 0:
            return None
        if proposer.learns_by_judging and not self._would_pay(num_running, num_running * end_position):
            return None
        return proposer.catch_up(sequence, end_position)

    def begin(self, sequence: Sequence) -> None:
        """A sequence has joined the batch and holds the KV that it found."""
        if self._proposer is not None:
            self._proposer.begin(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence is over."""
        if self._proposer is not None:
            self._proposer.forget(sequence)
            self._pauses.pop(sequence.sequence_id, None)

    def observe(self, sequence: Sequence, row: ScheduledSequence, outcome: RowResult) -> None:
        """See what became of a row, which has not failed; its sequence holds the tokens that were kept."""
        if self._proposer is not None:
            self._proposer.observe(sequence, row, outcome)

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        """See what a step took."""
        if self._proposer is None or result.propose_s <= 0.0:
            return
        num_drafts = max((row.num_draft_tokens for row in result.rows), default=0)
        num_caught_up = sum(len(row.draft.token_ids) for row in plan.rows if row.draft is not None)
        if num_drafts and num_caught_up <= _FEW:
            self._proposer.note_time(result.propose_s, num_drafts)

    def _fixed_length(self, sequence: Sequence) -> int | None:
        """How many drafts the request or the server wants, none with 0; None leaves it to what pays."""
        said = sequence.request.speculation
        if said.is_refused:
            return 0
        return self._config.num_speculative_tokens if said.num_tokens is None else said.num_tokens

    def _least_gain(self, num_rows: int, context: int) -> float:
        """How often a draft must be kept not to make a step of so many rows slower than it is worth."""
        seconds = self._step_seconds(num_rows, context)
        plain_s = seconds(0, 0)
        return num_rows * (seconds(1, 0) - plain_s) / plain_s

    def _adapted(
        self,
        offers: dict[Sequence, tuple[float, ...]],
        num_rows: int,
        context: int,
        num_tokens_left: int,
        seconds: StepSeconds,
    ) -> dict[Sequence, int]:
        chosen = choose_lengths(list(offers.values()), num_rows, num_tokens_left, seconds)
        lengths = dict(zip(offers, chosen, strict=True))
        if self._proposer is not None and self._proposer.learns_by_judging:
            for sequence, length in lengths.items():
                pause = self._pauses.setdefault(sequence.sequence_id, _Pause())
                if pause.is_over(length) and self._would_pay(num_rows, context):
                    lengths[sequence] = 1
        return lengths

    def _would_pay(self, num_rows: int, context: int) -> bool:
        """Whether drafts that are often kept would make a batch of so many rows faster."""
        offer = (_HOPE,) * self._config.max_speculative_tokens
        seconds = self._step_seconds(num_rows, context)
        return choose_lengths([offer] * num_rows, num_rows, len(offer) * num_rows, seconds)[0] > 0

    def _step_seconds(self, num_tokens: int, context: int) -> StepSeconds:
        """What a step takes that computes so many tokens beside the drafts: as much more for each of them."""
        per_depth = 0.0 if self._proposer is None else self._proposer.seconds_per_draft
        base = self._seconds_of(num_tokens, context)
        per_token = self._seconds_of(num_tokens + 1, context) - base

        def seconds(num_drafts: int, depth: int) -> float:
            return base + num_drafts * per_token + depth * per_depth

        return seconds


class _Pause:
    """How long a sequence has had no drafts, and when it is given one to see whether it would be kept now."""

    __slots__ = ("_every", "_num_steps")

    def __init__(self) -> None:
        self._num_steps = 0
        self._every = _PROBE_EVERY

    def is_over(self, length: int) -> bool:
        """Count a step with so many drafts; whether the next draft is due."""
        if length > 0:
            self._num_steps, self._every = 0, _PROBE_EVERY
            return False
        self._num_steps += 1
        if self._num_steps < self._every:
            return False
        self._num_steps, self._every = 0, min(2 * self._every, _PROBE_EVERY_AT_MOST)
        return True


def make_proposer(
    config: SpeculationConfig, kv: KVCacheManager, draft_max_len: int | None
) -> Proposer | None:
    """Who proposes on a server.

    Args:
        draft_max_len: longest sequence of the draft model, tokens; None where there is none.

    Raises:
        ConfigError: a draft model is to propose and none was loaded.
    """
    match config.kind:
        case Speculation.NONE:
            return None
        case Speculation.PROMPT_LOOKUP:
            return PromptLookup()
        case Speculation.DRAFT_MODEL:
            if draft_max_len is None:
                raise ConfigError(
                    "speculation=draft_model, but the model that was loaded brings no draft model"
                )
            return DraftModelProposer(kv, draft_max_len, config.max_speculative_tokens, config.draft_sampling)
