from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.service.edge import Edge
from headrace.service.otel import OtelTracer
from headrace.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    GenerateOnceRequest,
    StartGeneration,
    StopOptions,
)
from tests.support.fake_runner import make_fake_model
from tests.support.service import make_start, running_service

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "tell-nobody"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def edge(exporter: InMemorySpanExporter) -> Iterator[Edge]:
    tracer = OtelTracer(SimpleSpanProcessor(exporter))
    yield Edge(tracer=tracer)
    tracer.close()


async def test_a_request_continues_its_callers_trace_part_by_part(
    edge: Edge, exporter: InMemorySpanExporter
) -> None:
    async with running_service(edge=edge) as service:
        await service.generation.GenerateOnce(
            GenerateOnceRequest(start=make_start("mine", max_tokens=8)),
            metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),),
        )
    *parts, whole = sorted(
        exporter.get_finished_spans(), key=lambda span: (span.name == "generate", span.start_time)
    )
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert format(whole.context.trace_id, "032x") == TRACE
    assert whole.parent is not None
    assert format(whole.parent.span_id, "016x") == SPAN
    at_ns = whole.start_time
    for part in parts:
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
        assert part.start_time == at_ns
        assert part.end_time is not None
        at_ns = part.end_time
    attributes = dict(whole.attributes or {})
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (4, 8)
    assert attributes["headrace.outcome"] == "LENGTH"


@pytest.mark.parametrize("given", ["", "garbage", f"00-{TRACE}-{SPAN}", f"00-{'0' * 32}-{SPAN}-01"])
async def test_garbage_begins_a_trace_of_its_own(
    edge: Edge, exporter: InMemorySpanExporter, given: str
) -> None:
    async with running_service(edge=edge) as service:
        await service.generation.GenerateOnce(
            GenerateOnceRequest(start=make_start()), metadata=(("traceparent", given),)
        )
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "generate"]
    assert whole.parent is None


async def test_who_is_not_to_be_traced_is_not(edge: Edge, exporter: InMemorySpanExporter) -> None:
    async with running_service(edge=edge) as service:
        await service.generation.GenerateOnce(
            GenerateOnceRequest(start=make_start()), metadata=(("traceparent", f"00-{TRACE}-{SPAN}-00"),)
        )
    assert exporter.get_finished_spans() == ()


async def test_traces_hold_no_word_of_prompts_and_answers(edge: Edge, exporter: InMemorySpanExporter) -> None:
    def poisoned(plan: object) -> None:
        if is_armed:
            raise ValueError(SECRET)

    is_armed = False
    chat = ChatPrompt(messages=[ChatMessage(role="user", content=SECRET)])
    async with running_service(make_fake_model(before_step=poisoned), edge=edge) as service:
        start = StartGeneration(chat=chat, stop=StopOptions(strings=[SECRET], max_tokens=5))
        await service.generation.GenerateOnce(GenerateOnceRequest(start=start))
        is_armed = True
        with pytest.raises(grpc.aio.AioRpcError):
            await service.generation.GenerateOnce(GenerateOnceRequest(start=start))
    spans = exporter.get_finished_spans()
    failed = [span for span in spans if not span.status.is_ok and span.name == "generate"]
    assert [span.status.description for span in failed] == ["INTERNAL/REQUEST_FAILED"]
    assert SECRET not in "".join(span.to_json() for span in spans)
