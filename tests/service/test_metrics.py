from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine import AsyncScheduling, BlockCounts, LoadedModel, RowStats, Speculation, StepStats
from headrace.engine.config import EngineConfig
from headrace.engine.runner.protocol import Runner
from headrace.engine.scheduling.plan import StepPlan, StepResult
from headrace.service.edge import Edge
from headrace.service.identity import Caller
from headrace.service.metrics import Metrics, follow_steps
from headrace.service.metrics_server import metrics_port
from headrace.v1.generation_pb2 import GenerateOnceRequest, GenerateRequest
from tests.support.blocking import Blocking
from tests.support.fake_runner import expected_output, half_right_draft, make_fake_model
from tests.support.repository import ROOT
from tests.support.requests import make_config, speculating
from tests.support.service import (
    LOOPBACK,
    RunningService,
    generate,
    generate_ids,
    ids_of,
    make_start,
    running_service,
    until,
)
from tests.support.step_gate import StepGate

Sample = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class Scraped:
    """A service whose metrics can be scraped."""

    service: RunningService
    port: int

    async def text(self) -> str:
        def fetch() -> str:
            with urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
                return str(response.read().decode())

        return await asyncio.to_thread(fetch)

    async def samples(self) -> dict[Sample, float]:
        """Every sample but the buckets, by name and labels (the model's is left out)."""
        return {
            (
                sample.name,
                tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model")),
            ): sample.value
            for family in text_string_to_metric_families(await self.text())
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }


@asynccontextmanager
async def scraped(
    model: LoadedModel | None = None, config: EngineConfig | None = None, edge: Edge | None = None
) -> AsyncIterator[Scraped]:
    edge = edge or Edge()
    clock = asyncio.get_running_loop().time
    async with (
        running_service(model, config, edge=edge) as service,
        metrics_port(service.serving, LOOPBACK) as port,
    ):
        following = asyncio.create_task(follow_steps(service.engine, edge.metrics, clock))
        await asyncio.sleep(0)
        yield Scraped(service, port)
        following.cancel()


@pytest.mark.parametrize(("scheduling", "num_ahead"), [(AsyncScheduling.OFF, 0), (AsyncScheduling.ON, 7 + 4)])
async def test_counts_are_what_clients_got(scheduling: AsyncScheduling, num_ahead: int) -> None:
    async with scraped(config=make_config(async_scheduling=scheduling)) as scrape:
        events = await generate(scrape.service, make_start(max_tokens=8))
        assert len(await generate_ids(scrape.service, make_start(max_tokens=5, prompt=(1, 2)))) == 5
        with pytest.raises(grpc.aio.AioRpcError):
            await generate_ids(scrape.service, make_start(max_tokens=0))
        await scrape.service.engine.wait_idle()
        samples = await scrape.samples()
        text = await scrape.text()
    assert len(ids_of(events)) == 8
    counted = {
        "headrace_generation_tokens_total": 13,
        "headrace_prompt_tokens_total": 6,
        "headrace_e2e_request_latency_seconds_count": 2,
        "headrace_time_to_first_token_seconds_count": 2,
        "headrace_request_queue_time_seconds_count": 2,
        "headrace_request_prefill_time_seconds_count": 2,
        "headrace_request_decode_time_seconds_count": 2,
        # One gap less than tokens, for each of the two.
        "headrace_inter_token_latency_seconds_count": 11,
        "headrace_iteration_tokens_sum": 6 + 11,
        "headrace_iteration_tokens_count": 13,
        "headrace_step_seconds_count": 13,
        "headrace_engine_steps_total": 13,
        # All but the first of each request.
        "headrace_engine_steps_ahead_total": num_ahead,
        "headrace_prefix_cache_queries_total": 6,
        "headrace_prefix_cache_hits_total": 0,
        "headrace_num_preemptions_total": 0,
        "headrace_up": 1,
        "headrace_num_requests_running": 0,
        "headrace_num_requests_waiting": 0,
        "headrace_kv_cache_usage_perc": 0,
    }
    assert {name: samples[name, ()] for name in counted} == counted
    assert samples["headrace_request_success_total", (("finished_reason", "length"),)] == 2
    assert samples["headrace_admission_rejections_total", (("reason", "INVALID_REQUEST"),)] == 1
    assert samples["headrace_rpcs_total", (("code", "OK"), ("method", "Generate"))] == 1
    assert 'model="fake"' in text
    for line in text.splitlines():
        if line.startswith("# HELP headrace_"):
            assert len(line.split()) > 4, f"says nothing: {line}"


