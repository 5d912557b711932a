"""`headrace budget` as its users run it."""

from __future__ import annotations

import json

import pytest

from tests.support.fake_server import running_fake_server
from tests.support.programs import run_headrace


async def test_targets_are_set_with_units_and_shown() -> None:
    async with running_fake_server() as server:
        at = ("--target", server.target)
        both = await run_headrace("budget", *at, "--tpot", "50ms", "--ttft", "1.5 s")
        of_class = await run_headrace("budget", *at, "--tpot", "1ms", "--priority", "5", "--json")
        cleared = await run_headrace("budget", *at, "--clear")
    assert both.status == 0
    assert both.out.startswith(
        "all: TPOT 50 ms, TTFT 1.5 s; p95 TPOT -, TTFT - since it was set; "
        "over TPOT 0, TTFT 0 of 0 since the start\n"
    )
    assert "waiting too late 2" in both.out
    assert "no targets" not in both.out
    told = json.loads(of_class.out)["classes"][1]
    assert (told["priority"], told["tpot_s"], told["ttft_s"], told["is_attainable"]) == (
        5,
        0.001,
        None,
        False,
    )
    without, line, _ = cleared.out.splitlines()
    assert without.startswith("no targets: ")
    assert "--tpot" in without
    assert line.startswith("all: TPOT -, TTFT -;")


async def test_without_options_nothing_is_set() -> None:
    async with running_fake_server() as server:
        outcome = await run_headrace("budget", "--target", server.target)
    assert (outcome.status, outcome.out) == (0, "this server does not tell of its latencies\n")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--tpot", "50"), "unit"),
        (("--ttft", "-5ms"), "--ttft"),
        (("--tpot", "50ms", "--clear"), "--clear"),
        (("--priority", "5"), "--priority needs"),
    ],
)
async def test_what_cannot_be_meant_is_a_usage_error(flags: tuple[str, ...], word: str) -> None:
    outcome = await run_headrace("budget", "--target", "127.0.0.1:1", *flags)
    assert outcome.status == 2
    assert word in outcome.err
