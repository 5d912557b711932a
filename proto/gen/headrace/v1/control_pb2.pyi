import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_unfinished",)
    NUM_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    num_unfinished: int
    def __init__(self, num_unfinished: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks_flushed",)
    NUM_BLOCKS_FLUSHED_FIELD_NUMBER: _ClassVar[int]
    num_blocks_flushed: int
    def __init__(self, num_blocks_flushed: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "max_num_seqs", "blocks", "totals", "batching", "model", "uptime", "latency", "num_paused", "num_detached")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    BATCHING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_DETACHED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    max_num_seqs: int
    blocks: KvBlocks
    totals: StepTotals
    batching: str
    model: str
    uptime: _duration_pb2.Duration
    latency: LatencyStatus
    num_paused: int
    num_detached: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., blocks: _Optional[_Union[KvBlocks, _Mapping]] = ..., totals: _Optional[_Union[StepTotals, _Mapping]] = ..., batching: _Optional[str] = ..., model: _Optional[str] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., latency: _Optional[_Union[LatencyStatus, _Mapping]] = ..., num_paused: _Optional[int] = ..., num_detached: _Optional[int] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("total", "free", "cached", "live")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    live: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., live: _Optional[int] = ...) -> None: ...

class StepTotals(_message.Message):
    __slots__ = ("steps", "rows", "prefill_tokens", "decode_tokens", "preemptions", "kv_slots_allocated", "kv_slots_used", "step_seconds", "output_tokens", "draws", "draft_tokens", "accepted_tokens", "drafted_draws", "drafted_by_place", "accepted_by_place")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    KV_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_DRAWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_PLACE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_PLACE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rows: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    kv_slots_allocated: int
    kv_slots_used: int
    step_seconds: float
    output_tokens: int
    draws: int
    draft_tokens: int
    accepted_tokens: int
    drafted_draws: int
    drafted_by_place: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_place: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[int] = ..., rows: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., kv_slots_allocated: _Optional[int] = ..., kv_slots_used: _Optional[int] = ..., step_seconds: _Optional[float] = ..., output_tokens: _Optional[int] = ..., draws: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., drafted_draws: _Optional[int] = ..., drafted_by_place: _Optional[_Iterable[int]] = ..., accepted_by_place: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("step", "num_running", "num_waiting", "prefill_tokens", "decode_tokens", "preemptions", "blocks", "schedule_time", "execute_time", "update_time", "rows", "num_missed", "start_time")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSED_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_running: int
    num_waiting: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    blocks: KvBlocks
    schedule_time: _duration_pb2.Duration
    execute_time: _duration_pb2.Duration
    update_time: _duration_pb2.Duration
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    num_missed: int
    start_time: _duration_pb2.Duration
    def __init__(self, step: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., blocks: _Optional[_Union[KvBlocks, _Mapping]] = ..., schedule_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., execute_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., update_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ..., num_missed: _Optional[int] = ..., start_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("request", "index", "slot", "prefill_tokens", "decode_tokens", "finished", "output_tokens", "draft_tokens", "accepted_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: str
    index: int
    slot: int
    prefill_tokens: int
    decode_tokens: int
    finished: bool
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, request: _Optional[str] = ..., index: _Optional[int] = ..., slot: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., finished: _Optional[bool] = ..., output_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class SetLatencyBudgetRequest(_message.Message):
    __slots__ = ("time_per_output_token", "time_to_first_token", "priority")
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    time_per_output_token: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    priority: int
    def __init__(self, time_per_output_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class SetLatencyBudgetResponse(_message.Message):
    __slots__ = ("latency",)
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    latency: LatencyStatus
    def __init__(self, latency: _Optional[_Union[LatencyStatus, _Mapping]] = ...) -> None: ...

class LatencyStatus(_message.Message):
    __slots__ = ("classes", "predicted_step", "predicted_time_to_first_token", "steps_over", "num_late")
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_OVER_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[LatencyClass]
    predicted_step: _duration_pb2.Duration
    predicted_time_to_first_token: _duration_pb2.Duration
    steps_over: int
    num_late: int
    def __init__(self, classes: _Optional[_Iterable[_Union[LatencyClass, _Mapping]]] = ..., predicted_step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., predicted_time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., steps_over: _Optional[int] = ..., num_late: _Optional[int] = ...) -> None: ...

class LatencyClass(_message.Message):
    __slots__ = ("priority", "time_per_output_token", "time_to_first_token", "attainable", "sequences", "over_time_per_output_token", "over_time_to_first_token", "attained_time_per_output_token_p95", "attained_time_to_first_token_p95")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTAINABLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OVER_TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OVER_TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ATTAINED_TIME_PER_OUTPUT_TOKEN_P95_FIELD_NUMBER: _ClassVar[int]
    ATTAINED_TIME_TO_FIRST_TOKEN_P95_FIELD_NUMBER: _ClassVar[int]
    priority: int
    time_per_output_token: _duration_pb2.Duration
    time_to_first_token: _duration_pb2.Duration
    attainable: bool
    sequences: int
    over_time_per_output_token: int
    over_time_to_first_token: int
    attained_time_per_output_token_p95: _duration_pb2.Duration
    attained_time_to_first_token_p95: _duration_pb2.Duration
    def __init__(self, priority: _Optional[int] = ..., time_per_output_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attainable: _Optional[bool] = ..., sequences: _Optional[int] = ..., over_time_per_output_token: _Optional[int] = ..., over_time_to_first_token: _Optional[int] = ..., attained_time_per_output_token_p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attained_time_to_first_token_p95: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
