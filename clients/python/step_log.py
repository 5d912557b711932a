"""A server's steps as lanes: which slot worked for which sequence, doing what, from which step to which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from headrace.clients.events import StepReport, StepRow


class Work(StrEnum):
    """What a slot does in a step."""

    PREFILL = "prefill"
    """Computes tokens that are known: the prompt's, or those of an answer that lost its KV."""
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring steps in which one slot did one kind of work for one sequence.

    Args:
        request, index: which sequence; the server's own id of the request.
        first_step, end_step: from the one up to, but not with, the other.
        is_finished: whether the sequence ended in the last of them.
    """

    request: str
    index: int
    slot: int
    work: Work
    first_step: int
    end_step: int
    num_tokens: int
    is_finished: bool = False

    @property
    def num_steps(self) -> int:
        """How many steps it has."""
        return self.end_step - self.first_step


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps from `first_step` up to, but not with, `end_step` that the watcher was too slow to see."""

    first_step: int
    end_step: int


@dataclass(frozen=True, slots=True)
class StepLog:
    """What was seen of a server's steps.

    Args:
        reports: in order; steps between them that are missing were not seen.
        num_slots: most sequences in one step.
        batching: "continuous" or "static".
    """

    reports: tuple[StepReport, ...]
    num_slots: int
    batching: str
    model: str = ""

    @property
    def first_step(self) -> int:
        """Number of the first step that was seen."""
        return self.reports[0].step

    @property
    def end_step(self) -> int:
        """Number behind the last step that was seen."""
        return self.reports[-1].step + 1

    @property
    def num_steps(self) -> int:
        """Steps from the first to the last, the unseen ones counted."""
        return self.end_step - self.first_step

    @property
    def num_requests(self) -> int:
        """Different requests that were seen."""
        return len({row.request for report in self.reports for row in report.rows})

    @property
    def occupancy(self) -> float:
        """Share of slots that worked, averaged over the steps that were seen."""
        return sum(len(report.rows) for report in self.reports) / (len(self.reports) * self.num_slots)

    def spans(self) -> tuple[Span, ...]:
        """All lanes, by slot and step. No span goes over steps that were not seen."""
        done: list[Span] = []
        open_in: dict[int, Span] = {}
        for report in self.reports:
            for row in report.rows:
                before = open_in.get(row.slot)
                if before is not None and _continues(before, row, report.step):
                    open_in[row.slot] = _extended(before, row)
                else:
                    if before is not None:
                        done.append(before)
                    open_in[row.slot] = _begun(row, report.step)
        done += open_in.values()
        return tuple(sorted(done, key=lambda span: (span.slot, span.first_step)))

    def gaps(self) -> tuple[Gap, ...]:
        """The steps that were not seen, between those that were."""
        return tuple(
            Gap(earlier.step + 1, later.step)
            for earlier, later in pairwise(self.reports)
            if later.step > earlier.step + 1
        )


def work_of(row: StepRow) -> Work:
    """What the slot did. The step that completes a prompt also makes the first token: it is prefill."""
    return Work.PREFILL if row.num_prefill_tokens else Work.DECODE


def requests_in_order(logs: Iterable[StepLog]) -> Sequence[str]:
    """All requests, each once, as they are first seen."""
    return list(dict.fromkeys(row.request for log in logs for report in log.reports for row in report.rows))


def short_label(request: str) -> str:
    """What the client called a request, out of the server's id of it: a number, a colon, the client's."""
    number, colon, label = request.partition(":")
    return label if colon and number.isdigit() and label else request


def _begun(row: StepRow, step: int) -> Span:
    return Span(
        request=row.request,
        index=row.index,
        slot=row.slot,
        work=work_of(row),
        first_step=step,
        end_step=step + 1,
        num_tokens=row.num_prefill_tokens + row.num_decode_tokens,
        is_finished=row.is_finished,
    )


def _continues(span: Span, row: StepRow, step: int) -> bool:
    return (
        span.end_step == step
        and (span.request, span.index, span.work) == (row.request, row.index, work_of(row))
        and not span.is_finished
    )


def _extended(span: Span, row: StepRow) -> Span:
    added = _begun(row, span.end_step)
    return Span(
        request=span.request,
        index=span.index,
        slot=span.slot,
        work=span.work,
        first_step=span.first_step,
        end_step=added.end_step,
        num_tokens=span.num_tokens + added.num_tokens,
        is_finished=added.is_finished,
    )
