"""What crosses from the scheduler's thread to the runner's and back: a frozen plan, a frozen result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.engine.outputs import TokenLogprobs
from headrace.engine.sampling.constraint import RowConstraint
from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sequence import SequenceId

UNKNOWN_TOKEN = -1
"""Stands where a token will stand that the step before draws."""


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What the draft model does for one row, before the target model looks at it.

    Args:
        first_position: position of the first token below: the draft model's KV is valid before it.
        token_ids: known tokens that it still has to compute; with drafts to be made, up to the newest one.
        num_drafts: how many tokens it then proposes; 0 lets it catch up only.
        is_coupled: whether they are drawn by the numbers that the target draws by, and kept where they are
            equal; if not, they are judged by rejection sampling. Makes no difference to greedy rows.
        least_chance: it stops short of `num_drafts` behind a draft where it holds all so far together less
            likely than this.
    """

    first_position: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    is_coupled: bool = True
    least_chance: float = 0.0

    @property
    def end_position(self) -> int:
        """First position after the known tokens: where its first draft goes."""
        return self.first_position + len(self.token_ids)


class ScheduledSequence(NamedTuple):
    """One row of a step: a run of tokens of one sequence. A tuple is frozen, and quicker to make than a
    frozen dataclass: there are as many in each step as sequences run.

    Args:
        first_position: position of the first token computed in this step: tokens with valid KV before it.
        token_ids: tokens to compute, at least one; known tokens first, then drafts.
        num_draft_tokens: how many of them, at the end, are drafts. Each of them is judged in this step.
        block_ids: the sequence's block table, long enough for all of `token_ids` and for `draft`'s proposals.
        is_sampled: whether a next token is drawn: this step reaches the end of the known tokens, and more
            than these are wanted.
        sampling: how it is drawn.
        index: which of the request's sequences this is; part of the key of every draw.
        num_prompt_tokens: how many of the sequence's tokens the caller gave.
        known_token_ids: all tokens up to the one that is drawn, if `sampling.needs_history` or the prompt's
            logprobs are to be told; else empty.
        suppressed_token_ids: not to be drawn this time, whatever `sampling` says.
        num_suppressed: how many tokens have to come before those may be drawn.
        num_logprobs: tell the drawn token's log-probability and those of so many likeliest; None tells none.
        num_prompt_logprobs: the same for each prompt token that follows one computed in this step.
        constraint: what says which tokens may be drawn; None when all may.
        draft: what the draft model does for this row first. The drafts that it makes join `token_ids` in the
            runner: the plan has room for them and does not know them.
        takes_from: for a row of a plan that follows another: its one token is what that one draws for its
            sampled row of this number, counted from 0. `token_ids` then holds `UNKNOWN_TOKEN`.
    """

    sequence_id: SequenceId
    first_position: int
    token_ids: tuple[int, ...]
    num_draft_tokens: int
    block_ids: tuple[int, ...]
    is_sampled: bool
    sampling: SamplingParams
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a row
    num_prompt_tokens: int = 0
    known_token_ids: tuple[int, ...] = ()
    suppressed_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    constraint: RowConstraint | None = None
    num_suppressed: int = 0
    draft: DraftWork | None = None
    takes_from: int | None = None

    @property
    def end_position(self) -> int:
        """First position after this step's tokens, drafts included: the row's KV length."""
        return self.first_position + len(self.token_ids)

    @property
    def known_end(self) -> int:
        """First position after this step's known tokens: where the first drawn token goes."""
        return self.end_position - self.num_draft_tokens

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """The drafts among the tokens."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]

    @property
    def num_planned_tokens(self) -> int:
        """Tokens that the target model computes, those that the draft model is going to propose included."""
        return len(self.token_ids) + (0 if self.draft is None else self.draft.num_drafts)

    @property
    def num_prompt_successors(self) -> int:
        """How many of this step's tokens are followed by one of the prompt: those at the front."""
        return max(0, min(self.known_end, self.num_prompt_tokens - 1) - self.first_position)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may take at most.

    Args:
        num_tokens: most tokens, prefill and decode together; at least one for every running sequence.
        max_num_seqs: nobody joins while so many run; those that run are not touched.
        max_prefill_chunk: most tokens of one sequence; None leaves it to `num_tokens`.
    """

    num_tokens: int
    max_num_seqs: int
    max_prefill_chunk: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Never empty.

    Args:
        follows: number of the step that it was planned behind before that one's tokens were known: the one
            that is launched right before it. None where all tokens are known.
    """

    step: int
    rows: tuple[ScheduledSequence, ...]
    follows: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(row.num_planned_tokens for row in self.rows)


def as_known(plan: StepPlan, drawn: Sequence[int]) -> StepPlan:
    """The plan with the tokens that the step before it has drawn, so that it can be run by itself.

    Args:
        drawn: one token for each sampled row of that step.
    """
    rows = (
        row if row.takes_from is None else row._replace(token_ids=(drawn[row.takes_from],), takes_from=None)
        for row in plan.rows
    )
    return plan if plan.follows is None else StepPlan(plan.step, tuple(rows))


def as_run(plan: StepPlan, result: StepResult) -> StepPlan:
    """The plan with as many drafts as were made: the draft model may make fewer than were planned."""
    if all(
        row.draft is None or row.draft.num_drafts == outcome.num_draft_tokens
        for row, outcome in zip(plan.rows, result.rows, strict=True)
    ):
        return plan
    rows = (
        row
        if row.draft is None
        else row._replace(draft=replace(row.draft, num_drafts=outcome.num_draft_tokens))
        for row, outcome in zip(plan.rows, result.rows, strict=True)
    )
    return StepPlan(plan.step, tuple(rows))


class RowResult(NamedTuple):
    """Outcome of one row; a tuple for the reason that a `ScheduledSequence` is one.

    Args:
        token_ids: the tokens drawn, in order: the drafts that were kept, then one more; empty when the row
            was not sampled or failed.
        logprobs: one per drawn token, when the row asks for them.
        prompt_logprobs: of the tokens at positions `first_position + 1` to the step's end or the prompt's
            last, when the row asks for them.
        failure: why the row can't go on (non-finite logits, say); None when it is healthy.
        is_own_doing: whether the request's own controls are why.
        num_draft_tokens: drafts that were judged, whoever made them.
        is_draft_failed: whether the draft model was given work for the row and could not do it. The row then
            made what it makes without drafts.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    failure: str | None = None
    is_own_doing: bool = False
    num_draft_tokens: int = 0
    is_draft_failed: bool = False

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were kept: all drawn tokens but the last, which comes behind them."""
        return max(0, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step: `rows[i]` belongs to `plan.rows[i]`.

    Args:
        propose_s: time of it that the draft model took to make its proposals, seconds.
    """

    rows: tuple[RowResult, ...]
    propose_s: float = field(default=0.0, compare=False)