async def test_gauges_are_the_truth_at_once_when_everybody_is_gone() -> None:
    gate = StepGate()
    model = make_fake_model(num_blocks=32, before_step=gate)
    async with scraped(model, make_config(max_num_seqs=4)) as scrape:
        calls = [
            scrape.service.generation.Generate(
                GenerateRequest(start=make_start(max_tokens=80, prompt=(i + 1,)))
            )
            for i in range(8)
        ]
        for call in calls[:4]:
            await call.read()
        # They are told of their acceptance before the first step that has them.
        await until(lambda: scrape.service.engine.load().num_running > 0)
        during = await scrape.samples()
        for call in calls:
            call.cancel()
        gate.open()
        await scrape.service.engine.wait_idle()
        after = await scrape.samples()
    assert during["headrace_num_requests_running", ()] > 0
    assert during["headrace_kv_cache_usage_perc", ()] > 0
    assert after["headrace_num_requests_running", ()] == after["headrace_num_requests_waiting", ()] == 0
    assert after["headrace_kv_blocks", (("state", "live"),)] == 0
    for samples in (during, after):
        assert sum(value for (name, _), value in samples.items() if name == "headrace_kv_blocks") == 32


async def test_hits_are_what_came_from_the_cache_and_no_recomputing() -> None:
    prompt = tuple(range(1, 25))
    async with scraped() as scrape:
        await generate(scrape.service, make_start(prompt=prompt))
        await generate(scrape.service, make_start(prompt=prompt, n=3))
        samples = await scrape.samples()
    assert samples["headrace_prefix_cache_queries_total", ()] == 48
    assert samples["headrace_prefix_cache_hits_total", ()] == 20
    assert samples["headrace_request_success_total", (("finished_reason", "length"),)] == 4


async def test_what_a_preempted_request_finds_of_itself_is_no_hit() -> None:
    prompts = [tuple(range(first, first + 8)) for first in (1, 20, 40)]
    model = make_fake_model(num_blocks=16, max_model_len=64)
    async with scraped(model, make_config(max_num_seqs=3)) as scrape:
        starts = [make_start(prompt=prompt, max_tokens=40) for prompt in prompts]
        answers = await asyncio.gather(*(generate_ids(scrape.service, start) for start in starts))
        samples = await scrape.samples()
    assert answers == [expected_output(prompt, 40) for prompt in prompts]
    assert samples["headrace_num_preemptions_total", ()] > 0
    assert samples["headrace_prefix_cache_hits_total", ()] == 0


@dataclass
class FailingDrafts(Blocking):
    """A runner whose draft model fails in every other step with drafts; the rows come without them."""

    runner: Runner
    num_failures: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        is_drafted = any(row.draft is not None and row.draft.num_drafts for row in plan.rows)
        if not is_drafted or plan.step % 2:
            return self.runner.execute(plan)
        self.num_failures += 1
        rows = tuple(row._replace(draft=None) for row in plan.rows)
        result = self.runner.execute(replace(plan, rows=rows))
        return StepResult(tuple(row._replace(is_draft_failed=True) for row in result.rows))

    def close(self) -> None:
        self.runner.close()


async def test_drafts_are_counted_and_so_are_failures_of_the_draft_model() -> None:
    model = make_fake_model(draft=half_right_draft)
    runner = FailingDrafts(model.runner)
    config = make_config(speculation=speculating(Speculation.DRAFT_MODEL, 3))
    async with scraped(replace(model, runner=runner), config) as metrics:
        events = await generate(metrics.service, make_start(max_tokens=40))
        await metrics.service.engine.wait_idle()
        samples = await metrics.samples()
    usage = events[-1].finished.usage
    told = {name: value for (name, _), value in samples.items() if "spec_decode" in name}
    assert usage.draft_tokens_accepted > 0
    assert told["headrace_spec_decode_num_draft_tokens_total"] == usage.draft_tokens_proposed
    assert told["headrace_spec_decode_num_accepted_tokens_total"] == usage.draft_tokens_accepted
    assert told["headrace_spec_decode_num_draft_failures_total"] == runner.num_failures > 1


async def test_labels_do_not_grow_with_what_callers_send() -> None:
    async with scraped() as scrape:

        async def send(round_: int) -> int:
            for i in range(3):
                await generate_ids(
                    scrape.service, make_start(f"label-{round_}-{i}", prompt=(round_ + 1, i + 1))
                )
                with pytest.raises(grpc.aio.AioRpcError):
                    await scrape.service.generation.GenerateOnce(
                        GenerateOnceRequest(start=make_start(model=f"model-{round_}-{i}"))
                    )
            return len(await scrape.samples())

        assert await send(0) == await send(1)


