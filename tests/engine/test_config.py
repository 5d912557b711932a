from pathlib import Path

import pytest

from headrace.engine.config import CacheConfig, CacheLayout, EngineConfig, ModelConfig, SchedulerConfig
from headrace.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(Path("m"), dtype="int3"), "dtype='int3' is not known: use one of auto, float32"),
        (lambda: ModelConfig(Path("m"), max_model_len=1), "max_model_len=1 is too small"),
        (
            lambda: ModelConfig(Path("m"), device="tpu"),
            "device='tpu' is not known: use one of auto, cpu, cuda",
        ),
        (lambda: CacheConfig(gpu_memory_utilization=0.0), "gpu_memory_utilization=0.0 is out of range"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "more than 0, at most 1"),
        (lambda: CacheConfig(gpu_memory_utilization=float("nan")), "gpu_memory_utilization=nan"),
        (lambda: CacheConfig(block_size=0), "block_size=0 is too small"),
        (lambda: CacheConfig(num_blocks=0), "num_blocks=0 is too small"),
        (lambda: CacheConfig(memory_bytes=0), "memory_bytes=0 is too small"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs=0 is too small"),
        (
            lambda: SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8),
            "raise the first or lower the second",
        ),
        (lambda: SchedulerConfig(max_prefill_chunk=0), "max_prefill_chunk=0 is too small"),
        (lambda: SchedulerConfig(max_num_waiting=0), "max_num_waiting=0 is too small"),
        (lambda: SchedulerConfig(max_num_skips=-1), "max_num_skips=-1 is too small"),
        (lambda: SchedulerConfig(priority_ageing_s=1e-310), "use a number from 0.001 to 1e"),
        (lambda: SchedulerConfig(priority_ageing_s=float("nan")), "priority_ageing_s=nan"),
        (lambda: SchedulerConfig(client_weights={"a": 1.0, "b": 1e-12}), "client_weights.'b'.=1e-12"),
        (lambda: SchedulerConfig(client_weights={"a": float("inf")}), "use a number from 0.001 to 1000"),
        (lambda: EngineConfig(ModelConfig(Path("m")), num_threads=0), "num_threads=0 is too small"),
        (lambda: EngineConfig(ModelConfig(Path("m")), num_threads=10**6), "use 1024 or fewer"),
        (lambda: CacheLayout(num_blocks=2, block_size=0), "block_size=0 is too small"),
    ],
)
def test_a_value_that_can_not_work_is_refused_when_the_config_is_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_layout_counts_tokens_without_the_null_block():
    layout = CacheLayout(num_blocks=9, block_size=16)
    assert (layout.num_usable_blocks, layout.num_tokens) == (8, 128)
    assert [layout.num_blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
