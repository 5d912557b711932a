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
_TRIAL_SHARE = 0.01
"""So much of the time of steps may go to such trials, what the draft model has to catch up with included."""
_MOST_SAVED = 10.0
"""So many steps' time for trials may be saved up: one that takes more is not made."""
_PLAIN_EVERY = 64
"""After so many steps with drafts in a row comes one without: else what that takes would not be known."""
_LEAST_CHANCE = 0.1
"""A draft behind others is taken to be kept so often at least, whatever is known of drafts in general."""
_FEW = 16
"""A draft model that computes no more known tokens than these before it proposes shows what proposing
takes; one that computes more shows what they take."""

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
        self._saved_s = 0.0
        # The first step shows what one without drafts takes.
        self._num_drafted = _PLAIN_EVERY

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
        least_chance = 0.0
        if offers:
            seconds = self._step_seconds(len(decoding) + sum(lengths.values()), context)
            adapted = self._adapted(offers, len(decoding), context, num_tokens_left, seconds)
            if proposer.learns_by_judging:
                # What the last one of a row costs is what must be won by it.
                least_chance = self._least_chance(len(decoding), seconds)
            lengths |= adapted
        return {
            sequence: proposer.drafts(sequence, number, least_chance if sequence in offers else 0.0)
            for sequence, number in lengths.items()
            if number
        }

    def catch_up(self, sequence: Sequence, end_position: int, num_running: int) -> DraftWork | None:
        """What is to be done beside a step that brings a prompt as far as `end_position`; None for nothing.

        Args:
            num_running: sequences that share the batch: where so many leave nothing to be gained, or drafts
                are too seldom kept, a prompt's draft KV can wait.
        """
        proposer = self._proposer
        if proposer is None or self._fixed_length(sequence) == 0:
            return None
        if proposer.learns_by_judging and not self._would_pay(
            proposer.usual_chance, num_running, num_running * end_position
        ):
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
        if num_caught_up > _FEW:
            self._proposer.note_catch_up(result.propose_s, num_caught_up, num_drafts)
        elif num_drafts:
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
        proposer = self._proposer
        if proposer is None or not proposer.learns_by_judging:
            return lengths
        if any(chosen):
            self._num_drafted += 1
            if self._num_drafted > _PLAIN_EVERY:
                self._num_drafted = 0
                return dict.fromkeys(offers, 0)
        else:
            self._num_drafted = 0
        _lengthen(lengths, offers, num_tokens_left - sum(chosen))
        plain_s = seconds(0, 0)
        self._saved_s = min(self._saved_s + _TRIAL_SHARE * plain_s, _MOST_SAVED * plain_s)
        for sequence, length in lengths.items():
            pause = self._pauses.setdefault(sequence.sequence_id, _Pause())
            if not pause.is_over(length):
                continue
            trial_s = seconds(1, 1) - plain_s + proposer.seconds_to_catch_up(sequence)
            if trial_s <= self._saved_s and self._would_pay(_HOPE, num_rows, context):
                self._saved_s -= trial_s
                lengths[sequence] = 1
                pause.try_later()
        return lengths

    def _least_chance(self, num_rows: int, seconds: StepSeconds) -> float:
        """How likely a row's drafts must all be kept for the next one to be worth what it costs."""
        assert self._proposer is not None, "somebody has offered drafts"
        plain_s = seconds(0, 0)
        cost_s = num_rows * (seconds(1, 0) - plain_s) + self._proposer.seconds_per_draft
        return min(1.0, cost_s / plain_s / max(_LEAST_CHANCE, self._proposer.usual_chance))

    def _would_pay(self, chance: float, num_rows: int, context: int) -> bool:
        """Whether drafts that are kept so often would make a batch of so many rows faster."""
        offer = (chance,) * self._config.max_speculative_tokens
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


def _lengthen(
    lengths: dict[Sequence, int], offers: dict[Sequence, tuple[float, ...]], num_tokens_left: int
) -> None:
    """Give greedy rows that have drafts up to twice as many: the draft model stops where it doubts them
    itself."""
    for sequence, length in lengths.items():
        more = min(length, len(offers[sequence]) - length, num_tokens_left)
        if more > 0 and sequence.request.sampling.is_greedy:
            lengths[sequence] += more
            num_tokens_left -= more


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
        return self._num_steps >= self._every

    def try_later(self) -> None:
        """It was given one: the next comes after twice as long."""
        self._num_steps, self._every = 0, min(2 * self._every, _PROBE_EVERY_AT_MOST)


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
