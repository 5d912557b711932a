"""Records as OpenTelemetry's spans, sent over OTLP by a thread of its own. Needs `headrace[otel]`."""

from __future__ import annotations

from importlib import metadata

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.service.tracing import RequestRecord


class OtelTracer:
    """Makes spans of records.

    Args:
        processor: takes the finished spans.
        sample_ratio: share of the requests that are traced where their callers don't say, 0 to 1.
    """

    def __init__(self, processor: SpanProcessor, sample_ratio: float = 1.0) -> None:
        version = metadata.version("headrace")
        resource = Resource.create({"service.name": "headrace", "service.version": version})
        self._provider = TracerProvider(
            ParentBasedTraceIdRatio(sample_ratio), resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace.service", version)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord) -> None:
        """Make the spans of one request."""
        # Garbage is no parent: then the request begins a trace of its own.
        parent = self._propagator.extract({"traceparent": record.traceparent}, Context())
        span = self._tracer.start_span(
            "generate",
            parent,
            SpanKind.SERVER,
            attributes={
                "gen_ai.request.model": record.model,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_completion_tokens,
                "headrace.request_id": record.request_id,
                "headrace.client": record.client,
                "headrace.outcome": record.outcome,
                "headrace.preemptions": record.num_preemptions,
            },
            start_time=record.began_ns,
        )
        within = set_span_in_context(span, parent)
        for name, begins_ns, ends_ns in record.parts():
            self._tracer.start_span(name, within, start_time=begins_ns).end(ends_ns)
        if record.is_failure:
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        span.end(record.ended_ns)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def otlp_tracer(endpoint: str, sample_ratio: float) -> OtelTracer:
    """Traces sent to a collector.

    Args:
        endpoint: where it takes them, such as http://127.0.0.1:4318/v1/traces.
    """
    return OtelTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), sample_ratio)
