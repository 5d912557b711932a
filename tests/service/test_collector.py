from __future__ import annotations

import gc
import weakref

from headrace.service.collector import THRESHOLDS, settled_garbage


class Knot:
    """Refers to itself, so that only the collector can end it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_on_is_left_out_and_new_garbage_is_still_found() -> None:
    before = gc.get_threshold()
    num_frozen = gc.get_freeze_count()
    with settled_garbage():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
        knot = weakref.ref(Knot())
        gc.collect()
        assert knot() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
