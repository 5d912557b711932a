from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.clients.events import KvBlocks, Load, StepTotals
from headrace.clients.latency import LatencyClass, LatencyStatus
from headrace.clients.step_log import Work
from headrace.clients.top import Lane, PartTime, Snapshot
from headrace.clients.top_view import JsonTop, LiveTop, PlainTop, WholeTop, plain_line, sparkline

LOAD = Load(2, 3, 4, KvBlocks(200, 140, 10, 50), StepTotals(), "continuous", "tiny", 93_784.0)
LANES = (
    Lane(0, "1:first", 0, Work.DECODE, 12, 40, False, 25.04),
    Lane(1, "2:second", 1, Work.PREFILL, 512, 0, True, None),
    Lane(2),
    Lane(3),
)


def make_snapshot(*, num_missed: int = 0, lanes: tuple[Lane, ...] = LANES) -> Snapshot:
    return Snapshot(
        load=LOAD,
        prefill_tokens_per_s=102.4,
        output_tokens_per_s=50.0,
        steps_per_s=25.0,
        num_preemptions=7,
        num_recent_preemptions=1,
        parts=(PartTime("step", 0.04, 0.05), PartTime("schedule", 0.0001, 0.0002)),
        num_missed=num_missed,
        lanes=lanes,
        history=(0.0, 50.0, 100.0),
    )


Whole = type[LiveTop] | type[WholeTop]


def shown(view_of: Whole, snapshot: Snapshot, width: int = 100, height: int = 40) -> str:
    out = io.StringIO()
    is_live = view_of is LiveTop
    console = Console(file=out, width=width, height=height, color_system=None, force_terminal=is_live)
    with view_of(console, "host:1") as view:
        view.show(snapshot)
    return out.getvalue()


@pytest.mark.parametrize("view", [LiveTop, WholeTop])
def test_the_picture_has_load_rates_blocks_times_and_a_lane_for_each_slot(view: Whole) -> None:
    text = shown(view, make_snapshot())
    for said in (
        "tiny",
        "up 1 d 2:03:04",
        "2 running of 4   3 waiting   7 preemptions (1 lately)",
        "50.0 output",
        "102.4 prefill",
        "50 live, 10 cached, 140 free of 200 blocks",
        "step 40.0/50.0  schedule 0.1/0.2",
    ):
        assert said in text
    lanes = [line.split() for line in text.splitlines()]
    assert ["0", "decode", "≥12", "≥40", "25.0", "first"] in lanes
    assert ["1", "prefill", "512", "0", "second", "[1]"] in lanes
    assert ["2-3", "idle"] in lanes
    assert "not seen" not in text


@pytest.mark.parametrize("view", [LiveTop, WholeTop])
def test_a_terminal_of_eighty_columns_shows_all_of_it(view: Whole) -> None:
    targets = LatencyClass(
        None,
        0.03,
        0.5,
        num_sequences=9000,
        num_over_tpot=123,
        num_over_ttft=45,
        attained_tpot_p95_s=0.028,
        attained_ttft_p95_s=0.64,
    )
    load = replace(
        LOAD,
        blocks=KvBlocks(134_144, 123_456, 10_000, 688),
        model="smollm2-135m-instruct",
        latency=LatencyStatus((targets,)),
    )
    parts = tuple(PartTime(name, 0.0405, 0.1234) for name in ("step", "schedule", "execute", "update"))
    text = shown(view, replace(make_snapshot(), load=load, parts=parts), width=80)
    assert "…" not in text
    for said in (
        "688 live, 10000 cached, 123456 free of 134144 blocks",
        "step 40.5/123  schedule 40.5/123  execute 40.5/123  update 40.5/123",
        "TPOT 30.0 ms (p95 28.0 ms, 123 of 9000 over)",
        "TTFT 500.0 ms (p95 640.0 ms, 45 of 9000 over)",
    ):
        assert said in text


