"""What is counted and told of every request, whatever RPC it came by: quotas, metrics, traces."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.service.metrics import Metrics
from headrace.service.quotas import Quotas
from headrace.service.tracing import NoTracer, Tracer


@dataclass(frozen=True, slots=True)
class Edge:
    """One server's. As it stands: no quotas, no traces, metrics that nobody scrapes."""

    quotas: Quotas = field(default_factory=Quotas)
    metrics: Metrics = field(default_factory=Metrics)
    tracer: Tracer = field(default_factory=NoTracer)
