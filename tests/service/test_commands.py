from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.service.__main__ import main
from headrace.service.commands import pull, serve

ROOT = Path(__file__).parents[2]


def test_a_wrong_flag_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(["--modl", "x"]) == 2
    assert capsys.readouterr().err == "headrace: --modl is not known: did you mean --model?\n"


@pytest.mark.parametrize("argv", [[], ["dance"], ["--help", "serve"]])
def test_without_a_command_it_says_which_there_are(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert "headrace serve --model" in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "headrace pull" in capsys.readouterr().out


def test_what_cannot_be_pulled_is_one_line_and_exit_code_two(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pull([str(tmp_path / "nothing"), "--cache", str(tmp_path)]) == 2
    written = capfd.readouterr()
    assert written.out == ""
    assert written.err.startswith("headrace: ")
    assert "Traceback" not in written.err


@pytest.mark.parametrize("missing", ["grpc_reflection", "pydantic_settings", "structlog"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['headrace', 'serve', '--model', 'x'];"
        "import runpy; runpy.run_module('headrace.service', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install 'headrace[server]'" in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_configuring_a_server_imports_no_torch() -> None:
    program = "import sys, headrace.service.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False).returncode == 0
