"""Requests of several sequences: one prompt, many continuations."""

import pytest

from headrace.engine import (
    AsyncEngine,
    FailureEvent,
    FinishEvent,
    FinishReason,
    InvalidRequest,
    SamplingParams,
    TokenEvent,
)
from tests.support.indexed_runner import expected_child, make_indexed_model
from tests.support.requests import make_config, make_request

BLOCK = 4


def engine_of(*, config=None, **options):
    model, _ = make_indexed_model(block_size=BLOCK, **options)
    return AsyncEngine(model, config or make_config(max_num_seqs=4))


async def collect(stream):
    """({index: ids}, {index: end}, failure)."""
    token_ids, ends, failure = {}, {}, None
    async for event in stream:
        if isinstance(event, TokenEvent):
            assert event.index not in ends
            token_ids.setdefault(event.index, []).extend(event.token_ids)
        elif isinstance(event, FinishEvent):
            ends[event.index] = event
        else:
            failure = event
    return token_ids, ends, failure


async def assert_all_given_back(engine):
    await engine.wait_idle()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)


@pytest.mark.parametrize("prompt_len", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 3])
@pytest.mark.parametrize("n", [1, 2, 6])
async def test_each_sequence_equals_one_alone_with_its_own_draws(prompt_len, n):
    async with engine_of() as engine:
        request = make_request(prompt_len=prompt_len, max_tokens=9, n=n, sampling=SamplingParams(seed=5))
        token_ids, ends, _ = await collect(engine.submit(request))
        assert sorted(ends) == list(range(n))
        for index in range(n):
            assert token_ids[index] == expected_child(request.prompt_token_ids, 9, index, seed=5)
            assert ends[index].reason is FinishReason.LENGTH
            assert ends[index].usage.num_completion_tokens == 9
        await assert_all_given_back(engine)


@pytest.mark.parametrize("uses_prefix_cache", [True, False])
async def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(uses_prefix_cache):
    async with engine_of() as engine:
        request = make_request(prompt_len=14, max_tokens=5, n=4, uses_prefix_cache=uses_prefix_cache)
        _, ends, _ = await collect(engine.submit(request))
        assert [ends[i].usage.num_cached_tokens for i in range(4)] == [0, 12, 12, 12]
        assert engine.load().totals.num_prefill_tokens == 14 + 3 * 2
        await assert_all_given_back(engine)
        assert (engine.load().blocks.cached > 0) == uses_prefix_cache


async def test_children_that_end_at_different_times_are_told_apart():
    async with engine_of() as engine:
        prompt = tuple(range(6))
        outputs = [expected_child(prompt, 12, index) for index in range(3)]
        only_in_the_second = next(i for i in outputs[1] if i not in outputs[0] + outputs[2])
        request = make_request(
            prompt=prompt,
            max_tokens=12,
            n=3,
            sampling=SamplingParams(),
            stop_token_ids=frozenset({only_in_the_second}),
        )
        token_ids, ends, _ = await collect(engine.submit(request))
        assert [ends[i].reason for i in range(3)] == [
            FinishReason.LENGTH,
            FinishReason.STOP,
            FinishReason.LENGTH,
        ]
        assert token_ids[1] == outputs[1][: outputs[1].index(only_in_the_second) + 1]
        assert (token_ids[0], token_ids[2]) == (outputs[0], outputs[2])


async def test_a_cancel_ends_the_whole_family():
    async with engine_of() as engine:
        stream = engine.submit(make_request(max_tokens=60, n=6))
        ends = []
        async for event in stream:
            if isinstance(event, TokenEvent):
                engine.abort(stream.request_id)
            else:
                ends.append((event.index, event.reason))
        assert sorted(ends) == [(i, FinishReason.CANCELLED) for i in range(6)]
        await assert_all_given_back(engine)


