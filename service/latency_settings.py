"""Settings of promised latencies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from headrace.engine import MAX_LATENCY_TARGET_S, MIN_LATENCY_TARGET_S, LatencyConfig, LatencyTargets
from headrace.service.limits import Limits

_MS = 1e-3

Milliseconds = Annotated[
    float, Field(ge=MIN_LATENCY_TARGET_S / _MS, le=MAX_LATENCY_TARGET_S / _MS, allow_inf_nan=False)
]
Priority = Annotated[int, Field(ge=Limits().min_priority, le=Limits().max_priority)]


class LatencySettings(BaseSettings):
    """Part of `ServiceConfig`."""

    target_tpot_ms: Milliseconds | None = Field(
        None,
        description="latency budget: time per output token that running requests are to have, milliseconds; "
        "unset: steps are filled for throughput",
    )
    target_ttft_ms: Milliseconds | None = Field(
        None,
        description="latency budget: time from arrival to first token, milliseconds; unset: first come, "
        "first served",
    )
    class_tpot_ms: dict[Priority, Milliseconds] = Field(
        default_factory=dict,
        description="time per output token for requests of one priority, such as 5=20; what is not said "
        "for a priority is as for everybody; repeatable",
    )
    class_ttft_ms: dict[Priority, Milliseconds] = Field(
        default_factory=dict, description="the same for the time to first token; repeatable"
    )
    refuse_late: bool = Field(
        False,
        description="whether a request whose first token can't come in time is refused, with a time to come "
        "back, rather than served late; an idle server serves it all the same",
    )

    def check_classes(self, max_priority: int) -> None:
        """Refuse targets that nobody could have.

        Args:
            max_priority: highest priority that a request may ask for.

        Raises:
            ValueError: there are some for a priority above it.
        """
        highest = max((*self.class_tpot_ms, *self.class_ttft_ms), default=max_priority)
        if highest > max_priority:
            raise ValueError(
                f"targets are given for priority {highest}, which no request may ask for: raise "
                f"--max-priority={max_priority}, or leave them out"
            )

    def latency_config(self) -> LatencyConfig:
        """What the engine is told."""
        return LatencyConfig(
            default=LatencyTargets(_seconds(self.target_tpot_ms), _seconds(self.target_ttft_ms)),
            by_priority={
                priority: LatencyTargets(
                    _seconds(self.class_tpot_ms.get(priority, self.target_tpot_ms)),
                    _seconds(self.class_ttft_ms.get(priority, self.target_ttft_ms)),
                )
                for priority in sorted(self.class_tpot_ms.keys() | self.class_ttft_ms.keys())
            },
            refuses_late=self.refuse_late,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * _MS
