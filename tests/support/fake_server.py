"""A server without an engine: real gRPC, scripted answers (see `fake_scripts`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from headrace.v1 import control_pb2, generation_pb2, model_pb2
from headrace.v1.control_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server
from headrace.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from headrace.v1.model_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from tests.support.fake_scripts import Fail, Script, echo, events_of, logprobs_of, num_sequences

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass
class Record:
    """What the server saw.

    Args:
        starts: every request, in order of arrival.
        cancelled: ids of requests that the client gave up, by message or by ending the RPC.
        half_closes: sessions that were told "no more requests".
    """

    starts: list[generation_pb2.StartGeneration] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    half_closes: int = 0
    num_sessions: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def note(self, *, cancelled: str | None = None, half_closed: bool = False) -> None:
        """Add to the record and wake who waits for it."""
        async with self._changed:
            if cancelled is not None:
                self.cancelled.append(cancelled)
            self.half_closes += half_closed
            self._changed.notify_all()

    async def until(self, is_true: Callable[[Record], bool]) -> None:
        """Wait until the record says so."""
        async with self._changed:
            await self._changed.wait_for(lambda: is_true(self))


class FakeGeneration(GenerationServiceServicer):
    """The scripted `GenerationService`; `scripts` are used up one per request, then comes `default`."""

    def __init__(self, scripts: Sequence[Script], default: Script) -> None:
        self.scripts = deque(scripts)
        self.default = default
        self.record = Record()
        self._notes: set[asyncio.Task[None]] = set()

    async def _begin(self, start: generation_pb2.StartGeneration) -> Script:
        self.record.starts.append(start)
        await self.record.note()
        return self.scripts.popleft() if self.scripts else self.default

    async def Generate(
        self,
        request: generation_pb2.GenerateRequest,
        context: Context,
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        script = await self._begin(request.start)
        is_over = False
        num_open = num_sequences(request.start)
        try:
            async for event in events_of(script, request.start):
                if isinstance(event, Fail):
                    is_over = True
                    await context.abort_with_status(rpc_status_of(event.status))
                else:
                    num_open -= event.HasField("finished")
                    is_over = num_open == 0
                    yield generation_pb2.GenerateResponse(event=event)
        finally:
            if not is_over:
                self._note_later(request.start.request_id)

    async def GenerateOnce(
        self,
        request: generation_pb2.GenerateOnceRequest,
        context: Context,
    ) -> generation_pb2.GenerateOnceResponse:
        script = await self._begin(request.start)
        response = generation_pb2.GenerateOnceResponse(request_id=request.start.request_id)
        for index in range(num_sequences(request.start)):
            response.completions.add(index=index)
        async for event in events_of(script, request.start):
            if isinstance(event, Fail):
                await context.abort_with_status(rpc_status_of(event.status))
            elif event.HasField("accepted"):
                response.accepted.CopyFrom(event.accepted)
            elif event.HasField("delta"):
                completion = response.completions[event.index]
                completion.text += event.delta.text
                completion.token_ids.extend(event.delta.token_ids)
                completion.logprobs.extend(event.delta.logprobs)
                completion.prompt_logprobs.extend(event.delta.prompt_logprobs)
            else:
                response.completions[event.index].finished.CopyFrom(event.finished)
        return response

    async def Session(
        self,
        request_iterator: AsyncIterator[generation_pb2.SessionRequest],
        context: Context,
    ) -> AsyncIterator[generation_pb2.SessionResponse]:
        self.record.num_sessions += 1
        outbox: asyncio.Queue[generation_pb2.SessionResponse | Fail | None] = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read_session(request_iterator, outbox, running))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, Fail):
                    await context.abort_with_status(rpc_status_of(message.status))
                else:
                    yield message
        finally:
            reader.cancel()
            for request_id, task in running.items():
                if task.cancel():
                    self._note_later(request_id)

    async def _read_session(
        self,
        request_iterator: AsyncIterator[generation_pb2.SessionRequest],
        outbox: asyncio.Queue[generation_pb2.SessionResponse | Fail | None],
        running: dict[str, asyncio.Task[None]],
    ) -> None:
        async for request in request_iterator:
            if request.HasField("start"):
                script = await self._begin(request.start)
                running[request.start.request_id] = asyncio.create_task(
                    self._run_in_session(script, request.start, outbox)
                )
            elif request.HasField("cancel"):
                request_id = request.cancel.request_id
                await self.record.note(cancelled=request_id)
                running[request_id].cancel()
        await self.record.note(half_closed=True)
        await asyncio.gather(*running.values())
        outbox.put_nowait(None)

    async def _run_in_session(
        self,
        script: Script,
        start: generation_pb2.StartGeneration,
        outbox: asyncio.Queue[generation_pb2.SessionResponse | Fail | None],
    ) -> None:
        sequence = 0
        try:
            async for event in events_of(script, start):
                if not isinstance(event, Fail):
                    outbox.put_nowait(generation_pb2.SessionResponse(events=[event]))
                    sequence = event.sequence + 1
                elif event.breaks_stream:
                    outbox.put_nowait(event)
                else:
                    error = generation_pb2.GenerationEvent(
                        request_id=start.request_id, sequence=sequence, error=event.status
                    )
                    outbox.put_nowait(generation_pb2.SessionResponse(events=[error]))
        except asyncio.CancelledError:
            finished = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_CANCELLED)
            for index in range(num_sequences(start)):
                end = generation_pb2.GenerationEvent(
                    request_id=start.request_id, index=index, sequence=sequence + index, finished=finished
                )
                outbox.put_nowait(generation_pb2.SessionResponse(events=[end]))

    def _note_later(self, request_id: str) -> None:
        # The caller is being cancelled, and the record's lock must be waited for.
        task = asyncio.create_task(self.record.note(cancelled=request_id))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)


class FakeModels(ModelServiceServicer):
    """One model whose token ids are the code points of the text."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self._model = model_pb2.Model(
            name="fake",
            family="llama",
            max_sequence_length=128,
            vocabulary_size=0x110000,
            end_token_ids=[0],
            dtype="float32",
            has_chat_template=has_chat_template,
            default_sampling=generation_pb2.SamplingOptions(temperature=1.0, top_p=1.0),
            kv_cache_tokens=1024,
            block_size=16,
        )

    async def GetModel(
        self,
        request: model_pb2.GetModelRequest,
        context: Context,
    ) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=self._model)

    async def ListModels(
        self,
        request: model_pb2.ListModelsRequest,
        context: Context,
    ) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self._model])

    async def Tokenize(
        self,
        request: model_pb2.TokenizeRequest,
        context: Context,
    ) -> model_pb2.TokenizeResponse:
        return model_pb2.TokenizeResponse(
            token_ids=[ord(character) for character in request.text],
            tokens=[f"U+{ord(character):04X}" for character in request.text] if request.with_tokens else [],
            texts=list(request.text) if request.with_tokens else [],
        )

    async def Detokenize(
        self,
        request: model_pb2.DetokenizeRequest,
        context: Context,
    ) -> model_pb2.DetokenizeResponse:
        return model_pb2.DetokenizeResponse(text="".join(chr(token_id) for token_id in request.token_ids))

    async def ApplyChatTemplate(
        self,
        request: model_pb2.ApplyChatTemplateRequest,
        context: Context,
    ) -> model_pb2.ApplyChatTemplateResponse:
        text = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
        return model_pb2.ApplyChatTemplateResponse(
            text=text, token_ids=[ord(character) for character in text]
        )

    async def Score(
        self,
        request: model_pb2.ScoreRequest,
        context: Context,
    ) -> model_pb2.ScoreResponse:
        ids = list(request.token_ids.ids) or [ord(character) for character in request.text]
        tokens = [logprobs_of(i, request.logprobs) for i in ids[max(1, request.num_context_tokens) :]]
        return model_pb2.ScoreResponse(
            log_likelihood=sum(entry.chosen.logprob for entry in tokens), tokens=tokens
        )


