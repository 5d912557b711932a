"""The whole service in this process, over a fake model and a real loopback port."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from headrace.engine import AsyncEngine, EngineConfig, LoadedModel
from headrace.service.control import Drainer
from headrace.service.edge import Edge
from headrace.service.health import Health
from headrace.service.limits import Limits
from headrace.service.server import OPEN, Endpoint, Entrance, bind, make_control_server, make_public_server
from headrace.service.serving import ServedModel, Serving
from headrace.service.text import TextWorkers
from headrace.v1.control_pb2_grpc import ControlServiceStub
from headrace.v1.generation_pb2 import (
    AcknowledgeEvents,
    CancelGeneration,
    GenerateOnceRequest,
    GenerateRequest,
    GenerateResponse,
    GenerationEvent,
    GrantCredit,
    ResumeGeneration,
    SamplingOptions,
    SessionRequest,
    SessionResponse,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from headrace.v1.model_pb2_grpc import ModelServiceStub
from tests.support.fake_runner import make_fake_model
from tests.support.requests import make_config

M = TypeVar("M", bound=Message)
GenerateCall: TypeAlias = "grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]"
SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[SessionRequest, SessionResponse]"

LOOPBACK = Endpoint("127.0.0.1", 0)
PROMPT = (104, 101, 97, 100)


@dataclass(frozen=True)
class RunningService:
    """What a test holds of a service."""

    engine: AsyncEngine
    serving: Serving
    health: Health
    address: str
    control_address: str
    generation: GenerationServiceStub
    model: ModelServiceStub
    control: ControlServiceStub
    health_stub: health_pb2_grpc.HealthStub

    async def check(self, service: str = "") -> int:
        """The health of one name."""
        response = await self.health_stub.Check(  # type: ignore[attr-defined]
            health_pb2.HealthCheckRequest(service=service)
        )
        return int(response.status)


@asynccontextmanager
async def running_service(
    model: LoadedModel | None = None,
    config: EngineConfig | None = None,
    limits: Limits | None = None,
    *,
    opens: bool = True,
    lame_duck_s: float = 0.0,
    entrance: Entrance = OPEN,
    control_entrance: Entrance = OPEN,
    edge: Edge | None = None,
    has_channelz: bool = False,
    max_connection_age_s: float | None = None,
) -> AsyncIterator[RunningService]:
    """A service on a free port, its channels open; everything is closed at the end.

    Args:
        opens: whether it serves, or stands as during a load.
        entrance, control_entrance: how its ports are entered; the stubs come in plain text, without a name.
        edge: quotas, metrics, traces.
        has_channelz: whether the operator's port offers it.
        max_connection_age_s: of connections to the callers' port; None for no limit.
    """
    limits = limits or Limits()
    health, serving = await Health.start(), Serving(edge)
    drainer = Drainer(serving, health, lame_duck_s=lame_duck_s, grace_s=5.0)
    public = make_public_server(
        serving,
        health,
        limits,
        entrance=entrance,
        max_connection_age_s=max_connection_age_s,
        has_reflection=True,
        has_channelz=has_channelz,
    )
    control = make_control_server(
        serving,
        health,
        drainer,
        limits,
        entrance=control_entrance,
        has_reflection=True,
        has_channelz=has_channelz,
    )
    address = f"127.0.0.1:{bind(public, LOOPBACK, '--port', entrance.credentials)}"
    control_port = bind(control, LOOPBACK, "--control-port", control_entrance.credentials)
    control_address = f"127.0.0.1:{control_port}"
    await public.start()
    await control.start()
    texts = TextWorkers(2, limits)
    try:
        async with AsyncEngine(model or make_fake_model(), config or make_config()) as engine:
            if opens:
                serving.open(ServedModel("fake", engine, texts, limits))
                await health.ready()
            async with (
                grpc.aio.insecure_channel(address) as channel,
                grpc.aio.insecure_channel(control_address) as control_channel,
            ):
                yield RunningService(
                    engine=engine,
                    serving=serving,
                    health=health,
                    address=address,
                    control_address=control_address,
                    generation=GenerationServiceStub(channel),
                    model=ModelServiceStub(channel),
                    control=ControlServiceStub(control_channel),
                    health_stub=health_pb2_grpc.HealthStub(channel),
                )
    finally:
        # However the block ended: what is left of a server that was not stopped holds up the tests after it.
        await public.stop(None)
        await control.stop(None)
        texts.close()


def make_start(
    request_id: str = "",
    *,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int | None = 8,
    temperature: float = 0.0,
    **fields: object,
) -> StartGeneration:
    """A request over token ids, greedy unless told otherwise.

    Args:
        fields: further fields of StartGeneration.
    """
    start = StartGeneration(
        request_id=request_id,
        token_ids=TokenIds(ids=prompt),
        sampling=SamplingOptions(temperature=temperature),
        stop=StopOptions(max_tokens=max_tokens),
    )
    start.MergeFrom(StartGeneration(**fields))  # type: ignore[arg-type]
    return start


class RawSession:
    """A Session as a client in any language speaks it."""

    def __init__(
        self,
        generation: GenerationServiceStub,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.call: SessionCall = generation.Session(timeout=timeout_s, metadata=tuple(metadata))
        self.events: dict[str, list[GenerationEvent]] = {}
        self._unread: deque[GenerationEvent] = deque()

    async def start(self, *starts: StartGeneration) -> None:
        """Send requests."""
        for start in starts:
            await self.call.write(SessionRequest(start=start))

    async def cancel(self, request_id: str) -> None:
        """Send a cancel."""
        await self.call.write(SessionRequest(cancel=CancelGeneration(request_id=request_id)))

    async def grant(self, request_id: str, tokens: int) -> None:
        """Send credit."""
        granted = GrantCredit(request_id=request_id, tokens=tokens)
        await self.call.write(SessionRequest(grant_credit=granted))

    async def resume(
        self, request_id: str, last_sequence: int | None = None, credit: int | None = None
    ) -> None:
        """Take a request up."""
        resume = ResumeGeneration(request_id=request_id, last_sequence=last_sequence, credit=credit)
        await self.call.write(SessionRequest(resume=resume))

    async def acknowledge(self, request_id: str, sequence: int) -> None:
        """Say what has been seen."""
        seen = AcknowledgeEvents(request_id=request_id, sequence=sequence)
        await self.call.write(SessionRequest(acknowledge=seen))

    async def next(self) -> GenerationEvent:
        """The next event; it is also kept."""
        while not self._unread:
            response = await self.call.read()
            assert isinstance(response, SessionResponse), "the stream has ended"
            self._unread.extend(response.events)
        return self._kept(self._unread.popleft())

    async def until_end_of(self, *labels: str) -> None:
        """Read until each of the requests has ended."""
        while not all(is_ended(self.events.get(label, [])) for label in labels):
            await self.next()

    async def half_close(self) -> grpc.StatusCode:
        """Say "no more requests" and read to the end; the stream's status."""
        await self.call.done_writing()
        while self._unread:
            self._kept(self._unread.popleft())
        # What comes before an error is kept as well.
        while isinstance(response := await self.call.read(), SessionResponse):
            for event in response.events:
                self._kept(event)
        return await self.call.code()

    def _kept(self, event: GenerationEvent) -> GenerationEvent:
        self.events.setdefault(event.request_id, []).append(event)
        return event


