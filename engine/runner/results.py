"""From a step's numbers on the device to what the plan's rows are told: one copy to the host, then words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from headrace.engine.sampling.logprobs import read_logprobs
from headrace.engine.scheduling.plan import RowResult, ScheduledSequence, StepPlan, StepResult
from headrace.engine.transfer import Download

_NOT_FINITE = "the model's output for this request is not finite (NaN or infinity)"
_NO_CHOICE = (
    "sampling leaves no token that could be drawn: the request's constraint, allowed and banned ids, "
    "bad words and min_tokens together forbid every one"
)
_Numbers = list[float]


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's numbers, each table in the order of the plan's rows; None where nothing is to be told.

    Args:
        tokens: (P, 3): per place of a sampled row (see `headrace.engine.runner.verification`) the token,
            whether the model is healthy, whether any token was left.
        logprobs: see `headrace.engine.sampling.logprobs.logprob_table`; places of rows that tell logprobs.
        prompt: the same for the prompt tokens that follow one of this step, slice by slice.
        failures: per sampled row why its request can't go on, known before any token was drawn.
    """

    tokens: Tensor | None = None
    logprobs: Tensor | None = None
    prompt: tuple[Tensor, ...] = ()
    failures: tuple[str | None, ...] = ()

    @property
    def token_ids(self) -> Tensor | None:
        """(P,), int64: the tokens alone."""
        return None if self.tokens is None else self.tokens[:, 0].long()


class LaunchedTables:
    """A step that was launched: its tables are on their way to the host, in its one copy. See
    `headrace.engine.runner.protocol.LaunchedStep`.

    Args:
        draft_failed: places of rows that the draft model has failed for.
        propose_s: see `StepResult`.
    """

    def __init__(
        self,
        plan: StepPlan,
        tables: StepTables,
        draft_failed: frozenset[int] = frozenset(),
        propose_s: float = 0.0,
    ) -> None:
        self._plan, self._draft_failed, self._propose_s = plan, draft_failed, propose_s
        self._failures = tables.failures
        prompt = torch.cat(tables.prompt) if tables.prompt else None
        parts = (tables.tokens, tables.logprobs, prompt)
        self._shapes = [(0, 0) if part is None else tuple(part.shape) for part in parts]
        # fp64 holds ids and ranks exactly.
        flat = [part.double().flatten() for part in parts if part is not None]
        self._download = Download(torch.cat(flat) if len(flat) > 1 else flat[0]) if flat else None

    def fetch(self) -> StepResult:
        """Wait for the tables and share them out."""
        flat = [] if self._download is None else self._download.numbers()
        tokens, logprobs, told = (iter(table) for table in _cut(flat, self._shapes))
        failures = iter(self._failures)
        results = [_row_result(row, tokens, logprobs, told, failures) for row in self._plan.rows]
        for place in self._draft_failed:
            results[place] = results[place]._replace(is_draft_failed=True)
        return StepResult(tuple(results), propose_s=self._propose_s)


def _row_result(
    row: ScheduledSequence,
    tokens: Iterator[_Numbers],
    logprobs: Iterator[_Numbers],
    told: Iterator[_Numbers],
    failures: Iterator[str | None],
) -> RowResult:
    """Take from each table what is this row's."""
    is_token_alone = row.num_logprobs is None and row.num_prompt_logprobs is None and not row.num_draft_tokens
    if row.is_sampled and is_token_alone:
        # So are nearly all rows.
        token_id, is_healthy, has_choice = next(tokens)
        failure = next(failures, None)
        if is_healthy and has_choice and failure is None:
            return RowResult((int(token_id),))
        return _failed(failure, is_healthy)
    run: list[int] = []
    is_healthy = has_choice = 1.0
    failure = None
    logprobs_of = []
    if row.is_sampled:
        failure = next(failures, None)
        num_places = row.num_draft_tokens + 1
        run, is_healthy, has_choice = _run(row.draft_token_ids, list(islice(tokens, num_places)))
        if row.num_logprobs is not None:
            told_of = list(islice(logprobs, num_places))[: len(run)]
            logprobs_of = [read_logprobs(entry, row.num_logprobs) for entry in told_of]
    prompt_of = []
    if row.num_prompt_logprobs is not None:
        num_top = row.num_prompt_logprobs
        prompt_of = [read_logprobs(next(told), num_top) for _ in range(row.num_prompt_successors)]
    is_finite = bool(is_healthy) and None not in prompt_of
    if not (is_finite and has_choice) or failure is not None:
        return _failed(failure, is_finite)
    return RowResult(
        tuple(run),
        logprobs=tuple(entry for entry in logprobs_of if entry is not None),
        prompt_logprobs=tuple(entry for entry in prompt_of if entry is not None),
        num_draft_tokens=row.num_draft_tokens,
    )


def _failed(failure: str | None, is_healthy: float) -> RowResult:
    """The outcome of a row that can't go on: for what was known of it, or since no token was left, unless the
    model is ill."""
    if not is_healthy:
        return RowResult(failure=_NOT_FINITE)
    return RowResult(failure=failure or _NO_CHOICE, is_own_doing=True)


def _run(draft_token_ids: Sequence[int], places: Sequence[_Numbers]) -> tuple[list[int], float, float]:
    """The drafts that are kept and the token behind them; whether the first place is healthy, has a choice.

    A run ends before a place that is ill: it is computed anew in the next step, as the first place, and then
    it fails there as it would without drafts.
    """
    token_id, is_healthy, has_choice = places[0]
    run = [int(token_id)]
    for draft, (token_id, *is_well) in zip(draft_token_ids, places[1:], strict=True):
        if run[-1] != draft or not all(is_well):
            break
        run.append(int(token_id))
    return run, is_healthy, has_choice


def _cut(flat: _Numbers, shapes: Sequence[tuple[int, ...]]) -> list[list[_Numbers]]:
    """The rows of each table."""
    rows: list[list[_Numbers]] = []
    first = 0
    for num_rows, width in shapes:
        rows.append([flat[first + i * width : first + (i + 1) * width] for i in range(num_rows)])
        first += num_rows * width
    return rows
