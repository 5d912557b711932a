"""What a server has of memory while it is looked at, and whether that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

MIB = 2**20
MOST_GROWTH = 0.02
"""Flat is what grows by less than this over its last half, as a share of what there is. From minute to minute
that differs by 3 %, as more or less waits to be given back: it makes 1 % of difference in such a slope."""
LEAST_S = 300.0
"""Before that heaps still grow to the size of their worst moments: nothing is judged."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look.

    Args:
        at_s: since the beginning, seconds.
        num_actions: of all clients by then.
        num_bytes: resident.
    """

    at_s: float
    num_actions: int
    num_bytes: int


@dataclass
class Growth:
    """All looks at one server."""

    looks: list[Look] = field(default_factory=list)

    @property
    def last_half(self) -> list[Look]:
        """By time."""
        if not self.looks:
            return []
        middle_s = (self.looks[0].at_s + self.looks[-1].at_s) / 2
        return [look for look in self.looks if look.at_s >= middle_s]

    @property
    def bytes_per_s(self) -> float:
        """Slope over the last half."""
        late = self.last_half
        return _slope([look.at_s for look in late], [look.num_bytes for look in late])

    @property
    def bytes_per_action(self) -> float:
        """Slope over the last half."""
        late = self.last_half
        return _slope([look.num_actions for look in late], [look.num_bytes for look in late])

    @property
    def share(self) -> float:
        """Growth over the last half by its slope, as a share of what there was in the middle of that half."""
        late = self.last_half
        if not late:
            return 0.0
        return self.bytes_per_s * (late[-1].at_s - late[0].at_s) / median(look.num_bytes for look in late)

    @property
    def is_flat(self) -> bool | None:
        """None where it was looked at for too short a time to tell."""
        if not self.looks or self.looks[-1].at_s < LEAST_S:
            return None
        return self.share < MOST_GROWTH

    def by_the_minute(self) -> list[float]:
        """MiB in each minute, the median of its looks: what is there for a moment only, until the collector
        or the next trim takes it, does not count."""
        minutes = groupby(self.looks, lambda look: int(look.at_s / 60))
        return [median(look.num_bytes for look in looks) / MIB for _, looks in minutes]

    def lines(self) -> list[str]:
        """For a person."""
        sizes = [look.num_bytes / MIB for look in self.looks]
        late, verdict = self.last_half, {True: "flat", False: "GROWING", None: "too short to tell"}
        minute, actions = 60 * self.bytes_per_s / MIB, 1000 * self.bytes_per_action / 1024
        bound = f"flat: less than {100 * MOST_GROWTH:g} % in the last half of {LEAST_S:g} s and more"
        return [
            f"memory, MiB                 {sizes[0]:.0f} first, {max(sizes):.0f} most, {sizes[-1]:.0f} last",
            f"  minute by minute          {' '.join(f'{size:.0f}' for size in self.by_the_minute())}",
            f"  growth, last half         {minute:+.2f} MiB per minute, {actions:+.0f} KiB per 1,000 actions",
            f"  in all {(late[-1].at_s - late[0].at_s) / 60:4.1f} min of it     {100 * self.share:+.2f} %",
            f"  memory is                 {verdict[self.is_flat]} ({bound})",
        ]


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """By least squares; 0 where there is none."""
    if len(xs) < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
