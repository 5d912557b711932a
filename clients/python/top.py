"""What `headrace top` knows: figures of the last seconds, from the load and from the steps as they happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.clients.demo_report import percentile
from headrace.clients.events import KvBlocks, Load, StepReport, StepRow
from headrace.clients.step_log import Work, work_of

WINDOW_S = 5.0
"""Rates and times are those of so many last seconds."""
_HISTORY_S = 120.0
_MAX_STEPS = 2048
_MAX_SEQUENCES = 8192
_PARTS = ("step", "schedule", "execute", "update")


@dataclass(frozen=True, slots=True)
class Lane:
    """A slot and what it works on.

    Args:
        request: the server's id of it; None where the slot is idle.
        num_prefill_tokens, num_output_tokens: computed of what was known, and made, as far as it was seen.
        is_whole: whether it was seen from its beginning, so that these are all there are.
        tokens_per_s: tokens made in the last steps, per second; None where there are too few.
    """

    slot: int
    request: str | None = None
    index: int = 0
    work: Work = Work.DECODE
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    is_whole: bool = True
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class PartTime:
    """Time of one part of a step, over the last seconds: median and 99th percentile, seconds."""

    name: str
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is shown at one moment.

    Args:
        prefill_tokens_per_s, output_tokens_per_s, steps_per_s: over the last seconds; the server's own
            counts, so no step is missed. Output is what was made: with speculation several tokens of a step.
        num_preemptions: since the server's start.
        num_recent_preemptions: in the last seconds.
        parts: of the steps of the last seconds; empty where there were none.
        num_missed: steps that this watcher was too slow to see.
        lanes: one per slot.
        history: tokens per second, second by second, the newest last.
    """

    load: Load
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    steps_per_s: float
    num_preemptions: int
    num_recent_preemptions: int
    parts: tuple[PartTime, ...]
    num_missed: int
    lanes: tuple[Lane, ...]
    history: tuple[float, ...]

    @property
    def blocks(self) -> KvBlocks:
        """The KV pool."""
        return self.load.blocks

    @property
    def tokens_per_s(self) -> float:
        """Read and made."""
        return self.prefill_tokens_per_s + self.output_tokens_per_s


@dataclass(slots=True)
class _Progress:
    """One sequence as far as it was seen; `ends` are (end of a step, tokens made up to it)."""

    is_whole: bool
    num_prefill_tokens: int = 0
    num_output_tokens: int = 0
    ends: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def add(self, row: StepRow, end_s: float) -> None:
        """Take what a step did for it."""
        self.num_prefill_tokens += row.num_prefill_tokens
        self.num_output_tokens += row.num_output_tokens
        if row.num_output_tokens:
            self.ends.append((end_s, self.num_output_tokens))

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last steps."""
        if len(self.ends) < 2:
            return None
        (first_s, first), (last_s, last) = self.ends[0], self.ends[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class TopState:
    """Takes what a server tells and says how things stand. A server that was started anew begins anew."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, Load]] = deque()
        self._times: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=_MAX_STEPS)
        self._sequences: dict[tuple[str, int], _Progress] = {}
        self._last: StepReport | None = None
        self._num_missed = 0

    def take_load(self, load: Load, now_s: float) -> None:
        """Take the load.

        Args:
            now_s: monotonic moment at which it was told, seconds.
        """
        if self._loads and load.totals.num_steps < self._loads[-1][1].totals.num_steps:
            self.forget()
        self._loads.append((now_s, load))
        # One before the window's beginning stays, to count from.
        while len(self._loads) > 2 and self._loads[1][0] <= now_s - _HISTORY_S:
            self._loads.popleft()

    def take_step(self, report: StepReport, now_s: float) -> None:
        """Take what a step did."""
        last = self._last
        if last is not None and report.step <= last.step:
            self._forget_steps()
            last = None
        if last is not None:
            self._num_missed += report.step - last.step - 1
        is_gapless = last is not None and report.step == last.step + 1
        end_s = report.start_s + report.duration_s
        for row in report.rows:
            key = (row.request, row.index)
            progress = self._sequences.pop(key, None) or _Progress(is_gapless)
            progress.add(row, end_s)
            self._sequences[key] = progress  # behind those that were seen before
        while len(self._sequences) > _MAX_SEQUENCES:
            del self._sequences[next(iter(self._sequences))]
        self._last = report
        self._times.append((now_s, _times_of(report)))

    def forget(self) -> None:
        """Begin anew."""
        self._loads.clear()
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._times.clear()
        self._sequences.clear()
        self._last = None
        self._num_missed = 0

    def snapshot(self, now_s: float) -> Snapshot:
        """How things stand; a load must have been taken."""
        load = self._loads[-1][1]
        since_s, earlier = _first_since(self._loads, now_s - WINDOW_S)
        elapsed_s = self._loads[-1][0] - since_s
        added = load.totals.since(earlier.totals)

        def per_s(count: int) -> float:
            return count / elapsed_s if elapsed_s > 0 else 0.0

        return Snapshot(
            load=load,
            prefill_tokens_per_s=per_s(added.num_prefill_tokens),
            output_tokens_per_s=per_s(added.num_output_tokens),
            steps_per_s=per_s(added.num_steps),
            num_preemptions=load.totals.num_preemptions,
            num_recent_preemptions=added.num_preemptions,
            parts=_parts([times for at_s, times in self._times if at_s > now_s - WINDOW_S]),
            num_missed=self._num_missed,
            lanes=tuple(self._lanes(load)),
            history=_rates(self._loads),
        )

    def _lanes(self, load: Load) -> Iterable[Lane]:
        rows: dict[int, StepRow] = {}
        # A server without running sequences makes no step that would say so.
        if self._last is not None and load.num_running:
            rows = {row.slot: row for row in self._last.rows if not row.is_finished}
        for slot in range(load.max_num_seqs):
            row = rows.get(slot)
            if row is None:
                yield Lane(slot)
                continue
            progress = self._sequences[row.request, row.index]
            yield Lane(
                slot=slot,
                request=row.request,
                index=row.index,
                work=work_of(row),
                num_prefill_tokens=progress.num_prefill_tokens,
                num_output_tokens=progress.num_output_tokens,
                is_whole=progress.is_whole,
                tokens_per_s=progress.tokens_per_s,
            )


def _first_since(loads: Sequence[tuple[float, Load]], moment_s: float) -> tuple[float, Load]:
    """The last load before that moment, or else the first of all: what was added since is counted from it."""
    found = loads[0]
    for entry in loads:
        if entry[0] > moment_s:
            break
        found = entry
    return found


def _rates(loads: Sequence[tuple[float, Load]]) -> tuple[float, ...]:
    """Tokens per second between loads that are at least a second apart."""
    rates: list[float] = []
    since_s, earlier = loads[0]
    for at_s, load in loads:
        if at_s - since_s >= 1.0:
            added = load.totals.since(earlier.totals)
            rates.append((added.num_prefill_tokens + added.num_output_tokens) / (at_s - since_s))
            since_s, earlier = at_s, load
    return tuple(rates)


def _times_of(report: StepReport) -> tuple[float, ...]:
    """In the order of `_PARTS`."""
    return (report.duration_s, report.schedule_s, report.execute_s, report.update_s)


def _parts(times: Sequence[tuple[float, ...]]) -> tuple[PartTime, ...]:
    return tuple(
        PartTime(name, percentile(of, 0.5), percentile(of, 0.99))
        for name, of in zip(_PARTS, zip(*times, strict=True), strict=False)
    )