async def test_a_row_that_fails_fails_its_request_once():
    def fail_the_second(plan):
        if any(row.index == 1 and row.first_position > 6 for row in plan.rows):
            raise RuntimeError("bad row")

    async with engine_of(before_step=fail_the_second) as engine:
        neighbour = make_request(max_tokens=9, sampling=SamplingParams())
        other = engine.submit(neighbour)
        _, ends, failure = await collect(engine.submit(make_request(prompt_len=5, max_tokens=30, n=3)))
        assert isinstance(failure, FailureEvent)
        assert ends == {}
        assert (await collect(other))[0][0] == expected_child(neighbour.prompt_token_ids, 9, 0)
        await assert_all_given_back(engine)


async def test_a_tiny_pool_preempts_children_and_changes_nothing():
    async with engine_of(num_blocks=8) as engine:
        request = make_request(prompt_len=6, max_tokens=20, n=4, sampling=SamplingParams(seed=3))
        token_ids, ends, _ = await collect(engine.submit(request))
        assert sum(end.num_preemptions for end in ends.values()) > 0
        for index in range(4):
            assert token_ids[index] == expected_child(request.prompt_token_ids, 20, index, seed=3)
        await assert_all_given_back(engine)


async def test_best_of_tells_the_likeliest_at_the_end_best_first():
    async with engine_of() as engine:
        request = make_request(prompt_len=5, max_tokens=6, n=2, best_of=5, sampling=SamplingParams(seed=1))
        outputs = [expected_child(request.prompt_token_ids, 6, index, seed=1) for index in range(5)]
        best = sorted(outputs, key=lambda ids: sum(ids) / len(ids))[:2]
        stream = engine.submit(request)
        events = [event async for event in stream]
        assert [type(event) for event in events] == [TokenEvent, FinishEvent] * 2
        assert [list(event.token_ids) for event in events[::2]] == best
        assert [event.index for event in events[1::2]] == [0, 1]
        await assert_all_given_back(engine)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "sampling.best_of"),
        ({"best_of": 129}, "sampling.best_of"),
        ({"min_tokens": 9, "max_tokens": 8}, "stop.min_tokens"),
        ({"sampling": SamplingParams(logit_bias=((258, 1.0),))}, "sampling.logit_bias"),
        ({"sampling": SamplingParams(allowed_token_ids=frozenset({999}))}, "sampling.allowed_token_ids"),
        ({"sampling": SamplingParams(banned_token_ids=frozenset({-1}))}, "sampling.banned_token_ids"),
        ({"sampling": SamplingParams(banned_token_ids=frozenset(range(258)))}, "sampling.banned_token_ids"),
        ({"sampling": SamplingParams(bad_words=((5, 300),))}, "sampling.bad_words"),
    ],
)
async def test_counts_and_ids_that_can_not_be_are_refused(options, field):
    async with engine_of() as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(make_request(**options))
        assert [violation.field for violation in caught.value.violations] == [field]


async def test_echo_puts_the_prompt_before_every_sequence():
    async with engine_of() as engine:
        prompt = tuple(b"to be")
        request = make_request(prompt=prompt, max_tokens=4, n=2, is_echoed=True, stop_strings=("be",))
        texts, token_ids = {}, {}
        async for event in engine.submit(request):
            if isinstance(event, TokenEvent):
                texts[event.index] = texts.get(event.index, "") + event.text
                token_ids.setdefault(event.index, []).extend(event.token_ids)
            else:
                assert event.usage.num_completion_tokens == 4
        for index in range(2):
            output = expected_child(prompt, 4, index)
            assert texts[index] == "to be" + bytes(output).decode()
            assert token_ids[index] == [*prompt, *output]


async def test_the_queue_counts_sequences():
    async with engine_of(config=make_config(max_num_waiting=3)) as engine:
        with pytest.raises(Exception, match="at most 3, as many as may wait"):
            engine.submit(make_request(n=4))
        await collect(engine.submit(make_request(n=3)))