def is_ended(events: Sequence[GenerationEvent]) -> bool:
    """Whether the last event is an end."""
    return bool(events) and events[-1].WhichOneof("event") in ("finished", "error")


async def generate(service: RunningService, start: StartGeneration) -> list[GenerationEvent]:
    """All events of one request."""
    call = service.generation.Generate(GenerateRequest(start=start))
    return [response.event async for response in call]


async def generate_ids(service: RunningService, start: StartGeneration) -> list[int]:
    """The ids of one request, answered whole."""
    response = await service.generation.GenerateOnce(GenerateOnceRequest(start=start))
    return list(response.completions[0].token_ids)


async def rest_of(call: GenerateCall, most: int | None = None) -> AsyncIterator[GenerateResponse]:
    """The messages that are still to come, or the next `most` of them."""
    read = 0
    while most is None or read < most:
        response = await call.read()
        if not isinstance(response, GenerateResponse):
            return
        read += 1
        yield response


async def until(claim: Callable[[], bool]) -> None:
    """Let the event loop run until `claim` holds; the test's own timeout is the limit."""
    while not claim():  # noqa: ASYNC110 - nothing tells of a change in what tests look at
        await asyncio.sleep(0)


def ids_of(events: Sequence[GenerationEvent]) -> list[int]:
    """The ids that the deltas carry."""
    return [token_id for event in events for token_id in event.delta.token_ids]


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status of an RPC that failed."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    return status


def detail(status: status_pb2.Status, kind: type[M]) -> M:
    """The one detail of `kind`."""
    found = [
        packed
        for packed in status.details
        if packed.Is(kind.DESCRIPTOR)  # type: ignore[arg-type]
    ]
    assert len(found) == 1, f"{len(found)} details of {kind.__name__} in {status}"
    message = kind()
    found[0].Unpack(message)
    return message


def violated_fields(status: status_pb2.Status) -> list[str]:
    """The fields that a refusal names."""
    return [v.field for v in detail(status, error_details_pb2.BadRequest).field_violations]


def reason_of(status: status_pb2.Status) -> str:
    """The word for programs."""
    return detail(status, error_details_pb2.ErrorInfo).reason
