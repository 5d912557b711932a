"""`headrace tune` as its users run it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.clients.cli import app
from tests.support.fake_scripts import HangsAfter
from tests.support.fake_server import running_fake_server
from tests.support.programs import headrace_on_pipes, run_headrace

SHORT = ("--prompt-len", "4", "--output-len", "3", "--rounds", "1")


async def test_a_running_server_gets_a_curve_pictures_and_flags(tmp_path: Path) -> None:
    async with running_fake_server() as server:
        outcome = await run_headrace(
            "tune", "-t", server.target, "-c", "1,2", *SHORT, "--tpot", "60s", "--out", str(tmp_path)
        )
        again = await run_headrace("tune", "-t", server.target, "-c", "1,2", *SHORT, "--out", str(tmp_path))
    assert outcome.status == 0, outcome.err
    assert "Sweet spot (knee): " in outcome.out or "No knee within the range" in outcome.out
    assert "Best within the budget: " in outcome.out
    assert "  headrace serve --max-num-seqs" in outcome.out
    assert "point 2 of 2: 2 at a time" in outcome.err
    assert all((tmp_path / f"curve.{kind}").exists() for kind in ("json", "png", "svg"))
    assert (again.status, "point" in again.err) == (0, False)


async def test_ctrl_c_keeps_what_is_measured(tmp_path: Path) -> None:
    second_point = HangsAfter(16 + 1 + 2)
    async with (
        running_fake_server(default=second_point) as server,
        headrace_on_pipes(
            "tune", "-t", server.target, "-c", "1,2", *SHORT, "--out", str(tmp_path)
        ) as process,
    ):
        await second_point.hangs.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert b"goes on from here" in err
    assert b"No knee within the range" in out
    assert b"--concurrency 1,2,4\n" in out
    assert b"Highest throughput: 1 at a time" in out
    assert len(json.loads((tmp_path / "curve.json").read_text())["points"]) == 1
    assert (tmp_path / "curve.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-c 1,x", "'1,x' is no list of numbers"),
        ("-c 1,1", "names a number twice"),
        ("-c 0", "begin at 1"),
        ("--batched-tokens 64,64", "twice"),
        ("--tpot soon", "no time"),
        ("--tpot 5", "'5' has no unit: write 5ms or 5s"),
        ("--ttft 0.5", "'0.5' has no unit: write 0.5ms or 0.5s"),
        ("--serve=--port=0", "--port is set here"),
        ("--serve=--max-num-seqs=4", "the largest of --concurrency"),
        ("-t x:1 --serve=--dtype", "can't be given flags"),
        ("-t x:1 --batched-tokens 64", "can't change"),
        ("--prompt-len many -t x:1", "no distribution"),
    ],
)
def test_a_wrong_command_line_is_said_before_anything_is_measured(
    arguments: str, said: str, tmp_path: Path
) -> None:
    outcome = CliRunner().invoke(app, ["tune", *arguments.split(), "--out", str(tmp_path)])
    assert outcome.exit_code == 2
    assert said in outcome.output
    assert list(tmp_path.iterdir()) == []


async def test_another_tunings_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text("{}")
    outcome = await run_headrace("tune", "-t", "127.0.0.1:1", "--out", str(tmp_path))
    assert outcome.status == 2
    assert "use another --out" in outcome.err
    assert (tmp_path / "curve.json").read_text() == "{}"
