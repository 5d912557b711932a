"""The bounds of the queue, who is let in beyond them, and how honest a refusal's time is."""

import pytest

from headrace.engine.config import SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.engine.errors import InvalidRequest, Overloaded
from headrace.engine.scheduling.admission import (
    LEAST_RETRY_S,
    MOST_RETRY_S,
    UNMEASURED_RETRY_S,
    QueueGate,
)
from headrace.engine.scheduling.fairness import ClientLedger
from headrace.engine.scheduling.queue import WaitingQueue
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request
from tests.support.sequences import make_sequence

PROMPT_LEN, MAX_TOKENS = 4, 6
LEN = PROMPT_LEN + MAX_TOKENS


class Gate:
    def __init__(self, **bounds):
        self.queue = WaitingQueue(ClientLedger({}), ageing_s=10.0)
        self.gate = QueueGate(SchedulerConfig(max_num_seqs=2, **bounds), self.queue)

    def fill(self, num, client=""):
        for _ in range(num):
            self.queue.add(make_sequence(prompt_len=PROMPT_LEN, max_tokens=MAX_TOKENS, client=client))

    def lets_in(self, client="", n=1, max_len=LEN):
        request = make_request(prompt_len=PROMPT_LEN, n=n, client=client)
        try:
            self.gate.check(request, max_len, num_running=2)
        except Overloaded:
            return False
        return True


def test_the_queue_is_bounded_by_sequences():
    gate = Gate(max_num_waiting=3)
    gate.fill(2)
    assert gate.lets_in()
    assert not gate.lets_in(n=2)
    gate.fill(1)
    assert not gate.lets_in()


def test_the_queue_is_bounded_by_tokens_prompts_and_answers_together():
    gate = Gate(max_waiting_tokens=5 * LEN)
    gate.fill(3)
    assert gate.lets_in(n=2)
    assert not gate.lets_in(n=3)
    assert not gate.lets_in(max_len=2 * LEN + 1)


@pytest.mark.parametrize(
    ("options", "max_len", "field"),
    [
        ({"n": 5}, 1, "n"),
        ({"n": 1, "best_of": 5}, 1, "sampling.best_of"),
        ({"n": 3}, 40, "n"),
        ({"n": 1, "best_of": 3}, 40, "sampling.best_of"),
        ({}, 101, "stop.max_tokens"),
    ],
)
def test_what_could_never_wait_is_an_invalid_request_and_no_overload(options, max_len, field):
    gate = Gate(max_num_waiting=4, max_waiting_tokens=100)
    with pytest.raises(InvalidRequest) as refusal:
        gate.gate.check(make_request(**options), max_len, num_running=0)
    assert [violation.field for violation in refusal.value.violations] == [field]


def test_a_client_with_little_waiting_is_let_in_beyond_the_flood_of_another():
    gate = Gate(max_num_waiting=32)
    gate.fill(32, client="flood")
    assert not gate.lets_in(client="flood")
    assert gate.lets_in(client="modest", n=2)
    assert not gate.lets_in(client="modest", n=3)
    gate.fill(2, client="modest")
    assert not gate.lets_in(client="modest")


def test_a_client_with_nothing_waiting_may_bring_one_large_request():
    gate = Gate(max_waiting_tokens=20 * LEN)
    gate.fill(20, client="flood")
    assert gate.lets_in(client="modest", max_len=9 * LEN)
    gate.fill(1, client="modest")
    assert not gate.lets_in(client="modest", max_len=LEN)


def test_many_modest_clients_do_not_make_the_queue_boundless():
    gate = Gate(max_num_waiting=32)
    for number in range(100):
        if gate.lets_in(client=f"client {number}"):
            gate.fill(1, client=f"client {number}")
    assert len(gate.queue) == 48


