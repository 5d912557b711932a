"""Nobody comes past the gate without credentials: every kind of RPC, at both ports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypedDict

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.clients import ControlClient, InferenceClient, PermissionDenied, Unauthenticated
from headrace.service.auth import AuthRules
from headrace.service.identity import Role
from headrace.service.server import Entrance
from headrace.service.tls import TlsFiles
from headrace.service.token_drawing import entry_line
from headrace.v1.control_pb2 import DrainRequest, GetLoadRequest, WatchStepsRequest
from headrace.v1.control_pb2_grpc import ControlServiceStub
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest, SessionRequest
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from headrace.v1.model_pb2 import GetModelRequest
from headrace.v1.model_pb2_grpc import ModelServiceStub
from tests.support.certificates import Authority
from tests.support.fake_runner import make_fake_model
from tests.support.service import (
    RawSession,
    make_start,
    reason_of,
    running_service,
    status_of,
)
from tests.support.step_gate import StepGate

TOKEN = "hr_the-right-token"
OPERATOR = "hr_the-operators-token"
Metadata = tuple[tuple[str, str], ...]
# Stubs of three libraries, each annotated in its own way or not at all.
Call = Callable[[Any, Metadata], Awaitable[object]]


def bearer(token: str) -> Metadata:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    lines = [
        entry_line("alice", TOKEN, frozenset({Role.GENERATE})),
        entry_line("operator", OPERATOR, frozenset({Role.GENERATE, Role.CONTROL})),
    ]
    path.write_text("\n".join(lines))
    return path


class Entrances(TypedDict):
    """Both ports of a service."""

    entrance: Entrance
    control_entrance: Entrance


def entrances(tokens: Path, *, health_is_open: bool = True) -> Entrances:
    return {
        "entrance": Entrance.guarded(AuthRules(Role.GENERATE, tokens, health_is_open=health_is_open), None),
        "control_entrance": Entrance.guarded(
            AuthRules(Role.CONTROL, tokens, health_is_open=health_is_open), None
        ),
    }


def _health_stub(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def _reflection_stub(channel: Any) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel)


async def _first(call: Any) -> object:
    return await call.read()


# Every method of a port by its name: one call of it, with some metadata.
CALLS: dict[str, Call] = {
    "GenerateOnce": lambda channel, sent: GenerationServiceStub(channel).GenerateOnce(
        GenerateOnceRequest(start=make_start()), metadata=sent
    ),
    "Generate": lambda channel, sent: _first(
        GenerationServiceStub(channel).Generate(GenerateRequest(start=make_start()), metadata=sent)
    ),
    "Session": lambda channel, sent: _first(
        GenerationServiceStub(channel).Session(iter([SessionRequest(start=make_start("r"))]), metadata=sent)
    ),
    "GetModel": lambda channel, sent: ModelServiceStub(channel).GetModel(GetModelRequest(), metadata=sent),
    "reflection": lambda channel, sent: _first(
        _reflection_stub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="*")]), metadata=sent
        )
    ),
    "an unknown method": lambda channel, sent: channel.unary_unary("/headrace.v1.Nothing/Nothing")(
        b"", metadata=sent
    ),
}
HEALTH: dict[str, Call] = {
    "Check": lambda channel, sent: _health_stub(channel).Check(
        health_pb2.HealthCheckRequest(), metadata=sent
    ),
    "Watch": lambda channel, sent: _first(
        _health_stub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=sent)
    ),
}
CONTROL_CALLS: dict[str, Call] = {
    "GetLoad": lambda channel, sent: ControlServiceStub(channel).GetLoad(GetLoadRequest(), metadata=sent),
    "Drain": lambda channel, sent: ControlServiceStub(channel).Drain(DrainRequest(), metadata=sent),
    "WatchSteps": lambda channel, sent: _first(
        ControlServiceStub(channel).WatchSteps(WatchStepsRequest(), metadata=sent)
    ),
}
BAD: dict[str, Metadata] = {
    "nothing": (),
    "a wrong token": bearer("hr_another-token"),
    "an empty token": (("authorization", "Bearer "),),
    "another scheme": (("authorization", f"Basic {TOKEN}"),),
    "no scheme": (("authorization", TOKEN),),
    "two tokens": bearer(TOKEN) * 2,
    "another header": (("x-api-key", TOKEN),),
    "the token and more": (("authorization", f"Bearer {TOKEN} {TOKEN}"),),
}


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_method_is_closed_to_every_wrong_credential(tokens: Path) -> None:
    async with (
        running_service(**entrances(tokens, health_is_open=False)) as service,
        grpc.aio.insecure_channel(service.address) as callers,
        grpc.aio.insecure_channel(service.control_address) as operators,
    ):
        codes = {
            (name, bad): await code_of(call(channel, sent))
            for channel, calls in ((callers, CALLS | HEALTH), (operators, CONTROL_CALLS | HEALTH))
            for name, call in calls.items()
            for bad, sent in BAD.items()
        }
    assert {key: code for key, code in codes.items() if code is not grpc.StatusCode.UNAUTHENTICATED} == {}


async def test_the_right_token_opens_the_port_that_its_role_is_for(tokens: Path) -> None:
    async with (
        running_service(**entrances(tokens)) as service,
        grpc.aio.insecure_channel(service.address) as callers,
        grpc.aio.insecure_channel(service.control_address) as operators,
    ):
        for name, call in CALLS.items():
            expected = grpc.StatusCode.UNIMPLEMENTED if name.startswith("an unknown") else grpc.StatusCode.OK
            assert await code_of(call(callers, bearer(TOKEN))) is expected, name
        for name, call in CONTROL_CALLS.items():
            assert await code_of(call(operators, bearer(TOKEN))) is grpc.StatusCode.PERMISSION_DENIED, name
        assert await code_of(CONTROL_CALLS["GetLoad"](operators, bearer(OPERATOR))) is grpc.StatusCode.OK
        # Health, which balancers ask for without a name, is told as the rules say.
        for channel in (callers, operators):
            for call in HEALTH.values():
                assert await code_of(call(channel, ())) is grpc.StatusCode.OK
        with pytest.raises(Unauthenticated):
            async with InferenceClient(service.address, token="hr_nobody") as stranger:
                await stranger.models()
        async with InferenceClient(service.address, token=TOKEN) as client:
            assert len(await client.models()) == 1
        with pytest.raises(PermissionDenied):
            async with ControlClient(service.control_address, token=TOKEN) as control:
                await control.load()


async def test_a_refused_message_is_not_even_decoded(tokens: Path) -> None:
    async with (
        running_service(**entrances(tokens)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        call = channel.unary_unary("/headrace.v1.GenerationService/GenerateOnce")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(b"\xff no protobuf")
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reason_of(status_of(refusal.value)) == "MISSING_CREDENTIALS"


async def test_a_revoked_token_starts_nothing_more_and_what_runs_is_finished(tokens: Path) -> None:
    def revoke() -> None:
        tokens.write_text(entry_line("operator", OPERATOR, frozenset({Role.GENERATE})))

    gate = StepGate()
    async with (
        running_service(make_fake_model(before_step=gate), **entrances(tokens)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        generation = GenerationServiceStub(channel)
        session = RawSession(generation, metadata=bearer(TOKEN))
        await session.start(make_start("before"))
        assert (await session.next()).HasField("accepted")
        revoke()
        # Once a second at most the file is looked at.
        while (  # noqa: ASYNC110 - nothing tells when it is looked at
            await code_of(CALLS["GetModel"](channel, bearer(TOKEN))) is not grpc.StatusCode.UNAUTHENTICATED
        ):
            await asyncio.sleep(0.05)
        await session.start(make_start("after"))
        gate.open()
        await session.until_end_of("before", "after")
        assert session.events["before"][-1].HasField("finished")
        assert reason_of(session.events["after"][-1].error) == "CREDENTIALS_EXPIRED"
        assert await code_of(CALLS["GetModel"](channel, bearer(OPERATOR))) is grpc.StatusCode.OK


async def test_kv_is_shared_within_one_client_and_never_with_another(tokens: Path) -> None:
    prompt = list(range(1, 30))

    async def cached(generation: GenerationServiceStub, token: str) -> int:
        response = await generation.GenerateOnce(
            GenerateOnceRequest(start=make_start(prompt=prompt)), metadata=bearer(token)
        )
        return response.completions[0].finished.usage.cached_tokens

    async with (
        running_service(**entrances(tokens)) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        generation = GenerationServiceStub(channel)
        assert await cached(generation, TOKEN) == 0
        assert await cached(generation, OPERATOR) == 0
        assert await cached(generation, TOKEN) > 0
        assert await cached(generation, OPERATOR) > 0


async def test_a_certificate_alone_names_a_client_and_gives_no_right_over_the_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, own = authority.issue("server"), authority.issue("alice")
    files = TlsFiles(server.cert, server.key, authority.cert)
    caller_rules = AuthRules(Role.GENERATE, certificate_roles=frozenset({Role.GENERATE}))
    control_rules = AuthRules(Role.CONTROL, certificate_roles=frozenset())
    credentials = grpc.ssl_channel_credentials(
        *(path.read_bytes() for path in (authority.cert, own.key, own.cert))
    )
    with structlog.testing.capture_logs() as logs:
        async with (
            running_service(
                entrance=Entrance.guarded(caller_rules, files),
                control_entrance=Entrance.guarded(control_rules, files),
            ) as service,
            grpc.aio.secure_channel(service.address, credentials) as callers,
            grpc.aio.secure_channel(service.control_address, credentials) as operators,
        ):
            for name, call in CALLS.items():
                expected = grpc.StatusCode.UNIMPLEMENTED if name.startswith("an unk") else grpc.StatusCode.OK
                assert await code_of(call(callers, ())) is expected, name
            code = await code_of(CONTROL_CALLS["GetLoad"](operators, ()))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    refusals = {entry["reason"]: entry["peer"] for entry in logs if entry["event"] == "caller refused"}
    assert refusals["MISSING_ROLE"] == "127.0.0.1"
