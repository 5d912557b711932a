"""Python's garbage collector, in a process that serves for long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000, 10, 2)
"""Each step makes a handful of small objects per row and drops them a step later. By Python's own thresholds
they are looked through several times a step, together with all that lives longer. What a call leaves behind
is a circle of gRPC's own, five objects and a kibibyte: of calls open at one look it goes at the tenth after,
and of those open at that one soon after it. The whole is small, as what was there before the first call is
left out, and it is looked through only once a quarter of it is new."""


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Within the block, leave out what is there now, model and modules, and look at the rest less often."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
