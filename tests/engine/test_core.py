import gc

import pytest

from headrace.engine import (
    FinishEvent,
    FinishReason,
    IntegrityError,
    RequestId,
    SamplingParams,
    TokenEvent,
)
from headrace.engine.core import EngineCore
from headrace.engine.live import LiveRequest
from headrace.engine.scheduling.plan import StepResult
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request


class Harness:
    def __init__(self, **model_options):
        self.now_s = 0.0
        self.model = make_fake_model(**model_options)
        model = self.model
        self.core = EngineCore(model.info, model.layout, model.tokenizer, make_config(), lambda: self.now_s)

    def step(self):
        plan = self.core.begin_step()
        assert plan is not None
        return self.core.finish_step(self.model.runner.execute(plan))


def test_a_step_must_be_finished_before_the_next_begins():
    h = Harness()
    h.core.add(make_request())
    assert h.core.begin_step() is not None
    with pytest.raises(IntegrityError, match="never finished"):
        h.core.begin_step()


def test_a_result_without_a_step_is_an_error():
    with pytest.raises(IntegrityError, match="no step was begun"):
        Harness().core.finish_step(StepResult(()))


def test_nothing_to_do_is_no_plan():
    assert Harness().core.begin_step() is None


def test_a_request_that_arrives_during_a_step_joins_the_next_one():
    h = Harness()
    first, second = make_request(max_tokens=3), make_request(max_tokens=3)
    h.core.add(first)
    plan = h.core.begin_step()
    assert plan is not None
    h.core.add(second)
    h.core.finish_step(h.model.runner.execute(plan))
    following = h.core.begin_step()
    assert following is not None
    assert len(following.rows) == 2


def test_text_held_back_is_told_when_the_request_is_cancelled():
    half_a_character = "é".encode()[0]
    h = Harness(choose=lambda ids, seed: half_a_character)
    request = make_request(max_tokens=5)
    h.core.add(request)
    events, _ = h.step()
    assert events == [(request.request_id, TokenEvent(0, (half_a_character,), ""))]
    events = h.core.abort([request.request_id])
    assert events[0] == (request.request_id, TokenEvent(0, (), "\N{REPLACEMENT CHARACTER}"))
    assert isinstance(events[1][1], FinishEvent)
    assert events[1][1].reason is FinishReason.CANCELLED


def test_times_are_counted_from_arrival():
    h = Harness()
    h.now_s = 100.0
    request = make_request(max_tokens=3)
    h.core.add(request)
    h.now_s = 102.0
    plan = h.core.begin_step()
    assert plan is not None
    h.now_s = 105.0
    h.core.finish_step(h.model.runner.execute(plan))
    h.step()
    h.now_s = 109.0
    events, _ = h.step()
    end = events[-1][1]
    assert isinstance(end, FinishEvent)
    assert (end.timings.queued_s, end.timings.prefill_s, end.timings.first_token_s) == (2.0, 3.0, 5.0)
    assert end.timings.decode_s == 4.0


def test_preemptions_are_counted_for_the_request_and_for_the_server():
    h = Harness(num_blocks=5, block_size=2, max_model_len=40)
    requests = [make_request(prompt_len=2, max_tokens=8) for _ in range(2)]
    for request in requests:
        h.core.add(request)
    ends: dict[RequestId, FinishEvent] = {}
    outputs: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    while h.core.has_work:
        for request_id, event in h.step()[0]:
            if isinstance(event, TokenEvent):
                outputs[request_id] += event.token_ids
            else:
                assert isinstance(event, FinishEvent)
                ends[request_id] = event
    first, second = (ends[request.request_id] for request in requests)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert h.core.load.totals.num_preemptions == 1
    for request in requests:
        assert outputs[request.request_id] == expected_output(request.prompt_token_ids, 8)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, None])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_output_does_not_depend_on_chunks_or_on_the_size_of_the_pool(chunk, num_blocks):
    model = make_fake_model(num_blocks=num_blocks, block_size=2)
    core = EngineCore(
        model.info, model.layout, model.tokenizer, make_config(max_prefill_chunk=chunk), lambda: 0.0
    )
    requests = [make_request(prompt_len=1 + i, max_tokens=12 - i) for i in range(10)]
    outputs: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        plan = core.begin_step()
        assert plan is not None
        for request_id, event in core.finish_step(model.runner.execute(plan))[0]:
            if isinstance(event, TokenEvent):
                outputs[request_id] += event.token_ids
    for request in requests:
        max_tokens = request.stop.max_tokens or 0
        assert outputs[request.request_id] == expected_output(request.prompt_token_ids, max_tokens)