class FakeControl(ControlServiceServicer):
    """A server that has made ten steps and makes three more while it is watched."""

    async def GetLoad(
        self,
        request: control_pb2.GetLoadRequest,
        context: Context,
    ) -> control_pb2.GetLoadResponse:
        return control_pb2.GetLoadResponse(
            num_running=2,
            num_waiting=1,
            max_num_seqs=8,
            blocks=control_pb2.KvBlocks(total=10, free=7, live=3),
            totals=control_pb2.StepTotals(steps=10, rows=40, kv_slots_allocated=110, kv_slots_used=100),
            batching="continuous",
        )

    async def WatchSteps(
        self,
        request: control_pb2.WatchStepsRequest,
        context: Context,
    ) -> AsyncIterator[control_pb2.WatchStepsResponse]:
        for step in (11, 12, 13):
            yield control_pb2.WatchStepsResponse(
                step=step,
                num_running=1,
                execute_time=Duration(nanos=2_000_000),
                rows=[control_pb2.StepRow(request="a", slot=4, decode_tokens=1)],
            )

    async def Drain(
        self,
        request: control_pb2.DrainRequest,
        context: Context,
    ) -> control_pb2.DrainResponse:
        return control_pb2.DrainResponse(num_unfinished=request.grace.seconds)

    async def FlushCache(
        self,
        request: control_pb2.FlushCacheRequest,
        context: Context,
    ) -> control_pb2.FlushCacheResponse:
        return control_pb2.FlushCacheResponse(num_blocks_flushed=5)

    async def SetLatencyBudget(
        self,
        request: control_pb2.SetLatencyBudgetRequest,
        context: Context,
    ) -> control_pb2.SetLatencyBudgetResponse:
        if request.priority < 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "priority: must not be negative here")
        told = control_pb2.LatencyClass(attainable=request.time_per_output_token.ToMilliseconds() != 1)
        for name in ("priority", "time_per_output_token", "time_to_first_token"):
            if request.HasField(name) and name == "priority":
                told.priority = request.priority
            elif request.HasField(name):
                getattr(told, name).CopyFrom(getattr(request, name))
        classes = (
            [told] if not request.HasField("priority") else [control_pb2.LatencyClass(attainable=True), told]
        )
        return control_pb2.SetLatencyBudgetResponse(
            latency=control_pb2.LatencyStatus(classes=classes, num_late=2)
        )


