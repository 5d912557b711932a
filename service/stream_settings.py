"""Settings of requests and streams: sizes, how far a reader may lag, how long requests outlive streams."""

from __future__ import annotations

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings

from headrace.engine import SchedulerConfig
from headrace.service.limits import Limits


class StreamSettings(BaseSettings):
    """Part of `ServiceConfig`."""

    max_message_size: ByteSize = Field(
        ByteSize(Limits().max_message_bytes), ge=2**16, description="longest gRPC message, either way"
    )
    max_text_size: ByteSize = Field(
        ByteSize(Limits().max_text_bytes), gt=0, description="longest text or conversation of one request"
    )
    max_request_s: float = Field(
        Limits().max_request_s, gt=0, allow_inf_nan=False, description="longest time for one request, seconds"
    )
    slow_reader_s: float = Field(
        Limits().slow_reader_s,
        gt=0,
        allow_inf_nan=False,
        description="longest time that a message may wait for its reader, or a request for credit, seconds",
    )
    max_unread_tokens: int = Field(
        SchedulerConfig().max_unread_tokens,
        ge=1,
        description="tokens (and logprobs) of one request that are made ahead of its reader; beyond that it "
        "is paused",
    )
    max_unread_size: ByteSize = Field(
        ByteSize(Limits().max_unread_bytes),
        ge=2**16,
        description="output that may wait for the reader of one Session; one who leaves more is cut",
    )
    paused_hold_s: float = Field(
        SchedulerConfig().paused_hold_s,
        ge=0,
        le=1e9,
        description="how long a paused request keeps KV blocks that nobody else needs, seconds",
    )
    max_num_paused: int = Field(
        SchedulerConfig().max_num_paused,
        ge=1,
        description="most sequences that are paused; beyond that the longest paused ones are given up",
    )
    detach_grace_s: float = Field(
        Limits().detach_grace_s,
        ge=0,
        le=86_400,
        description="how long a request that was started with detach may be resumed after its stream has "
        "broken, or told its end, seconds",
    )
    detach_buffer: ByteSize = Field(
        ByteSize(Limits().detach_buffer_bytes),
        # Clients of ours acknowledge much sooner.
        ge=2**16,
        description="events of such a request that are sent and not acknowledged; beyond that it waits",
    )
    max_resumable: int = Field(
        Limits().max_resumable, ge=0, description="most such requests of all clients together; 0 offers none"
    )

    def stream_limits(self) -> Limits:
        """What requests and streams are held to."""
        return Limits(
            max_message_bytes=self.max_message_size,
            max_text_bytes=self.max_text_size,
            max_request_s=self.max_request_s,
            slow_reader_s=self.slow_reader_s,
            max_unread_bytes=self.max_unread_size,
            detach_grace_s=self.detach_grace_s,
            detach_buffer_bytes=self.detach_buffer,
            max_resumable=self.max_resumable,
        )