def test_what_waits_to_expire_does_not_outgrow_what_is_live():
    h = Harness()
    for _ in range(1_000):
        h.core.add(make_request(max_tokens=1, deadline_s=1e9))
        h.step()
    assert not h.core.has_work
    gc.collect()  # requests of other tests are no concern of this one
    held = [entry for entry in gc.get_objects() if type(entry) is LiveRequest]
    assert len(held) < 100


@pytest.mark.parametrize(("min_tokens", "num_suppressed"), [(0, 0), (1, 1), (3, 3), (8, 8)])
def test_end_ids_are_suppressed_until_enough_tokens_are_made(min_tokens, num_suppressed):
    h = Harness()
    h.core.add(make_request(max_tokens=8, min_tokens=min_tokens, stop_token_ids=frozenset({5})))
    suppressed = []
    while h.core.has_work:
        plan = h.core.begin_step()
        assert plan is not None
        suppressed.append(plan.rows[0].suppressed_token_ids)
        h.core.finish_step(h.model.runner.execute(plan))
    assert suppressed == [{5, 257}] * num_suppressed + [frozenset()] * (8 - num_suppressed)


def test_history_travels_with_a_row_only_when_a_draw_depends_on_it():
    h = Harness()
    plain, penal = make_request(), make_request(sampling=SamplingParams(frequency_penalty=0.5))
    h.core.add(plain)
    h.core.add(penal)
    h.step()
    plan = h.core.begin_step()
    assert plan is not None
    assert plan.rows[0].known_token_ids == ()
    assert plan.rows[1].known_token_ids[:4] == penal.prompt_token_ids
    assert len(plan.rows[1].known_token_ids) == 5
    assert plan.rows[1].num_prompt_tokens == 4


def test_stop_strings_do_not_count_before_enough_tokens_are_made():
    h = Harness(choose=lambda ids, seed: ord("ab"[len(ids) % 2]))
    request = make_request(prompt_len=4, max_tokens=9, min_tokens=4, stop_strings=("ab",))
    h.core.add(request)
    text = ""
    while h.core.has_work:
        for _, event in h.step()[0]:
            if isinstance(event, TokenEvent):
                text += event.text
            else:
                assert isinstance(event, FinishEvent)
                assert event.matched_stop == "ab"
    assert text == "ab"


@pytest.mark.parametrize("start", range(8))
def test_a_stop_string_is_found_wherever_a_preemption_falls(start):
    h = Harness(num_blocks=6, block_size=2, max_model_len=40)
    older, prompt = make_request(prompt_len=2, max_tokens=10), (5, 6)
    output = bytes(expected_output(prompt, 10)).decode()
    stop = output[start : start + 3]
    request = make_request(prompt=prompt, max_tokens=10, stop_strings=(stop,))
    h.core.add(older)
    h.core.add(request)
    text, end = "", None
    while h.core.has_work:
        for request_id, event in h.step()[0]:
            if request_id != request.request_id:
                continue
            if isinstance(event, TokenEvent):
                text += event.text
            else:
                end = event
    assert text == output[: output.index(stop)]
    assert (end.reason, end.matched_stop) == (FinishReason.STOP, stop)
    # The pool has room for both until this one has made five tokens.
    assert end.num_preemptions == (start > 2), f"{end.num_preemptions} preemptions"
