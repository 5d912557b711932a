"""What was attained of what was promised: figures of the sequences that have ended, class by class."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from headrace.engine.config import LatencyTargets
from headrace.engine.outputs import LatencyClass
from headrace.engine.sequence import Sequence

_NUM_RECENT = 256

MOST_AIM = 0.95
"""Of a TPOT target, in what is planned: the rest is for noise, and for the way to the client."""
LEAST_AIM = 0.8
_NUM_JUDGED = 32
_MOST_MISSES = 0.05
_TIGHTER = 0.03
_LOOSER = 0.005


class TpotAim:
    """Which part of a TPOT target is planned for, by how many of the sequences that ended missed the target.

    They are judged 32 at a time: where more than one in twenty has missed it the next ones are planned more
    tightly, and where none has, a little less so again. What was planned for those that are being judged is
    a while ago, so a verdict counts once.
    """

    def __init__(self) -> None:
        self.share = MOST_AIM
        self._num_judged = 0
        self._num_missed = 0

    def note(self, *, is_missed: bool) -> None:
        """Take in a sequence that has ended."""
        self._num_judged += 1
        self._num_missed += is_missed
        if self._num_judged < _NUM_JUDGED:
            return
        if self._num_missed > _MOST_MISSES * _NUM_JUDGED:
            self.share = max(LEAST_AIM, self.share - _TIGHTER)
        elif self._num_missed == 0:
            self.share = min(MOST_AIM, self.share + _LOOSER)
        self._num_judged = self._num_missed = 0


class ClassRecord:
    """The figures of one priority class."""

    def __init__(self) -> None:
        self._tpots_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._ttfts_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_sequences = 0
        self._num_over_tpot = 0
        self._num_over_ttft = 0

    def note(self, sequence: Sequence, targets: LatencyTargets) -> bool | None:
        """Take in a sequence that has ended, with or without a token.

        Args:
            targets: what was promised to it.

        Returns:
            Whether it has missed its TPOT; None if it was promised none, or made too few tokens to have one.
        """
        first_s, last_s = sequence.first_token_s, sequence.last_token_s
        if first_s is None or last_s is None:
            return None
        self._num_sequences += 1
        # For how long its own reader has held it up is no matter of the promise.
        ttft_s = first_s - sequence.arrival_s - sequence.early_paused_s
        self._ttfts_s.append(ttft_s)
        self._num_over_ttft += targets.ttft_s is not None and ttft_s > targets.ttft_s
        num_gaps = sequence.num_output_tokens - 1
        if num_gaps <= 0:
            return None
        tpot_s = (last_s - first_s - sequence.paused_s) / num_gaps
        self._tpots_s.append(tpot_s)
        if targets.tpot_s is None:
            return None
        is_missed = tpot_s > targets.tpot_s
        self._num_over_tpot += is_missed
        return is_missed

    def forget_times(self) -> None:
        """Tell of no time that came before now, of which something else was promised; counts go on."""
        self._tpots_s.clear()
        self._ttfts_s.clear()

    def told(self, priority: int | None, targets: LatencyTargets, *, is_attainable: bool) -> LatencyClass:
        """The figures as they stand."""
        return LatencyClass(
            priority=priority,
            tpot_s=targets.tpot_s,
            ttft_s=targets.ttft_s,
            is_attainable=is_attainable,
            num_sequences=self._num_sequences,
            num_over_tpot=self._num_over_tpot,
            num_over_ttft=self._num_over_ttft,
            attained_tpot_p95_s=_p95(self._tpots_s),
            attained_ttft_p95_s=_p95(self._ttfts_s),
        )


def _p95(values: Iterable[float]) -> float | None:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None
