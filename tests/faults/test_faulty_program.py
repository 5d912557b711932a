"""Faults in the real program: from its first port to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.generation_pb2 import GenerateRequest, StopOptions
from tests.support.aftermath import assert_as_new, canary_ids
from tests.support.faults import POISON, SECRET
from tests.support.server_process import ServerProcess, server_process
from tests.support.service import make_start, until
from tests.support.tiny_models import write_tiny_llama

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
FAULTY = "tests.support.serve_faulty"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("faulty") / "tiny"))


async def ending_of(server: ServerProcess, prompt: tuple[int, ...], max_tokens: int = 40) -> grpc.StatusCode:
    """How a request ends; that it ends is the point."""
    start = make_start(prompt=prompt, max_tokens=max_tokens, stop=StopOptions(ignore_eos=True))
    call = server.generation.Generate(GenerateRequest(start=start), timeout=60)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


async def test_while_the_model_loads_nobody_waits_and_ready_comes_once(tiny: str, tmp_path: Path) -> None:
    async with server_process("slow-loader", tmp_path / "r.json", "--model", tiny, module=FAULTY) as server:
        seen: list[int] = []

        async def watch() -> None:
            while not seen or seen[-1] != SERVING:
                seen.append(await server.health())
                assert await server.health("liveness") == SERVING

        watching = asyncio.create_task(watch())
        for _ in range(5):
            assert await ending_of(server, (1, 2, 3)) is grpc.StatusCode.UNAVAILABLE
        server.send(signal.SIGUSR1)
        await watching
        assert seen == [NOT_SERVING] * (len(seen) - 1) + [SERVING]
        assert len(await canary_ids(f"127.0.0.1:{server.port}")) == 8
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    assert any("BREAKS ON PURPOSE" in line for line in server.lines)


@pytest.mark.parametrize("fault", ["raise", "nan-row", "wrong-length", "panic"])
async def test_what_strikes_one_request_leaves_the_program_as_new(
    tiny: str, tmp_path: Path, fault: str
) -> None:
    async with server_process(fault, tmp_path / "r.json", "--model", tiny, module=FAULTY) as server:
        await server.until_health(SERVING)
        address, control_address = f"127.0.0.1:{server.port}", f"127.0.0.1:{server.control_port}"
        right = await canary_ids(address)
        for _ in range(5):
            assert await ending_of(server, (5, POISON, 6)) is grpc.StatusCode.INTERNAL
        await assert_as_new(address, control_address, right)
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    assert SECRET not in "\n".join(server.lines)


@pytest.mark.parametrize("fault", ["death@20", "raise@20+", "panic@20+"])
async def test_when_nothing_goes_any_more_all_are_told_and_the_program_ends(
    tiny: str, tmp_path: Path, fault: str
) -> None:
    async with server_process(fault, tmp_path / "r.json", "--model", tiny, module=FAULTY) as server:
        await server.until_health(SERVING)
        endings = await asyncio.gather(*(ending_of(server, (i + 3, 5, 6)) for i in range(20)))
        # A step that fails as a whole is tried three times: by whoever comes next.
        while server.process.returncode is None:
            endings.append(await ending_of(server, (5, 6, 7)))
        assert await server.exit_code() == 1
    assert set(endings) <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
    assert SECRET not in "\n".join(server.lines)


async def test_a_step_that_hangs_shows_in_health_and_so_does_its_end(tiny: str, tmp_path: Path) -> None:
    flags = ("--model", tiny, "--stall-timeout-s", "0.2")
    async with server_process("hang", tmp_path / "r.json", *flags, module=FAULTY) as server:
        await server.until_health(SERVING)
        hanging = asyncio.create_task(ending_of(server, (5, POISON, 6), max_tokens=1))
        await server.until_health(NOT_SERVING)
        await until(lambda: any("engine stuck" in line for line in server.lines))
        server.send(signal.SIGUSR1)
        await server.until_health(SERVING)
        assert await hanging is grpc.StatusCode.OK


async def test_a_faulty_server_is_for_this_machine_alone(tiny: str, tmp_path: Path) -> None:
    flags = ("--model", tiny, "--host", "0.0.0.0", "--insecure")
    async with server_process("none", tmp_path / "r.json", *flags, module=FAULTY) as server:
        assert await server.exit_code() == 2
    assert "for this machine alone" in server.lines[-1]
