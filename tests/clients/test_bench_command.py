"""`headrace bench` as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from headrace.clients.cli import app
from tests.support.fake_scripts import fails
from tests.support.fake_server import running_fake_server
from tests.support.openai_server import DONE, running_openai_server, said, used
from tests.support.programs import run_headrace

NOBODY = "127.0.0.1:1"


async def test_a_server_is_measured_and_the_figures_are_written(tmp_path: Path) -> None:
    figures, picture = tmp_path / "run.json", tmp_path / "run.svg"
    async with running_fake_server() as server:
        outcome = await run_headrace(
            *("bench", "-t", server.target, "-n", "3", "-c", "2", "--prompt-len", "5", "--output-len", "4"),
            *("--goodput", "ttft=60s,tpot=60s", "--json", str(figures), "--plot", str(picture)),
        )
    assert outcome.status == 0, outcome.err
    assert "3 complete of 3" in outcome.out
    assert "100.0% of all" in outcome.out
    document = json.loads(figures.read_text())
    assert document["summary"]["num_output_tokens"] == 12
    assert document["command"][1:3] == ["bench", "-t"]
    assert document["settings"]["targets"]["tpot_s"] == 60
    assert picture.read_text().startswith("<?xml")


async def test_an_openai_server_is_measured_with_what_is_given(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with running_openai_server(said("a"), said("b", "length"), used(3, 2), DONE) as server:
        outcome = await run_headrace(
            *("bench", "--openai", server.url, "-n", "2", "--rate", "inf", "--output-len", "2"),
            *("--openai-extra", '{"top_k": 1}', "--api-key-file", str(key), "--temperature", "0.5"),
        )
    assert outcome.status == 0, outcome.err
    assert "2 complete of 2" in outcome.out
    assert (server.bodies[-1]["top_k"], server.bodies[-1]["temperature"]) == (1, 0.5)
    assert server.headers[-1]["authorization"] == "Bearer secret"


async def test_failed_requests_are_told_and_are_an_exit_status() -> None:
    refusal = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    async with running_fake_server(default=refusal) as server:
        outcome = await run_headrace("bench", "-t", server.target, "-n", "2", "--warm-up", "0")
    assert outcome.status == 1
    assert "2 × RESOURCE_EXHAUSTED" in outcome.out
    assert "the queue is full" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rate 0", "no rate"),
        ("--rate 1 --arrivals uniform", "poisson, constant"),
        ("--burstiness 2", "give a rate"),
        ("--arrivals recorded", "come from a dataset"),
        ("--dataset x.json --turns 2", "own prompts"),
        ("--duration soon", "'soon' is no time"),
        ("--duration 0s", "no time above 0"),
        ("--goodput ttft", "no target"),
        ("--goodput fast=1s", "'fast=1s' is no target"),
        ("--goodput ttft=1s,ttft=2s", "once each"),
        ("--goodput ttft=soon", "50ms"),
        ("--goodput tpot=50", "'50' has no unit: write 50ms or 50s"),
        ("--plot x.pdf", ".png or .svg"),
        ("--concurrency 0", "'--concurrency'"),
        ("--chat", "--chat: means something with --openai alone"),
        ("--openai-extra {}", "--openai-extra: means"),
        ("--openai http://x --bypass-cache", "--bypass-cache: means nothing"),
        ("--openai http://x --streams --control-target x:1", "--control-target, --streams: means nothing"),
        ("--openai x:80", "use http://HOST:PORT"),
        ("--openai http://", "is no URL"),
        ("--openai http://x --openai-extra {", "no JSON"),
        ("--openai http://x --openai-extra []", "a JSON object"),
        ("--openai http://x --api-key-file /no/such/file", "No such file"),
    ],
)
def test_a_wrong_command_line_is_said_before_anything_is_sent(arguments: str, said: str) -> None:
    outcome = CliRunner().invoke(app, ["bench", *arguments.split()], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert outcome.exit_code == 2
    assert said in outcome.output


@pytest.mark.parametrize("command", ["bench -n 1", "tune"])
async def test_nobody_there_is_one_line(command: str, tmp_path: Path) -> None:
    more = ("--out", str(tmp_path)) if command == "tune" else ()
    outcome = await run_headrace(*command.split(), "-t", NOBODY, *more)
    assert outcome.status == 1
    assert outcome.err.startswith("headrace: ")
    assert f"nobody listens at {NOBODY} " in outcome.err
    assert "`headrace serve` starts one" in outcome.err
    assert outcome.err.count("\n") == 1
