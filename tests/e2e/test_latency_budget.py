"""A latency budget that is set while a real model runs: the same answers, and the truth about itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, load_model
from headrace.v1.control_pb2 import GetLoadRequest, SetLatencyBudgetRequest
from tests.support.service import RunningService, generate_ids, make_start, running_service
from tests.support.tiny_models import write_tiny_llama

STARTS = [{"prompt": [7 * i % 90 + 3 for i in range(length)], "max_tokens": 12} for length in (3, 40, 17, 60)]


async def answers(service: RunningService) -> list[list[int]]:
    asked = (generate_ids(service, make_start(**start)) for start in STARTS)  # type: ignore[arg-type]
    return list(await asyncio.gather(*asked))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        ModelConfig(path, dtype="float32"),
        CacheConfig(4, num_blocks=64),
        SchedulerConfig(4, 32),
        num_threads=1,
    )


async def test_a_budget_set_while_requests_run_changes_no_answer_and_tells_the_truth(
    config: EngineConfig,
) -> None:
    async with running_service(await asyncio.to_thread(load_model, config), config) as service:
        expected = await answers(service)
        running = asyncio.create_task(answers(service))
        # Nothing can keep a tenth of a millisecond through Python and torch, and an hour anything.
        strict = SetLatencyBudgetRequest(
            time_per_output_token=Duration(nanos=100_000), time_to_first_token=Duration(nanos=100_000)
        )
        await service.control.SetLatencyBudget(strict)
        assert await running == expected
        before = (await service.control.GetLoad(GetLoadRequest())).latency.classes[0]
        assert await answers(service) == expected
        out_of_reach = (await service.control.GetLoad(GetLoadRequest())).latency.classes[0]
        generous = SetLatencyBudgetRequest(
            time_per_output_token=Duration(seconds=3600), time_to_first_token=Duration(seconds=3600)
        )
        await service.control.SetLatencyBudget(generous)
        assert await answers(service) == expected
        kept = (await service.control.GetLoad(GetLoadRequest())).latency.classes[0]
        await service.control.SetLatencyBudget(SetLatencyBudgetRequest())
        assert await answers(service) == expected
        load = await service.control.GetLoad(GetLoadRequest())
    assert not out_of_reach.attainable
    assert out_of_reach.over_time_per_output_token - before.over_time_per_output_token == len(STARTS)
    assert out_of_reach.over_time_to_first_token - before.over_time_to_first_token == len(STARTS)
    assert out_of_reach.attained_time_per_output_token_p95.ToNanoseconds() > 100_000
    assert kept.attainable
    assert kept.over_time_per_output_token == out_of_reach.over_time_per_output_token
    assert kept.sequences == out_of_reach.sequences + len(STARTS)
    assert not load.latency.classes[0].HasField("time_per_output_token")
    assert load.latency.classes[0].sequences == 5 * len(STARTS)
    assert (load.num_running, load.num_waiting, load.blocks.live, load.latency.num_late) == (0, 0, 0, 0)
