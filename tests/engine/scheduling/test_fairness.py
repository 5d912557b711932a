"""Token counters of clients: exact accounts, lifts, and what is forgotten."""

import pytest

from headrace.engine.errors import IntegrityError
from headrace.engine.scheduling.fairness import OUTPUT_COST, PROMPT_COST, ClientLedger


def test_a_counter_grows_by_what_is_computed_and_by_the_client_s_weight():
    ledger = ClientLedger({"half": 0.5})
    for client in ("one", "half"):
        ledger.arrive(client)
    for client in ("one", "half"):
        ledger.charge_prompt(client, 10)
        ledger.charge_output(client, 3)
    assert ledger.counter("one") == 10 * PROMPT_COST + 3 * OUTPUT_COST
    assert ledger.counter("half") == 2 * ledger.counter("one")


def test_a_newcomer_begins_with_the_least_counter_of_those_that_wait():
    ledger = ClientLedger({})
    charges = {"a": 100, "b": 70, "idle": 5}
    for client in charges:
        ledger.arrive(client)
    for client, num_tokens in charges.items():
        ledger.charge_prompt(client, num_tokens)
    ledger.stop_waiting("idle")
    ledger.arrive("new")
    assert ledger.counter("new") == 70


def test_whoever_comes_into_an_empty_queue_begins_where_the_last_one_left():
    ledger = ClientLedger({})
    ledger.arrive("a")
    ledger.charge_prompt("a", 40)
    ledger.stop_waiting("a")
    ledger.depart("a")
    assert ledger.counter("new") == 40
    ledger.arrive("new")
    assert ledger.counter("new") == 40


def test_a_client_that_had_more_than_its_share_does_not_lose_its_debt_by_going_away():
    ledger = ClientLedger({})
    for client in ("greedy", "other"):
        ledger.arrive(client)
    ledger.charge_prompt("greedy", 500)
    for client in ("greedy", "other"):
        ledger.stop_waiting(client)
        ledger.depart(client)
    ledger.arrive("other")
    ledger.arrive("greedy")
    assert (ledger.counter("greedy"), ledger.counter("other")) == (500, 0)


def test_being_away_saves_nothing_up():
    ledger = ClientLedger({})
    ledger.arrive("busy")
    ledger.charge_prompt("busy", 1_000)
    ledger.arrive("late")
    assert ledger.counter("late") == 1_000
    ledger.charge_prompt("busy", 1_000)
    # It waits all the while: what it is owed stays.
    ledger.arrive("late")
    assert ledger.counter("late") == 1_000


def test_clients_that_are_gone_are_forgotten_but_for_some():
    ledger = ClientLedger({})
    ledger.arrive("stays")
    for i in range(10_000):
        ledger.arrive(f"client {i}")
        ledger.charge_prompt(f"client {i}", 7)
        ledger.stop_waiting(f"client {i}")
        ledger.depart(f"client {i}")
    assert ledger.num_clients <= 4_097
    assert ledger.counter("client 9999") == 7
    assert ledger.counter("client 0") == 0


def test_more_ends_than_sequences_are_a_bug():
    ledger = ClientLedger({})
    ledger.arrive("a")
    ledger.stop_waiting("a")
    ledger.depart("a")
    with pytest.raises(IntegrityError, match="more ends than sequences"):
        ledger.depart("a")
