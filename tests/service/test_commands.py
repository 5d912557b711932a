from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from headrace.service import commands, grpc_batches, memory
from headrace.service.__main__ import main
from headrace.service.commands import pull, serve
from tests.support.tiny_models import write_tiny_llama

ROOT = Path(__file__).parents[2]


def test_a_wrong_flag_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(["--modl", "x"]) == 2
    assert capsys.readouterr().err == "headrace: --modl is not known: did you mean --model?\n"


@pytest.mark.parametrize(("environment", "told"), [({}, [memory.NUM_HEAPS]), ({"MALLOC_ARENA_MAX": "4"}, [])])
def test_a_server_has_few_heaps_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: list[int]
) -> None:
    async def served(*_: object) -> int:
        return 0

    seen: list[int] = []
    monkeypatch.setattr(commands, "share_heaps", seen.append)
    monkeypatch.setattr(commands, "serve_until_stopped", served)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert serve(["--model", "some"]) == 0
    assert seen == told


@pytest.mark.parametrize(("version", "told"), [("1.85.0", []), ("1.86.1", [grpc_batches.UNMENDED])])
def test_a_version_of_grpc_that_loses_memory_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, told: list[str]
) -> None:
    async def served(*_: object) -> int:
        return 0

    monkeypatch.setattr(commands, "serve_until_stopped", served)
    monkeypatch.setattr(commands, "configure_logging", lambda *_: None)
    monkeypatch.setattr("grpc.__version__", version)
    with structlog.testing.capture_logs() as logs:
        assert serve(["--model", "some"]) == 0
    assert [entry["problem"] for entry in logs if entry["event"] == "memory will grow"] == told


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


def test_help_names_the_cache_that_is_in_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/elsewhere")
    for command in (pull, serve):
        with pytest.raises(SystemExit):
            command(["--help"])
        assert "(default: /elsewhere)" in capsys.readouterr().out


def test_ctrl_c_ends_a_fetch_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.service.commands.resolve_model", interrupted)
    assert main(["pull", "smollm2-135m-instruct"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_models_are_listed_with_their_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--cache", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["smollm2-135m-instruct", "    not here yet, 88.6MiB to fetch"]
    assert max(map(len, lines)) <= 100
    assert main(["models", "--cache", str(tmp_path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["spec"], first["download_bytes"], first["cached_bytes"]) == (
        "smollm2-135m-instruct",
        92871040,
        0,
    )


def test_a_folder_that_holds_no_model_is_not_pulled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty, whole = tmp_path / "empty", tmp_path / "whole"
    empty.mkdir()
    assert pull([str(empty)]) == 2
    written = capfd.readouterr()
    assert written.out == ""
    assert "config.json" in written.err
    write_tiny_llama(whole)
    assert pull([str(whole)]) == 0
    assert capfd.readouterr().out == f"{whole}\n"
    (whole / "model.safetensors").unlink()
    assert pull([str(whole)]) == 2
    assert "holds no weights" in capfd.readouterr().err


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
