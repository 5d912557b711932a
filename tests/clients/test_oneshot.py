"""What `headrace generate --stats` tells."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace.v1 import generation_pb2
from tests.support.fake_scripts import Accept, Finish, Say, Step
from tests.support.fake_server import running_fake_server
from tests.support.programs import run_headrace


async def test_generate_tells_how_tokens_were_drawn_and_what_became_of_drafts() -> None:
    async def drafted(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        for word in "abcdef":
            yield Say(word)
        yield Finish(num_proposed=8, num_accepted=3)

    async with running_fake_server(default=drafted) as server:
        flags = ("--stats", "--temperature", "0.25", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.125")
        outcome = await run_headrace("generate", "hi", "-t", server.target, *flags)
    assert "3 of 8 drafts kept, 2.00 tokens per step, ended by stop" in outcome.err
    assert "temperature 0.25, top-k 5, top-p 0.5, min-p 0.125, seed 0" in outcome.err
