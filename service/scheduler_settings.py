"""Settings of who computes when: the size of a step, the queue, priorities and shares."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.engine import AsyncScheduling, BatchingPolicy, SchedulerConfig
from headrace.service.limits import Limits
from headrace.service.stream_settings import StreamSettings


class SchedulerSettings(StreamSettings):
    """Part of `ServiceConfig`."""

    batching: Literal["continuous", "static"] = Field(
        "continuous",
        description="when waiting requests join: at every step, or when the last batch is finished",
    )
    static_batch_wait_s: float | None = Field(
        None,
        ge=0,
        # The first request of all, at the start, waits as long.
        le=60,
        description="with static batching, for how long the oldest request waits for others to fill up its "
        f"batch, seconds (default: {SchedulerConfig().static_batch_wait_s:g}); a full one begins at once",
    )
    async_scheduling: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether a step is prepared and launched while the one before it runs: auto does it on a "
        "GPU, unless --speculation proposes tokens; on a CPU it gains nothing",
    )
    max_num_seqs: int = Field(16, ge=1, description="batch slots: most sequences in one step")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget: most tokens in one step")
    max_prefill_chunk: int | None = Field(
        None, ge=1, description="most prompt tokens of one sequence in one step; unset: the budget"
    )
    max_num_waiting: int = Field(
        1024, ge=1, description="most sequences that wait; more are refused, with a time to come back"
    )
    max_waiting_tokens: int = Field(
        2**21,
        ge=64,
        description="most tokens, prompts and answers, that they may come to hold; more are refused",
    )
    max_num_skips: int = Field(64, ge=0, description="later requests that may pass one that does not fit yet")
    max_priority: int = Field(
        Limits().max_priority,
        # Who says nothing has priority 0.
        ge=0,
        le=Limits().max_priority,
        description="highest priority that a request may ask for; one that asks for more is refused",
    )
    priority_ageing_s: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="waiting time after which a request counts as one class higher, seconds",
    )
    client_weights: dict[str, float] = Field(
        default_factory=dict,
        description="a client's share relative to others', such as batch=0.5, from 0.001 to 1000; 1 for who "
        "is not named; repeatable",
    )

    @field_validator("client_weights")
    @classmethod
    def _each_share_is_somebodys(cls, weights: dict[str, float]) -> dict[str, float]:
        if "" in weights:
            raise ValueError("a share is for a client, whose name stands before the =, such as batch=0.5")
        return weights

    @model_validator(mode="after")
    def _only_static_batches_wait(self) -> Self:
        if self.static_batch_wait_s is not None and self.batching != "static":
            raise ValueError(
                "static_batch_wait_s is for static batching alone: set batching to static, or leave it out"
            )
        return self

    def scheduler_config(self) -> SchedulerConfig:
        """What the scheduler is told."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            max_num_waiting=self.max_num_waiting,
            max_num_skips=self.max_num_skips,
            batching=BatchingPolicy(self.batching),
            async_scheduling=AsyncScheduling(self.async_scheduling),
            max_waiting_tokens=self.max_waiting_tokens,
            priority_ageing_s=self.priority_ageing_s,
            client_weights=self.client_weights,
            max_unread_tokens=self.max_unread_tokens,
            paused_hold_s=self.paused_hold_s,
            max_num_paused=self.max_num_paused,
            static_batch_wait_s=SchedulerConfig().static_batch_wait_s
            if self.static_batch_wait_s is None
            else self.static_batch_wait_s,
        )
