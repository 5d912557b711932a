import pytest

from headrace.engine.scheduling.queue import SequenceQueue
from tests.support.sequences import make_sequence


def test_a_sequence_that_comes_back_keeps_its_place():
    queue = SequenceQueue()
    first, second, third = (make_sequence() for _ in range(3))
    for sequence in (first, second, third):
        queue.add(sequence)
    queue.remove(second)
    queue.add(second)
    assert list(queue) == [first, second, third]
    assert queue.last is third


def test_iteration_is_over_a_snapshot():
    queue = SequenceQueue()
    sequences = [make_sequence() for _ in range(4)]
    for sequence in sequences:
        queue.add(sequence)
    seen = []
    for sequence in queue:
        queue.remove(sequence)
        seen.append(sequence)
    assert seen == sequences
    assert len(queue) == 0


def test_removing_a_stranger_is_an_error():
    queue = SequenceQueue()
    queue.add(make_sequence())
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove(make_sequence())