class Server:
    """An engine core whose steps take as long as the test says."""

    def __init__(self, *, step_s=0.5, choose=None, **limits):
        self.now_s = 0.0
        self.num_queued = 0
        self.step_s = step_s
        options = {} if choose is None else {"choose": choose}
        self.model = make_fake_model(num_blocks=200, **options)
        model = self.model
        config = make_config(max_num_seqs=4, max_num_batched_tokens=64, **limits)
        self.core = EngineCore(model.info, model.layout, model.tokenizer, config, lambda: self.now_s)

    def step(self):
        plan = self.core.begin_step()
        assert plan is not None
        self.now_s += self.step_s
        self.core.finish_step(self.model.runner.execute(plan))

    def fill(self, most):
        """Queue requests of up to so many tokens, long and short ones by turns, until one is refused."""
        lengths = (most, most // 8, most // 2, most // 3, most // 5)
        while self.refusal(max(1, lengths[self.num_queued % 5])) is None:
            self.num_queued += 1

    def refusal(self, max_tokens):
        try:
            # The same prompts in every run of the test: ends depend on them.
            prompt = tuple((self.num_queued * 7 + i) % 97 for i in range(PROMPT_LEN))
            self.core.add(make_request(prompt=prompt, max_tokens=max_tokens))
        except Overloaded as error:
            return error.retry_after_s
        return None


def test_before_anything_is_measured_a_refusal_says_the_default():
    server = Server(max_num_waiting=5)
    server.fill(8)
    assert server.refusal(8) == UNMEASURED_RETRY_S


@pytest.mark.parametrize("step_s", [0.05, 1.0])
@pytest.mark.parametrize("stops_early", [False, True])
@pytest.mark.parametrize("bound", [{"max_num_waiting": 20}, {"max_waiting_tokens": 20 * 44}])
def test_a_refusal_tells_about_when_there_is_room_again(step_s, stops_early, bound):
    """As many places are free again at the time that is told as a request over the bound needs."""

    def choose(token_ids, seed):
        # Prompts differ, so the ends are spread.
        end_after = 3 + token_ids[0] % 19
        return 257 if stops_early and len(token_ids) >= PROMPT_LEN + end_after else 97

    server = Server(step_s=step_s, choose=choose, **bound)
    for _ in range(150):
        server.fill(40)
        server.step()
    told = []
    waited = []
    for _ in range(60):
        server.fill(40)
        retry_s, refused_s = server.refusal(40), server.now_s
        assert retry_s is not None
        while server.refusal(40) is not None:
            server.step()
        told.append(retry_s)
        waited.append(server.now_s - refused_s)
    # Of a single refusal nobody can know how near the next end is; on average the time is right.
    assert sum(told) / len(told) == pytest.approx(sum(waited) / len(waited), rel=0.3)


def test_the_time_grows_with_what_is_in_the_way_and_is_bounded():
    server = Server(max_waiting_tokens=100 * 44)
    server.fill(40)
    for _ in range(30):
        server.step()
    server.fill(40)
    small, large = (server.refusal(max_tokens) for max_tokens in (40, 120))
    assert LEAST_RETRY_S <= small < large <= MOST_RETRY_S
    slow = Server(step_s=1e6, max_num_waiting=5)
    slow.fill(40)
    slow.step()
    slow.fill(40)
    assert slow.refusal(40) == MOST_RETRY_S


def test_what_has_expired_in_the_queue_is_never_computed():
    server = Server()
    busy = [make_request(prompt_len=4, max_tokens=20) for _ in range(4)]
    for request in busy:
        server.core.add(request)
    server.step()
    late = make_request(prompt_len=9, max_tokens=5, deadline_s=server.now_s + 1.0)
    limited = make_request(prompt_len=9, max_tokens=5, time_limit_s=1.0)
    server.core.add(late)
    server.core.add(limited)
    while server.core.has_work:
        server.core.expire()
        if server.core.has_work:
            server.step()
    # Prompts of the four, and nothing else but one token per step and sequence.
    assert server.core.load.totals.num_prefill_tokens == 4 * 4


def test_the_answers_of_a_full_server_are_the_usual_ones():
    server = Server(max_num_waiting=3)
    requests = [make_request(prompt_len=3, max_tokens=5) for _ in range(3)]
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        server.core.add(request)
    assert server.refusal(5) is not None
    while server.core.has_work:
        plan = server.core.begin_step()
        assert plan is not None
        for request_id, event in server.core.finish_step(server.model.runner.execute(plan))[0]:
            outputs[request_id] += getattr(event, "token_ids", ())
    for request in requests:
        assert outputs[request.request_id] == expected_output(request.prompt_token_ids, 5)
