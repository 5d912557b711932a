from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2

from headrace.service.edge import Edge
from headrace.service.quotas import QuotaRules, Quotas
from headrace.service.status import RpcFailure
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    detail,
    generate_ids,
    make_start,
    reason_of,
    rest_of,
    running_service,
    status_of,
    until,
)
from tests.support.step_gate import StepGate


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refusal_of(work: Callable[[], object]) -> RpcFailure:
    with pytest.raises(RpcFailure) as refusal:
        work()
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return refusal.value


def test_what_one_client_has_open_is_bounded_and_no_others_loss() -> None:
    quotas = Quotas(QuotaRules(max_requests=2, max_rpcs=1))
    first, second = quotas.request("a"), quotas.request("a")
    assert refusal_of(lambda: quotas.request("a")).reason == "REQUEST_QUOTA"
    quotas.request("b")
    first.close()
    first.close()
    quotas.request("a")
    assert refusal_of(lambda: quotas.request("a")).reason == "REQUEST_QUOTA"
    second.close()
    with quotas.rpc("a"), quotas.rpc("b"):
        assert refusal_of(lambda: quotas.rpc("a").__enter__()).reason == "RPC_QUOTA"
    with quotas.rpc("a"):
        pass


def test_tokens_come_back_by_and_by_and_the_refusal_says_when() -> None:
    clock = Clock()
    quotas = Quotas(QuotaRules(tokens_per_minute=60), clock)
    request = quotas.request("a")
    request.charge_up_to(40)
    request.charge_up_to(40)
    quotas.request("a").charge_up_to(30)
    refusal = refusal_of(lambda: quotas.request("a"))
    assert (refusal.reason, refusal.retry_after_s) == ("TOKEN_QUOTA", 11.0)
    assert refusal.quota is not None
    assert refusal.quota.subject == "client:a"
    clock.now_s = 10.0
    refusal_of(lambda: quotas.request("a"))
    clock.now_s = 11.0
    quotas.request("a")
    # A minute's tokens are the most that is saved up.
    clock.now_s = 1e6
    quotas.request("a").charge_up_to(60)
    refusal_of(lambda: quotas.request("a"))


def test_accounts_of_those_who_are_gone_are_forgotten_and_no_others() -> None:
    clock = Clock()
    quotas = Quotas(QuotaRules(max_requests=1, tokens_per_minute=60), clock)
    quotas.request("stays")
    for i in range(20_000):
        quotas.request(f"passes {i}").close()
    assert refusal_of(lambda: quotas.request("stays")).reason == "REQUEST_QUOTA"
    assert quotas.num_accounts < 10_000


async def test_a_refusal_on_the_wire_says_whose_bound_it_is_and_when_to_come_back() -> None:
    gate = StepGate()
    edge = Edge(quotas=Quotas(QuotaRules(max_requests=2, max_rpcs=3)))
    model = make_fake_model(before_step=gate, num_blocks=512)
    async with running_service(model, make_config(max_num_seqs=8), edge=edge) as service:
        session = RawSession(service.generation)
        await session.start(make_start("a"), make_start("b"), make_start("c"))
        await session.until_end_of("c")
        assert reason_of(session.events["c"][-1].error) == "REQUEST_QUOTA"
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await service.generation.GenerateOnce(GenerateOnceRequest(start=make_start()))
        status = status_of(refusal.value)
        assert reason_of(status) == "REQUEST_QUOTA"
        (violation,) = detail(status, error_details_pb2.QuotaFailure).violations
        assert violation.subject == "client:host 127.0.0.1"
        assert detail(status, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        gate.open()
        await session.until_end_of("a", "b")
        # Whatever way a request ended by, its place is free.
        for _ in range(3):
            assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        assert await session.half_close() is grpc.StatusCode.OK


@pytest.mark.parametrize("ending", ["cancel", "before it is admitted", "a bad request", "the stream breaks"])
async def test_every_way_out_gives_the_place_back(ending: str) -> None:
    edge = Edge(quotas=Quotas(QuotaRules(max_requests=1)))
    gate = StepGate()
    model = make_fake_model(before_step=gate, num_blocks=512)
    async with running_service(model, edge=edge) as service:
        if ending == "cancel":
            call = service.generation.Generate(GenerateRequest(start=make_start()))
            assert len([response async for response in rest_of(call, 1)]) == 1
            call.cancel()
        elif ending == "a bad request":
            with pytest.raises(grpc.aio.AioRpcError):
                await generate_ids(service, make_start(prompt=[1] * 127, max_tokens=50))
        else:
            session = RawSession(service.generation)
            await session.start(make_start("r"))
            if ending == "before it is admitted":
                await session.cancel("r")
                await session.until_end_of("r")
            else:
                await session.next()
            session.call.cancel()
        gate.open()
        await service.engine.wait_idle()
        await until(lambda: service.engine.load().num_waiting == 0)
        while (answer := await answer_of(service)) is None:  # noqa: ASYNC110 - the RPC's end is on its way
            await asyncio.sleep(0)
        assert answer == expected_output(PROMPT, 8)


async def answer_of(service: RunningService) -> list[int] | None:
    """A request's answer; None if its client has one too many."""
    try:
        return await generate_ids(service, make_start())
    except grpc.aio.AioRpcError as error:
        if reason_of(status_of(error)) != "REQUEST_QUOTA":
            raise
        return None