FAKE_CONTROL = FakeControl()


@dataclass(frozen=True)
class FakeServer:
    """A running server: where it listens and what it saw."""

    target: str
    generation: FakeGeneration
    health: health.aio.HealthServicer
    server: grpc.aio.Server

    @property
    def record(self) -> Record:
        """What the server saw."""
        return self.generation.record

    async def stop(self) -> None:
        """Drop every connection now."""
        await self.server.stop(None)

    async def set_serving(self, is_serving: bool) -> None:
        """Flip the health status."""
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if is_serving else status.NOT_SERVING)


def rpc_status_of(status: status_pb2.Status) -> grpc.Status:
    """What `abort_with_status` takes."""
    converted: grpc.Status = rpc_status.to_status(status)
    return converted


@asynccontextmanager
async def running_fake_server(
    *scripts: Script,
    default: Script = echo,
    has_chat_template: bool = True,
    target: str = "127.0.0.1:0",
    control: FakeControl | None = FAKE_CONTROL,
) -> AsyncIterator[FakeServer]:
    """Serve on a free loopback port; without `control`, as a port for callers does."""
    server = grpc.aio.server()
    generation = FakeGeneration(scripts, default)
    health_servicer = health.aio.HealthServicer()
    add_GenerationServiceServicer_to_server(generation, server)
    add_ModelServiceServicer_to_server(FakeModels(has_chat_template=has_chat_template), server)
    if control is not None:
        add_ControlServiceServicer_to_server(control, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port(target)
    await server.start()
    try:
        yield FakeServer(f"127.0.0.1:{port}", generation, health_servicer, server)
    finally:
        await server.stop(None)