def step(*rows: tuple[str, int, int, bool]) -> StepStats:
    """A step of rows: request, prompt tokens computed, tokens made, whether it ended."""
    return StepStats(
        step=0,
        num_waiting=0,
        num_preemptions=0,
        blocks=BlockCounts(1, 1, 0, 0),
        num_kv_slots_allocated=0,
        num_kv_slots_used=0,
        schedule_s=0.0,
        execute_s=0.0,
        update_s=0.0,
        rows=tuple(RowStats(name, 0, 0, prefill, 0, ended, made) for name, prefill, made, ended in rows),
    )


def test_the_gap_of_a_preempted_sequence_is_the_whole_of_its_wait() -> None:
    metrics = Metrics()
    metrics.opened("m")

    def gaps() -> tuple[float, float]:
        value = metrics.registry.get_sample_value
        name, labels = "headrace_inter_token_latency_seconds", {"model": "m"}
        return value(f"{name}_count", labels) or 0.0, value(f"{name}_sum", labels) or 0.0

    for name in ("a", "b"):
        metrics.admitted(name, Caller(), 4)
    metrics.stepped(step(("a", 4, 0, False)), 0.0)
    metrics.stepped(step(("a", 4, 1, False)), 1.0)
    assert gaps() == (0, 0)
    metrics.stepped(step(("a", 0, 1, False), ("b", 2, 1, False)), 1.5)
    assert gaps() == (1, 0.5)
    # Preempted; what it had is computed again.
    metrics.stepped(step(("a", 9, 0, False)), 7.0)
    # Of several tokens that come together the gap counts once.
    metrics.stepped(step(("a", 0, 3, True), ("b", 0, 1, False)), 8.5)
    assert gaps() == (3, 0.5 + 7.0 + 7.0)


def test_the_last_gap_counts_whether_the_end_is_told_before_its_step_or_behind_it() -> None:
    for is_told_first in (True, False):
        metrics = Metrics()
        metrics.opened("m")
        metrics.admitted("a", Caller(), 4)
        metrics.stepped(step(("a", 4, 1, False)), 1.0)
        if is_told_first:
            metrics.request_ended("a", 1.0, None)
        metrics.stepped(step(("a", 0, 1, True)), 1.5)
        if not is_told_first:
            metrics.request_ended("a", 1.0, None)
        name = "headrace_inter_token_latency_seconds_count"
        assert metrics.registry.get_sample_value(name, {"model": "m"}) == 1
        assert metrics.num_followed == 0


async def test_nothing_is_remembered_of_requests_that_were_cancelled_in_the_middle_of_a_step() -> None:
    steps, edge = StepGate(), Edge()
    value = edge.metrics.registry.get_sample_value
    async with scraped(make_fake_model(before_step=steps), edge=edge) as scrape:

        async def cancel_in_third_step(number: int) -> None:
            call = scrape.service.generation.Generate(GenerateRequest(start=make_start(max_tokens=50)))
            steps.let(2)
            await until(lambda: steps.num_steps == 3 * number)
            call.cancel()
            ended = {"method": "Generate", "code": "CANCELLED"}
            await until(lambda: value("headrace_rpcs_total", ended) == number)
            steps.let(1)
            await scrape.service.engine.wait_idle()

        for number in range(1, 4):
            await cancel_in_third_step(number)
        steps.let(8)
        await generate(scrape.service, make_start(max_tokens=8))
        await until(lambda: value("headrace_step_seconds_count", {"model": "fake"}) == 3 * 3 + 8)
        assert edge.metrics.num_followed == 0


def test_every_metric_on_the_dashboard_exists() -> None:
    dashboard = json.loads((ROOT / "docker" / "grafana" / "headrace.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"headrace_\w+", expression)}
    used |= set(re.findall(r"headrace_\w+", str(dashboard["templating"])))
    offered = asyncio.run(_offered())
    assert used - offered == set()
    assert len(used) > 20
    # What a person looks for who wonders where requests are that neither run nor wait.
    assert {
        "headrace_num_requests_paused",
        "headrace_num_requests_detached",
        "headrace_slow_readers_total",
    } <= used


async def _offered() -> set[str]:
    async with scraped() as scrape:
        await generate(scrape.service, make_start())
        families = list(text_string_to_metric_families(await scrape.text()))
    names = {sample.name for family in families for sample in family.samples}
    # A family with labels shows nothing before it has counted.
    return names | {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }
