import pytest

from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.queue import SequenceQueue, WaitingQueue, rank_of
from tests.support.sequences import make_sequence

AGEING_S = 10.0


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
    queue, waiting = SequenceQueue(), Waiting()
    queue.add(make_sequence())
    waiting.add()
    for some_queue in (queue, waiting.queue):
        with pytest.raises(ValueError, match="not in this queue"):
            some_queue.remove(make_sequence())


@pytest.mark.parametrize(
    ("priority", "arrival_s", "goes_first"),
    [
        (1, 9.9, True),
        (1, 10.1, False),
        (0, 0.1, False),
        (-1, -9.9, False),
        (-1, -10.1, True),
        (3, 29.0, True),
    ],
)
def test_a_priority_is_worth_its_ageing_times_of_arrival(priority, arrival_s, goes_first):
    usual = make_sequence()
    other = make_sequence(priority=priority, arrival_s=arrival_s)
    assert (rank_of(other, AGEING_S) < rank_of(usual, AGEING_S)) == goes_first


class Waiting:
    """A waiting queue and its ledger."""

    def __init__(self, weights=None):
        self.ledger = ClientLedger(weights or {})
        self.queue = WaitingQueue(self.ledger, AGEING_S)

    def add(self, **options):
        sequence = make_sequence(**options)
        self.ledger.arrive(sequence.request.client)
        self.queue.add(sequence)
        return sequence

    def take_all(self, now_s=0.0, cost_of=lambda sequence: 0):
        """Everybody, in order, each taken out and charged as it comes."""
        taken = []
        for sequence in self.queue.in_order(now_s):
            taken.append(sequence)
            self.queue.remove(sequence)
            self.ledger.charge_prompt(sequence.request.client, cost_of(sequence))
        return taken


def test_of_one_client_and_class_the_first_is_first():
    w = Waiting()
    sequences = [w.add() for _ in range(5)]
    w.queue.remove(sequences[2])
    w.queue.add(sequences[2])
    assert w.take_all() == sequences


def test_higher_classes_go_first_and_waiting_lifts_into_them():
    w = Waiting()
    low, middle, high = w.add(priority=-1), w.add(priority=1), w.add(priority=2, arrival_s=0.0)
    assert list(w.queue.in_order(now_s=0.0)) == [high, middle, low]
    # 10 s make the middle one the equal of the high one, and it was here first.
    assert list(w.queue.in_order(now_s=9.9)) == [high, middle, low]
    assert list(w.queue.in_order(now_s=10.0)) == [middle, high, low]
    assert list(w.queue.in_order(now_s=30.0)) == [low, middle, high]


def test_nobody_is_lifted_above_the_highest_priority_that_waits():
    w = Waiting()
    old = [w.add(client="flood") for _ in range(3)]
    w.ledger.charge_prompt("flood", 10)
    w.add(client="modest", arrival_s=1e6)
    assert w.queue.class_of(old[0], now_s=1e6) == 0
    # However old the flood is, within a class the client counts that has had less.
    w.ledger.charge_prompt("flood", 10)
    assert next(w.queue.in_order(now_s=1e6)).request.client == "modest"


def test_within_a_class_the_client_that_has_had_least_is_next():
    w = Waiting()
    for client in ("a", "b", "c"):
        for _ in range(4):
            w.add(client=client, prompt_len=10)
    w.ledger.charge_prompt("b", 15)
    order = [s.request.client for s in w.take_all(cost_of=lambda s: 10)]
    # b comes in when the others have had more than its 15.
    assert order == ["a", "c", "a", "c", "b", "a", "c", "b", "a", "c", "b", "b"]


def test_shares_are_exact_by_tokens_and_weights():
    w = Waiting({"light": 1.0, "heavy": 4.0})
    for _ in range(400):
        w.add(client="light", prompt_len=5)
        w.add(client="heavy", prompt_len=20)
    served = {"light": 0, "heavy": 0}
    for sequence in w.queue.in_order(0.0):
        w.queue.remove(sequence)
        client, num_tokens = sequence.request.client, sequence.num_prompt_tokens
        w.ledger.charge_prompt(client, num_tokens)
        served[client] += num_tokens
        # The bound of the paper: no more apart than one request, by its weight.
        assert abs(served["light"] - served["heavy"] / 4) <= 5
        if served["heavy"] == 6_000:
            break
    assert served["light"] == 1_500


def test_who_is_looked_at_and_left_stays_where_it_is():
    w = Waiting()
    sequences = [w.add(client=client) for client in "abab"]
    assert list(w.queue.in_order(0.0)) == sequences
    assert len(w.queue) == 4
    seen = []
    for sequence in w.queue.in_order(0.0):
        seen.append(sequence)
        if sequence in sequences[1:3]:
            w.queue.remove(sequence)
    assert seen == sequences
    assert sorted(w.queue, key=lambda s: s.sequence_id) == [sequences[0], sequences[3]]


def test_the_queue_knows_what_it_and_each_client_may_come_to_hold():
    w = Waiting()
    first = w.add(client="a", prompt_len=3, max_tokens=7)
    w.add(client="a", prompt_len=1, max_tokens=1)
    w.add(client="b", prompt_len=5, max_tokens=5)
    assert (len(w.queue), w.queue.num_tokens) == (3, 22)
    assert (w.queue.held_by("a"), w.queue.held_by("b"), w.queue.held_by("c")) == ((2, 12), (1, 10), (0, 0))
    w.queue.remove(first)
    assert (len(w.queue), w.queue.num_tokens, w.queue.held_by("a")) == (2, 12, (1, 2))
