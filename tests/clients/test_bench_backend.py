from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from headrace.clients.bench_backend import (
    Ask,
    Backend,
    BackendError,
    End,
    GrpcBackend,
    RequestFailedError,
    Tokens,
)
from headrace.v1 import generation_pb2 as pb
from tests.support.fake_scripts import Accept, Finish, Say, Step, fails, retry_info
from tests.support.fake_server import running_fake_server

IS_MULTIPLEXED = pytest.mark.parametrize("is_multiplexed", [True, False], ids=["session", "streams"])


async def asked(backend: Backend, ask: Ask) -> list[Tokens | End]:
    """Everything that comes back."""
    async with backend.connect() as connection:
        return [part async for part in connection.ask(ask)]


@IS_MULTIPLEXED
async def test_tokens_come_one_by_one_and_the_end_has_the_servers_counts(is_multiplexed: bool) -> None:
    async with running_fake_server() as server:
        backend = GrpcBackend(server.target, is_multiplexed=is_multiplexed)
        *tokens, end = await asked(backend, Ask("to be or", 4))
        assert tokens == [Tokens(1, "to "), Tokens(1, "be "), Tokens(1, "or "), Tokens(1, "to ")]
        assert end == End(num_prompt_tokens=3, num_tokens=4, num_cached_tokens=0)
        assert server.record.num_sessions == is_multiplexed


async def test_ids_answer_ids() -> None:
    async with running_fake_server() as server:
        *tokens, _ = await asked(GrpcBackend(server.target), Ask((5, 6), 2))
        assert tokens == [Tokens(1, (0,)), Tokens(1, (1,))]
        assert list(server.record.starts[0].token_ids.ids) == [5, 6]


async def test_a_forced_length_ignores_the_end_of_a_text() -> None:
    async with running_fake_server() as server:
        await asked(GrpcBackend(server.target, bypass_cache=True, model="fake"), Ask("x", 2))
        await asked(GrpcBackend(server.target, temperature=0.5), Ask("x", 2, is_length_forced=False))
        forced, natural = server.record.starts
    assert (forced.stop.max_tokens, forced.stop.ignore_eos, forced.cache.bypass) == (2, True, True)
    assert (forced.model, forced.sampling.temperature) == ("fake", 0.0)
    assert (natural.stop.max_tokens, natural.stop.ignore_eos, natural.cache.bypass) == (2, False, False)
    assert (natural.model, natural.sampling.temperature) == ("", 0.5)


@IS_MULTIPLEXED
async def test_a_refusal_has_its_code_and_is_not_tried_again(is_multiplexed: bool) -> None:
    refusal = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_info(0.001))
    async with running_fake_server(default=refusal) as server:
        with pytest.raises(RequestFailedError, match="full") as failure:
            await asked(GrpcBackend(server.target, is_multiplexed=is_multiplexed), Ask("x", 2))
        assert failure.value.code == "RESOURCE_EXHAUSTED"
        assert len(server.record.starts) == 1


async def test_an_answer_that_the_server_cut_short_is_a_failure() -> None:
    async def cut(start: pb.StartGeneration) -> AsyncIterator[Step]:
        yield Accept()
        yield Say("a")
        yield Finish(pb.FINISH_REASON_TIME_LIMIT)

    async with running_fake_server(default=cut) as server:
        with pytest.raises(RequestFailedError, match="time_limit"):
            await asked(GrpcBackend(server.target), Ask("x", 2))


async def test_a_server_describes_itself() -> None:
    async with running_fake_server() as server:
        described = await GrpcBackend(server.target, server.target).describe()
    assert (described.protocol, described.vocabulary_size) == ("grpc session", 0x110000)
    assert described.facts["max_num_seqs"] == 8
    model = described.facts["model"]
    assert isinstance(model, dict)
    assert model["name"] == "fake"


async def test_what_can_not_be_measured_is_said() -> None:
    async with running_fake_server() as server:
        with pytest.raises(BackendError, match="'other'; there is: fake"):
            await GrpcBackend(server.target, model="other").describe()