def test_slots_that_rest_side_by_side_are_one_line() -> None:
    busy = Lane(5, "1:first", 0, Work.DECODE, 12, 40, False, 25.04)
    lanes = (*map(Lane, range(5)), busy, *map(Lane, range(6, 64)))
    lines = [line.split() for line in shown(WholeTop, make_snapshot(lanes=lanes)).splitlines()]
    assert lines[-3:] == [["0-4", "idle"], ["5", "decode", "≥12", "≥40", "25.0", "first"], ["6-63", "idle"]]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_picture_fits_its_terminal(width: int) -> None:
    many = tuple(Lane(slot, f"{slot}:request {slot} of {'many ' * 30}") for slot in range(64))
    lines = shown(LiveTop, make_snapshot(num_missed=9, lanes=many), width, height=20).splitlines()
    lines = [line.split("\x1b[H")[-1].split("\x1b")[0] for line in lines]
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= 21
    assert any("55 more" in line for line in lines)


def test_what_is_promised_is_told_with_how_it_is_kept() -> None:
    classes = (
        LatencyClass(None, tpot_s=0.03, num_sequences=9, num_over_tpot=1, attained_tpot_p95_s=0.028),
        LatencyClass(5, ttft_s=0.5, is_attainable=False),
        LatencyClass(7),
    )
    load = replace(LOAD, latency=LatencyStatus(classes))
    text = shown(WholeTop, replace(make_snapshot(), load=load))
    assert "promised  TPOT 30.0 ms (p95 28.0 ms, 1 of 9 over)" in text
    assert "promised  priority 5: TTFT 500.0 ms (0 of 0 over)  can't be kept here" in text
    assert "promised  priority 7: nothing" in text


def test_what_neither_runs_nor_waits_is_told_where_there_is_any() -> None:
    resting = replace(make_snapshot(), load=replace(LOAD, num_paused=3, num_detached=2))
    assert "3 waiting   3 paused   2 detached   " in shown(WholeTop, resting)
    assert "3 waiting, 3 paused, 2 detached, 102.4 prefill" in plain_line(resting)
    for view in (shown(WholeTop, make_snapshot()), plain_line(make_snapshot())):
        assert "paused" not in view
        assert "detached" not in view


def test_missed_steps_are_told() -> None:
    assert "12 steps were not seen" in shown(WholeTop, make_snapshot(num_missed=12))


def test_elsewhere_it_is_a_line_each_time() -> None:
    out = io.StringIO()
    with PlainTop(Console(file=out, width=40)) as view:
        view.show(make_snapshot(num_missed=2))
        view.say("host:1: gone; trying again")
    first, second = out.getvalue().splitlines()
    assert first.startswith("up 1 d 2:03:04  2/4 running, 3 waiting, 102.4 prefill + 50.0 output tokens/s")
    assert first.endswith("step 40.0 ms (p99 50.0 ms), 2 steps not seen")
    assert second == "host:1: gone; trying again"


def test_json_is_an_object_each_time() -> None:
    out = io.StringIO()
    with JsonTop(Console(file=out, width=40)) as view:
        view.show(make_snapshot())
        view.say("gone")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["num_waiting"], first["blocks"]["live"], first["output_tokens_per_s"]) == (3, 50, 50.0)
    assert [(lane["slot"], lane["request"], lane["work"]) for lane in first["lanes"]] == [
        (0, "1:first", "decode"),
        (1, "2:second", "prefill"),
    ]
    assert second == {"message": "gone"}


def test_while_there_is_no_server_the_last_picture_stays_below_the_message() -> None:
    out = io.StringIO()
    with LiveTop(Console(file=out, width=100, height=30, force_terminal=True), "host:1") as view:
        view.say("the model is still loading")
        view.show(make_snapshot())
        view.say("gone; trying again")
    last = out.getvalue().rpartition("gone; trying again")[2]
    assert "still loading" in out.getvalue()
    assert "first" in last


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [((), 5, ""), ((0.0, 0.0), 5, "▁▁"), ((0, 4, 8), 5, "▁▅█"), ((8, 4, 8), 2, "▅█"), ((1.0,), -3, "")],
)
def test_a_sparklines_highest_bar_is_full(values: tuple[float, ...], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars
