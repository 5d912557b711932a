"""Tuning, on real servers over a fake model and on scripted ones."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from headrace.clients.bench import BenchSettings
from headrace.clients.bench_backend import GrpcBackend
from headrace.clients.plots import PlotError
from headrace.clients.tune import (
    TuneError,
    TuneSettings,
    Tuning,
    advice,
    line_of,
    run_tune,
    serve_command,
)
from headrace.clients.tune_curve import CurvePoint, LatencyBudget, find_knee
from headrace.clients.tune_plot import draw_curve
from tests.support.fake_scripts import HangsAfter
from tests.support.fake_server import running_fake_server

SERVE_FAKE = (sys.executable, "-m", "tests.support.serve_fake", "fine")
SHORT = BenchSettings(prompt_len="4", output_len="3")
QUIET = Console(file=io.StringIO())


def tuning(folder: Path, settings: TuneSettings) -> Tuning:
    """A new tuning, or the one that the folder has."""
    made = Tuning(folder, settings.key(), ["headrace", "tune"])
    made.resume()
    return made


def running(target: str, *concurrencies: int) -> TuneSettings:
    """Settings for a running server."""
    return TuneSettings(concurrencies, backend=GrpcBackend(target), bench=SHORT, num_rounds=1)


async def test_servers_of_its_own_one_for_each_token_budget(tmp_path: Path) -> None:
    settings = TuneSettings(
        (1, 4), batched_tokens=(64, 256), model="fake", bench=SHORT, num_rounds=1, command=SERVE_FAKE
    )
    made = tuning(tmp_path, settings)
    assert await run_tune(settings, made, QUIET)
    measured = {(point.concurrency, point.max_num_batched_tokens): point for point in made.points}
    assert list(measured) == [(1, 64), (4, 64), (1, 256), (4, 256)]
    assert all(point.output_tokens_per_s > 0 for point in made.points)
    assert made.server["max_num_seqs"] == 4
    document = json.loads(made.path.read_text())
    assert document["schema"] == "headrace.tune/1"
    assert len(document["points"]) == 4
    knee = find_knee(made.points)
    assert document["knee"] == (None if knee is None else asdict(knee))
    pictures = [tmp_path / "curve.png", tmp_path / "curve.svg"]
    draw_curve(made.points, LatencyBudget(tpot_s=0.05), "fake", pictures)
    assert all(path.stat().st_size > 1000 for path in pictures)
    with pytest.raises(PlotError):
        draw_curve(made.points, LatencyBudget(), "fake", [tmp_path / "curve.pdf"])


async def test_what_is_measured_is_not_measured_again(tmp_path: Path) -> None:
    async with running_fake_server() as server:
        await run_tune(running(server.target, 1), tuning(tmp_path, running(server.target, 1)), QUIET)
        num_before = len(server.record.starts)
        more = running(server.target, 1, 2)
        resumed = tuning(tmp_path, more)
        assert [point.concurrency for point in resumed.points] == [1]
        assert await run_tune(more, resumed, QUIET)
        assert [point.concurrency for point in resumed.points] == [1, 2]
        # Sixteen requests and the warm-up of the one point that was missing.
        assert len(server.record.starts) - num_before == 16 + 2


async def test_every_point_has_prompts_of_its_own(tmp_path: Path) -> None:
    async with running_fake_server() as server:
        await run_tune(running(server.target, 1, 2), tuning(tmp_path, running(server.target, 1, 2)), QUIET)
        prompts = [tuple(start.token_ids.ids) for start in server.record.starts]
    assert len(set(prompts)) == len(prompts) == 16 + 1 + 16 + 2


async def test_prompts_of_a_dataset_come_again_and_are_kept_out_of_the_cache(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.txt"
    dataset.write_text("one\ntwo\n")
    async with running_fake_server() as server:
        settings = replace(running(server.target, 1), bench=BenchSettings(dataset=dataset, output_len="3"))
        await run_tune(settings, tuning(tmp_path, settings), QUIET)
        assert all(start.cache.bypass for start in server.record.starts)


async def test_a_tuning_that_is_ended_keeps_its_whole_points(tmp_path: Path) -> None:
    second_point = HangsAfter(16 + 1 + 2)
    async with running_fake_server(default=second_point) as server:
        settings = running(server.target, 1, 2)
        made = tuning(tmp_path, settings)
        work = asyncio.create_task(run_tune(settings, made, QUIET))
        await second_point.hangs.wait()
        work.cancel()
        assert await work is False
    assert [point.concurrency for point in made.points] == [1]
    assert [point.concurrency for point in tuning(tmp_path, settings).points] == [1]


async def test_a_folder_of_another_tuning_is_left_alone(tmp_path: Path) -> None:
    settings = running("127.0.0.1:1", 1)
    tuning(tmp_path, settings).write(LatencyBudget())
    with pytest.raises(TuneError, match="other settings"):
        tuning(tmp_path, replace(settings, num_rounds=2))
    (tmp_path / "curve.json").write_text("{")
    with pytest.raises(TuneError, match="no curve of ours"):
        tuning(tmp_path, settings)


async def test_answers_of_one_token_have_no_curve(tmp_path: Path) -> None:
    async with running_fake_server() as server:
        settings = replace(running(server.target, 1), bench=replace(SHORT, output_len="1"))
        with pytest.raises(TuneError, match="at least two tokens"):
            await run_tune(settings, tuning(tmp_path, settings), QUIET)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (TuneSettings(()), "use a list"),
        (TuneSettings((0, 1)), "begin at 1"),
        (TuneSettings((1,), batched_tokens=(0,)), "begin at 1"),
        (TuneSettings((1,), batched_tokens=(64,), backend=GrpcBackend("x:1")), "can't change"),
        (TuneSettings((1,), serve_arguments=("--dtype", "auto", "--port=0")), "--port is set here"),
        (TuneSettings((1,), serve_arguments=("--max-num-batched-tokens", "9")), "use --batched-tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: TuneSettings, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        settings.check()


POINT = CurvePoint(8, 512, 430.0, 6.0, 0.018, 0.02, 0.1, 0.3, 32)


def test_the_flags_are_those_of_the_point() -> None:
    settings = TuneSettings((8,), model="some model", serve_arguments=("--dtype", "bfloat16"))
    assert serve_command(settings, POINT) == (
        "headrace serve --model 'some model' --max-num-seqs 8 --max-num-batched-tokens 512 --dtype bfloat16"
    )
    unchanged = replace(POINT, max_num_batched_tokens=None)
    assert serve_command(TuneSettings((8,)), unchanged) == "headrace serve --max-num-seqs 8"


def test_a_point_is_said_with_its_failures() -> None:
    assert line_of(replace(POINT, num_failed=3)) == (
        "8 at a time, 512 tokens a step: 430 tokens/s, TPOT p50 18.0 ms, p95 20.0 ms, "
        "TTFT p95 300 ms, 3 of 32 failed"
    )


def test_advice_without_a_knee_says_what_to_measure_next() -> None:
    twice = replace(POINT, concurrency=16, output_tokens_per_s=860.0, tpot_p50_s=0.036)
    said, further, highest, flags = advice(TuneSettings((8, 16)), [POINT, twice], LatencyBudget())
    assert said.startswith("No knee within the range")
    assert further == "  --concurrency 16,32,64"
    assert highest.startswith("Highest throughput: 16 at a time")
    assert flags == "  headrace serve --max-num-seqs 16 --max-num-batched-tokens 512"


def test_advice_names_the_knee_and_the_best_within_the_budget() -> None:
    slow = replace(POINT, concurrency=16, output_tokens_per_s=440.0, tpot_p50_s=0.05, tpot_p95_s=0.06)
    slower = replace(slow, concurrency=32, output_tokens_per_s=430.0, tpot_p50_s=0.1, tpot_p95_s=0.12)
    settings = TuneSettings((8, 16, 32), model="m")
    knee, flags, best, best_flags = advice(settings, [POINT, slow, slower], LatencyBudget(tpot_s=0.1))
    assert knee.startswith("Sweet spot (knee): 16 at a time")
    assert best.startswith("Best within the budget: 16 at a time")
    assert "--max-num-seqs 16" in flags
    assert flags == best_flags
    assert "nearest in TPOT is 8 at a time" in advice(settings, [slow, POINT], LatencyBudget(ttft_s=0.01))[-1]
    assert advice(settings, [replace(POINT, num_failed=1)], LatencyBudget()) == [
        "No point without failed requests: nothing to recommend."
    ]
