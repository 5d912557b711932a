"""Times as they are written on a command line: 500ms, 60s, 5m."""

from __future__ import annotations

import math
import re

from headrace.clients.cli_outcome import USAGE, fail

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
_WRITTEN = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+) *(?P<unit>us|ms|s|min|m)?")


def duration_in(text: str, option: str) -> float:
    """Seconds of a length of time such as 60s or 5m; a bare number is seconds."""
    return _seconds(text, option, bare_is=1.0)


def latency_in(text: str, option: str) -> float:
    """Seconds of a latency such as 50ms or 0.05s. A bare number is refused: some take it for milliseconds,
    some for seconds."""
    return _seconds(text, option, bare_is=None)


def _seconds(text: str, option: str, *, bare_is: float | None) -> float:
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        fail(f"{option}: {text!r} is no time above 0: use 50ms, 0.5s or 5m", USAGE)
    number, unit = written["number"], written["unit"]
    scale = bare_is if unit is None else _UNITS[unit]
    if scale is None:
        fail(f"{option}: {text!r} has no unit: write {number}ms or {number}s", USAGE)
    value = float(number) * scale
    if not 0 < value < math.inf:
        fail(f"{option}: {text!r} is no time above 0: use 50ms, 0.5s or 5m", USAGE)
    return value
