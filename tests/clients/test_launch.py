"""The commands that are the server's own program, and what an installation without it still can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.clients.launch import SERVER_MODULES
from headrace.service.identity import Identity, Role
from headrace.service.tokens import TokenFile
from tests.support.fake_server import running_fake_server
from tests.support.programs import run_headrace

WITHOUT_SERVER = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from headrace.clients.cli import main; main()",
)
"""The command in an installation without the server extra: there, too, find_spec('torch') is None."""


@pytest.mark.parametrize(
    "command", [("serve", "--model", "x"), ("serve", "--help"), ("pull", "x"), ("demo",), ("tune",)], ids=str
)
async def test_without_the_server_extra_it_says_exactly_what_to_install(command: tuple[str, ...]) -> None:
    outcome = await run_headrace(*command, program=WITHOUT_SERVER)
    assert outcome.status == 2
    assert outcome.err.startswith("headrace: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("Install it: pip install 'headrace[server]'\n")


async def test_without_the_server_extra_the_rest_works() -> None:
    async with running_fake_server() as server:
        asked = ("generate", "hi", "-t", server.target, "--max-tokens", "1")
        outcome = await run_headrace(*asked, program=WITHOUT_SERVER)
    assert (outcome.status, outcome.out) == (0, "hi \n")


async def test_a_token_is_drawn_without_the_server_extra(tmp_path: Path) -> None:
    # What `pip install headrace` brings, and none of what the extra does.
    without = "import sys; " + "".join(
        f"sys.modules[{name!r}] = None; "
        for name in (*SERVER_MODULES, "numpy", "pydantic", "yaml", "prometheus_client", "grpc")
    )
    program = (
        sys.executable,
        "-c",
        without + "from headrace.service.__main__ import main; sys.exit(main())",
    )
    tokens = tmp_path / "tokens"
    outcome = await run_headrace("token", "alice", "--file", str(tokens), program=program)
    assert (outcome.status, outcome.err) == (0, "")
    assert TokenFile(tokens).identify(outcome.out.strip()) == Identity("alice", frozenset({Role.GENERATE}))
    refused = await run_headrace("token", "a:b", program=WITHOUT_SERVER)
    assert (refused.status, refused.err.count("\n")) == (2, 1)


async def test_a_folder_that_is_called_like_the_program_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "headrace" / "service").mkdir(parents=True)
    (tmp_path / "headrace" / "service" / "__main__.py").write_text("print('wrong')")
    (tmp_path / "headrace" / "service" / "__init__.py").touch()
    inside = (
        "/bin/sh",
        "-c",
        f'cd {tmp_path} && exec {sys.executable} -P -m headrace.clients.cli "$@"',
        "sh",
    )
    outcome = await run_headrace("token", "alice", program=inside)
    assert outcome.status == 0
    assert outcome.out.startswith("hr_")


@pytest.mark.parametrize(
    "arguments", [("serve", "--help"), ("pull", "--help"), ("serve", "--no-such")], ids=str
)
async def test_the_servers_commands_are_the_servers_own_program(arguments: tuple[str, ...]) -> None:
    through_us = await run_headrace(*arguments)
    directly = await run_headrace(*arguments, program=(sys.executable, "-m", "headrace.service"))
    assert through_us == directly
    assert through_us.out or through_us.err
