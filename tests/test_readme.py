"""The README's examples run: against a scripted server always, against the real model where there is one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2

from headrace.clients.demo_server import running_server
from headrace.v1 import generation_pb2
from tests.support.fake_scripts import Step, bad_request, echo, fails
from tests.support.fake_server import running_fake_server
from tests.support.programs import HEADRACE, run_headrace
from tests.support.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = ROOT / "tests" / "benchmarks"
ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word behind it, and what is in it."""

    language: str
    tag: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that one would type."""
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(language: str, tag: str = "") -> Iterator[Block]:
    """Fenced blocks of one kind."""
    for match in re.finditer(r"^```(\w+) ?(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL):
        block = Block(*match.groups())
        if (block.language, block.tag) == (language, tag):
            yield block


def the_command(tag: str) -> list[str]:
    """The words of a block's only command."""
    ((command,),) = (block.commands for block in blocks("console", tag))
    return shlex.split(command)


@asynccontextmanager
async def scripted_server() -> AsyncIterator[str]:
    """A server that refuses top_p=0 as the real one does."""

    refuse = fails(grpc.StatusCode.INVALID_ARGUMENT, "no", bad_request(sampling__top_p="must be above 0"))

    def script(start: generation_pb2.StartGeneration) -> AsyncIterator[Step]:
        is_refused = start.sampling.HasField("top_p") and start.sampling.top_p == 0
        return (refuse if is_refused else echo)(start)

    async with running_fake_server(default=script) as server:
        yield server.target


@asynccontextmanager
async def real_server() -> AsyncIterator[str]:
    """The README's own `headrace serve`, on free ports."""
    program, command, *arguments = the_command("serve")
    assert (program, command) == ("headrace", "serve")
    async with running_server([*arguments, "--kv-memory", "256MiB"]) as server:
        yield server.target


each_server = pytest.mark.parametrize(
    "serving",
    [
        scripted_server,
        pytest.param(real_server, marks=[pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=["scripted", "real"],
)


@each_server
async def test_python_examples_run(serving: Callable[[], AbstractAsyncContextManager[str]]) -> None:
    (example,) = blocks("python", "test")
    assert ADDRESS in example.text
    async with serving() as target:
        program = (sys.executable, "-c", example.text.replace(ADDRESS, target))
        outcome = await run_headrace(program=program)
    assert (outcome.status, outcome.err) == (0, "")
    assert "[length, 20 tokens]" in outcome.out
    assert "FieldViolation(field='sampling.top_p'" in outcome.out


@each_server
async def test_commands_run(serving: Callable[[], AbstractAsyncContextManager[str]]) -> None:
    commands = [command for block in blocks("console", "test") for command in block.commands]
    assert len(commands) >= 5
    async with serving() as target:
        for command in commands:
            # The whole line, pipes and all; `headrace` is this tree's own, and the address is the server's.
            ours = rf"\1{shlex.join(HEADRACE)} \2 --target {target}"
            line = re.sub(r"(^|\| )headrace (\w+)", ours, command)
            outcome = await run_headrace(program=("/bin/sh", "-c", line))
            assert outcome.status == 0, f"{command}: {outcome.err}"
            assert outcome.out.strip()
            if "--json" in command:
                assert json.loads(outcome.out)["sampling"]["seed"] == 7


def test_the_javascript_example_speaks_the_protocol() -> None:
    (example,) = blocks("javascript")
    (started,) = re.findall(r"session\.write\((.*)\);", example.text)
    written = re.sub(r"(\w+):", r'"\1":', started.replace("request_id, text", 'request_id: "a", text: "b"'))
    message = json_format.ParseDict(json.loads(written), generation_pb2.SessionRequest())
    assert message.start.stop.max_tokens > 0
    (told,) = re.findall(r"const \{ (.*) \} of events", example.text)
    assert set(told.split(", ")) <= set(generation_pb2.GenerationEvent.DESCRIPTOR.fields_by_name)
    (service,) = re.findall(r"new (headrace\.v1\.\w+)\(", example.text)
    assert service in {each.full_name for each in generation_pb2.DESCRIPTOR.services_by_name.values()}
    # The file that protobuf's own compilers don't bring lies where the README says.
    assert status_pb2.__file__ is not None
    assert Path(status_pb2.__file__).with_name("status.proto").is_file()
    assert "site-packages" in Path(status_pb2.__file__).parent.parent.parent.name


def test_the_grpcurl_example_names_a_method_and_its_message() -> None:
    words = the_command("grpcurl")
    service, method = words[-1].split("/")
    descriptor = generation_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert descriptor.full_name == service
    assert descriptor.methods_by_name[method].input_type is generation_pb2.GenerateRequest.DESCRIPTOR
    request = json_format.Parse(words[words.index("-d") + 1], generation_pb2.GenerateRequest())
    assert request.start.stop.max_tokens == 20
    assert words[-2] == ADDRESS


async def test_every_flag_and_variable_that_is_named_exists() -> None:
    commands = (
        "serve",
        "generate",
        "chat",
        "health",
        "bench",
        "tune",
        "budget",
        "draft",
        "models",
        "token",
        "tokenize",
        "top",
        "timeline",
    )
    helps = [await run_headrace(*command, "--help") for command in [(), *((name,) for name in commands)]]
    known = set(re.findall(r"--[a-z][a-z-]+", " ".join(outcome.out for outcome in helps)))
    known |= {"--help", "--raw", "--only"}
    known |= {"--read-only", "--user"}  # `docker run`'s
    for name in set(re.findall(r"python -m tests\.benchmarks\.(\w+)", README)):
        program = next(
            path for path in (BENCHMARKS / f"{name}.py", BENCHMARKS / name / "__main__.py") if path.exists()
        )
        known |= set(re.findall(r'"(--[a-z][a-z-]+)"', program.read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named <= known
    variables = set(re.findall(r"HEADRACE_[A-Z_]+", README))
    assert {f"--{name.removeprefix('HEADRACE_').lower().replace('_', '-')}" for name in variables} <= known


def test_make_targets_and_files_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake (demo|test|check|install|help)\b", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    for name in re.findall(r"`((?:engine|service|clients|proto|docker|tests|\.ci)/[\w./*]*)`", README):
        assert list(ROOT.glob(name)), name


def test_lines_are_short_enough_to_read() -> None:
    long = [line for line in README.splitlines() if len(line) > 120 and not line.startswith(("$ ", "|"))]
    assert long == []


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(pictures) >= 2
    for name in pictures:
        assert 0 < (ROOT / name).stat().st_size < 60_000, name
