"""Whoever goes, however and whenever, is computed for no longer; whoever stays is not kept waiting."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

import grpc
import pytest

from headrace.service.limits import Limits
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest, SessionRequest, StartGeneration
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.aftermath import until_idle
from tests.support.breakable_link import breakable_link
from tests.support.fake_runner import FakeTokenizer, expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import (
    PROMPT,
    RawSession,
    RunningService,
    generate_ids,
    ids_of,
    make_start,
    running_service,
    until,
)
from tests.support.step_gate import LONG_HOLD_S, StepGate

ENDINGS = {"cut": grpc.StatusCode.UNAVAILABLE, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED}
NEVER_REACHED = 15_000
LONG_PROMPT = tuple(i % 90 + 1 for i in range(100))


def call_of(stub: GenerationServiceStub, kind: str, start: StartGeneration, timeout_s: float | None):
    """A call of a kind that has sent its request."""
    match kind:
        case "Generate":
            return stub.Generate(GenerateRequest(start=start), timeout=timeout_s)
        case "GenerateOnce":
            return stub.GenerateOnce(GenerateOnceRequest(start=start), timeout=timeout_s)
    start.request_id = "r"
    return stub.Session(iter([SessionRequest(start=start)]), timeout=timeout_s)


async def until_begun(service: RunningService, gate: StepGate, moment: str) -> None:
    """Wait until the request that goes is where it is to be met."""
    load = service.engine.load
    match moment:
        case "queued":
            await until(lambda: load().num_waiting == 1)
        case "prefill":
            # The first of the seven chunks of its prompt is being computed.
            await until(lambda: gate.num_steps == 1)
        case "decode":
            num_before = load().totals.num_decode_tokens
            gate.open()
            await until(lambda: load().totals.num_decode_tokens > num_before + 3)


@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("way", ["cancel", "close", "cut", "freeze", "deadline"])
@pytest.mark.parametrize("kind", ["Generate", "GenerateOnce", "Session"])
async def test_a_client_that_goes_gives_back_all_it_had(kind: str, way: str, moment: str) -> None:
    gate = StepGate()
    model = make_fake_model(before_step=gate, num_blocks=4096, max_model_len=16_000)
    config = make_config(max_num_seqs=1 if moment == "queued" else 4)
    limits = Limits(keepalive_s=0.2, keepalive_timeout_s=0.2) if way == "freeze" else Limits()
    async with running_service(model, config, limits) as service:
        neighbour = asyncio.create_task(generate_ids(service, make_start(max_tokens=30)))
        if moment == "queued":
            await until(lambda: gate.num_steps == 1)
        else:
            gate.open()
            assert await neighbour == expected_output(PROMPT, 30)
            gate.shut()
            gate.num_steps = 0
        prompt = PROMPT if moment == "decode" else LONG_PROMPT
        start = make_start(prompt=prompt, max_tokens=NEVER_REACHED)
        async with (
            breakable_link(service.address) as link,
            grpc.aio.insecure_channel(
                link.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel,
        ):
            call = call_of(GenerationServiceStub(channel), kind, start, 0.3 if way == "deadline" else None)
            if way != "deadline":
                # A deadline comes when it comes, in the step that is held.
                await until_begun(service, gate, moment)
            match way:
                case "cancel":
                    call.cancel()
                case "close":
                    await channel.close()
                case "cut":
                    # As when its process is killed: the connection ends, and no word of its calls.
                    link.cut()
                case "freeze":
                    # Nobody tells the server anything: it has to ask.
                    link.freeze()
                    gate.open()
                    await until_idle(service.control)
                    call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                code = await call.code()
                assert code is ENDINGS.get(way, grpc.StatusCode.CANCELLED)
        gate.open()
        assert await neighbour == expected_output(PROMPT, 30)
        load = await until_idle(service.control)
        assert load.totals.decode_tokens < NEVER_REACHED
        assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)


class HeldTokenizer(FakeTokenizer):
    """Works on texts for as long as it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.num_held = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_held += 1
        if not self.released.wait(LONG_HOLD_S):
            raise TimeoutError("the test never released its tokenizer")
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_texts_that_take_long_hold_up_neither_health_nor_running_answers() -> None:
    tokenizer = HeldTokenizer()
    async with running_service(make_fake_model(tokenizer=tokenizer)) as service:
        long = [
            asyncio.create_task(
                generate_ids(service, StartGeneration(text="x" * 20, stop=make_start(max_tokens=2).stop))
            )
            for _ in range(8)
        ]
        await until(lambda: tokenizer.num_held > 0)
        for _ in range(20):
            assert await service.check() == 1
            assert await generate_ids(service, make_start()) == expected_output(PROMPT, 8)
        assert not any(task.done() for task in long)
        tokenizer.released.set()
        assert {len(ids) for ids in await asyncio.gather(*long)} == {2}


async def test_a_session_that_the_server_ends_is_told_of_it_while_its_client_still_sends() -> None:
    async with running_service() as service:
        session = RawSession(service.generation, timeout_s=60)
        await session.start(make_start("first"))
        await session.call.write(SessionRequest())
        # What is sent after the breach goes nowhere, and nobody waits for it.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            for i in range(500):
                await session.start(make_start(f"later{i}"))
        # A client that writes when the end has come makes INTERNAL of it by itself.
        assert await session.call.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
        await until_idle(service.control)


async def test_the_same_label_on_two_connections_means_two_requests() -> None:
    async with (
        running_service() as service,
        grpc.aio.insecure_channel(service.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
    ):
        prompts: Sequence[Sequence[int]] = (PROMPT, (1, 2, 3))
        sessions = [RawSession(service.generation), RawSession(GenerationServiceStub(other))]
        for session, prompt in zip(sessions, prompts, strict=True):
            await session.start(make_start("same", prompt=prompt, max_tokens=40))
        await sessions[0].cancel("same")
        assert [await session.half_close() for session in sessions] == [grpc.StatusCode.OK] * 2
        assert ids_of(sessions[1].events["same"]) == expected_output(prompts[1], 40)
