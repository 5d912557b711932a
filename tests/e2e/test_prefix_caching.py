"""Prefix caching through the whole engine: the same answers, less work, nothing shared that should not be."""

import pytest

from headrace.engine import AsyncEngine, FinishEvent, TokenEvent
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request

BLOCK = 4


async def generate(engine, prompt, **options):
    """(token ids, cached tokens)."""
    token_ids = []
    async for event in engine.submit(make_request(prompt=tuple(prompt), **options)):
        if isinstance(event, TokenEvent):
            token_ids += event.token_ids
        else:
            assert isinstance(event, FinishEvent)
            return token_ids, event.usage.num_cached_tokens
    raise AssertionError("a stream without an end")


def engine_of(**options):
    return AsyncEngine(make_fake_model(block_size=BLOCK, **options), make_config(max_num_seqs=8))


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
async def test_a_repeated_prompt_gives_the_same_answer_for_less(length):
    async with engine_of() as engine:
        prompt = range(length)
        for number in range(5):
            token_ids, num_cached = await generate(engine, prompt)
            assert token_ids == expected_output(prompt, 8)
            assert num_cached == (0 if number == 0 else (length - 1) // BLOCK * BLOCK)


async def test_turn_two_of_a_chat_finds_turn_one_answer_included():
    async with engine_of() as engine:
        first = list(range(10))
        answer, _ = await generate(engine, first, max_tokens=9)
        second = [*first, *answer, 1, 2, 3]
        token_ids, num_cached = await generate(engine, second)
        assert token_ids == expected_output(second, 8)
        # The last token of the answer was drawn, never computed.
        assert num_cached == (len(first) + len(answer) - 1) // BLOCK * BLOCK == 16


async def test_a_prompt_that_differs_early_finds_only_what_comes_before():
    async with engine_of() as engine:
        prompt = list(range(14))
        await generate(engine, prompt)
        changed = [*prompt[:5], prompt[5] + 31, prompt[6] - 1, *prompt[7:]]
        token_ids, num_cached = await generate(engine, changed)
        assert token_ids == expected_output(changed, 8)
        assert num_cached == BLOCK


async def test_tenants_share_nothing_and_each_hits_its_own():
    async with engine_of() as engine:
        prompt = range(20)
        assert (await generate(engine, prompt, isolation_key="x"))[1] == 0
        assert (await generate(engine, prompt, isolation_key="y"))[1] == 0
        assert (await generate(engine, prompt, isolation_key="x"))[1] == 16


async def test_bypass_neither_takes_nor_leaves():
    async with engine_of() as engine:
        prompt = range(20)
        await generate(engine, prompt, uses_prefix_cache=False)
        assert engine.load().blocks.cached == 0
        assert (await generate(engine, prompt))[1] == 0
        assert (await generate(engine, prompt, uses_prefix_cache=False))[1] == 0


async def test_flushing_makes_the_next_one_cold():
    async with engine_of() as engine:
        prompt = range(20)
        await generate(engine, prompt)
        cached = engine.load().blocks.cached
        assert cached == engine.flush_cache() > 0
        assert (await generate(engine, prompt))[1] == 0


async def test_what_a_failed_row_has_written_is_shared_with_nobody():
    failing = {"now": True}

    def fail_the_second_step(plan):
        if failing["now"] and plan.rows[0].first_position >= 12:
            raise RuntimeError("bad row")

    async with engine_of(before_step=fail_the_second_step) as engine:
        prompt = range(12)
        events = [event async for event in engine.submit(make_request(prompt=tuple(prompt), max_tokens=5))]
        assert not isinstance(events[-1], FinishEvent)
        assert engine.load().blocks.cached == 0
        failing["now"] = False
        assert (await generate(engine, prompt))[1] == 0
