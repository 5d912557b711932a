"""An engine over the fake model, and what tests of it do again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.engine import (
    AsyncEngine,
    EngineConfig,
    FinishEvent,
    FinishReason,
    OutputEvent,
    TokenEvent,
    TokenStream,
)
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config, make_request


async def collect(stream: TokenStream) -> tuple[list[int], str, OutputEvent]:
    """(token ids, text, last event) of a stream read to its end."""
    token_ids: list[int] = []
    text, last = "", None
    async for event in stream:
        assert last is None, "an event after the last"
        if isinstance(event, TokenEvent):
            token_ids += event.token_ids
            text += event.text
        else:
            last = event
    assert last is not None, "a stream without an end"
    return token_ids, text, last


@asynccontextmanager
async def running_engine(
    *, config: EngineConfig | None = None, **model_options: object
) -> AsyncIterator[AsyncEngine]:
    model = make_fake_model(**model_options)  # type: ignore[arg-type]  # checked by make_fake_model
    async with AsyncEngine(model, config or make_config()) as engine:
        yield engine
        if not engine.is_dead:
            # However a test ends its requests, nothing may be left behind.
            await engine.wait_idle()
            load = engine.load()
            assert (load.num_running, load.num_waiting, load.blocks.live) == (0, 0, 0)


async def assert_serves(engine: AsyncEngine) -> None:
    """The canary: a short request gets its known answer."""
    request = make_request(max_tokens=3)
    token_ids, _, last = await collect(engine.submit(request))
    assert token_ids == expected_output(request.prompt_token_ids, 3)
    assert isinstance(last, FinishEvent)
    assert last.reason is FinishReason.LENGTH
