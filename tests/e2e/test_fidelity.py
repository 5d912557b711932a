"""The served model says, token for token, what `transformers` says: alone, batched, chunked, preempted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    EngineConfig,
    FinishEvent,
    ModelConfig,
    Request,
    SchedulerConfig,
    TokenEvent,
    load_model,
)
from headrace.engine.models.tokenizer import load_tokenizer
from tests.support.default_model import default_model_path
from tests.support.prompts import chats
from tests.support.requests import make_request

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def model_path() -> Path:
    return default_model_path()


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(model_path)
    return [tuple(tokenizer.encode_chat(tokenizer.render_chat(chat))) for chat in chats()]


@pytest.fixture(scope="module")
def reference(model_path: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What `transformers.generate` makes of each prompt alone, in fp32, end ids and all."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


async def generate(
    config: EngineConfig, requests: list[Request], at_once: int
) -> tuple[list[list[int]], int]:
    """Outputs in order, and how many preemptions it took."""
    places = asyncio.Semaphore(at_once)
    async with AsyncEngine(await asyncio.to_thread(load_model, config), config) as engine:

        async def one(request: Request) -> tuple[list[int], int]:
            async with places:
                token_ids: list[int] = []
                async for event in engine.submit(request):
                    if isinstance(event, TokenEvent):
                        token_ids += event.token_ids
                    else:
                        assert isinstance(event, FinishEvent), event
                        return token_ids, event.num_preemptions
            raise AssertionError("a stream without an end")

        outcomes = await asyncio.gather(*(one(request) for request in requests))
        await engine.wait_idle()
        assert engine.load().blocks.live == 0
    return [token_ids for token_ids, _ in outcomes], sum(n for _, n in outcomes)


@pytest.mark.parametrize(
    ("block_size", "chunk", "at_once", "num_blocks"),
    [
        pytest.param(16, None, 1, None, id="alone"),
        pytest.param(16, None, 16, None, id="batched-16"),
        pytest.param(16, 1, 16, None, id="chunks-of-1"),
        pytest.param(16, 7, 16, None, id="chunks-of-7"),
        pytest.param(16, 64, 16, None, id="chunks-of-64"),
        pytest.param(4, None, 16, None, id="blocks-of-4"),
        pytest.param(256, None, 16, None, id="blocks-of-256"),
        pytest.param(16, None, 16, 40, id="preempted"),
        pytest.param(4, 7, 16, 160, id="preempted-chunked-blocks-of-4"),
    ],
)
async def test_greedy_ids_equal_those_of_transformers(
    model_path, prompts, reference, *, block_size, chunk, at_once, num_blocks
):
    config = EngineConfig(
        model=ModelConfig(model_path, dtype="float32", max_model_len=512),
        cache=CacheConfig(
            block_size=block_size, num_blocks=num_blocks or 16 * 512 // block_size, prefix_caching=False
        ),
        scheduler=SchedulerConfig(max_num_seqs=16, max_prefill_chunk=chunk),
    )
    requests = [make_request(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    outputs, num_preemptions = await generate(config, requests, at_once)
    assert (num_preemptions > 0) == (num_blocks is not None)
    different = [i for i, (ours, theirs) in enumerate(zip(outputs, reference, strict=True)) if ours != theirs]
    assert not different, [(outputs[i], reference[i]) for i in different[:2]]


async def test_the_answer_to_a_cached_prompt_is_the_same(model_path, prompts, reference):
    config = EngineConfig(
        model=ModelConfig(model_path, dtype="float32", max_model_len=512),
        cache=CacheConfig(num_blocks=1024),
    )
    requests = [make_request(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts + prompts]
    outputs, _ = await generate(config, requests, at_once=16)
    assert outputs == reference + reference


async def test_a_seed_gives_the_same_draws_whoever_shares_the_batch(model_path, prompts):
    config = EngineConfig(
        model=ModelConfig(model_path, dtype="float32", max_model_len=512),
        cache=CacheConfig(num_blocks=512),
    )
    base = [make_request(prompt=prompt, max_tokens=24) for prompt in prompts[:16]]
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=0.8, top_p=0.95, seed=i))
        for i, request in enumerate(base)
    ]
    alone, _ = await generate(config, requests, at_once=1)
    together, _ = await generate(config, requests[::-1], at_once=16)
    assert together[::-1] == alone
