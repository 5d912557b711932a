"""When requests arrive, in an open loop: whatever the server does, the next one comes when it comes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

PROCESSES = ("poisson", "constant")


def arrival_times(
    rate_per_s: float, process: str = "poisson", burstiness: float = 1.0, seed: int = 0
) -> Iterator[float]:
    """Seconds at which requests are due, from 0 on, without end.

    Args:
        rate_per_s: mean arrivals per second, above 0; infinity makes all of them due at once.
        process: "poisson": gaps are independent, drawn from a gamma distribution of mean 1 / rate;
            "constant": all gaps are equal.
        burstiness: shape of that gamma distribution. 1 is the Poisson process itself; below 1 arrivals come
            in bursts, above 1 they are more even (a gap's coefficient of variation is 1 / sqrt(burstiness)).
        seed: same seed, same times.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not rate_per_s > 0:
        raise ValueError(f"a rate of {rate_per_s:g} per second is no rate: use a number above 0, or inf")
    if process not in PROCESSES:
        raise ValueError(f"there is no arrival process {process!r}: use one of {', '.join(PROCESSES)}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"a burstiness of {burstiness:g} is out of range: use a number above 0")
    if process == "constant" and burstiness != 1.0:
        raise ValueError("constant arrivals have no burstiness: leave it out, or use poisson")
    return _times(1 / rate_per_s, process, burstiness, random.Random(seed))


def _times(mean_gap_s: float, process: str, shape: float, rng: random.Random) -> Iterator[float]:
    due_s = 0.0
    while True:
        yield due_s
        if process == "constant" or mean_gap_s == 0:
            due_s += mean_gap_s
        else:
            due_s += rng.gammavariate(shape, mean_gap_s / shape)
