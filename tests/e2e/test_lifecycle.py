"""The real program in a process of its own, from its first port to its exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from headrace.v1.control_pb2 import GetLoadRequest
from headrace.v1.generation_pb2 import GenerateRequest
from tests.support.fake_runner import expected_output
from tests.support.served_tiny import served_tiny
from tests.support.server_process import ServerProcess, server_process
from tests.support.service import PROMPT, GenerateCall, ids_of, make_start, rest_of, until

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING

pytestmark = pytest.mark.slow


@pytest.fixture
def ready_file(tmp_path: Path) -> Path:
    return tmp_path / "ready.json"


def content_of(ready_file: Path) -> object:
    """What whoever started the server is told: nothing before it is ready, and after."""
    return json.loads(ready_file.read_text()) if ready_file.exists() else None


async def ids_over(server: ServerProcess, max_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    call = server.generation.Generate(GenerateRequest(start=make_start(max_tokens=max_tokens, prompt=prompt)))
    return ids_of([response.event async for response in call])


async def all_of(call: GenerateCall) -> None:
    async for _ in call:
        pass


async def test_sigterm_lets_streams_finish_and_exits_with_zero(ready_file: Path) -> None:
    async with server_process("fine", ready_file) as server:
        await server.until_health(SERVING)
        calls = [
            server.generation.Generate(GenerateRequest(start=make_start(max_tokens=100, prompt=(i + 1, 2))))
            for i in range(10)
        ]
        for call in calls:
            await call.read()
        server.send(signal.SIGTERM)
        await server.until_health(NOT_SERVING)
        answers = [[response.event async for response in rest_of(call)] for call in calls]
        assert await server.exit_code() == 0
    assert [ids_of(events) for events in answers] == [expected_output((i + 1, 2), 100) for i in range(10)]
    events = [event["event"] for event in server.events()]
    assert (
        events.index("listening") < events.index("ready") < events.index("draining") < events.index("drained")
    )


def left_in(folder: Path) -> list[str]:
    """The names of its files."""
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def stale_ready_file(ready_file: Path) -> Path:
    ready_file.write_text('"left by an earlier process"')
    return ready_file


async def test_the_ready_file_is_there_while_requests_are_welcome(stale_ready_file: Path) -> None:
    ready_file = stale_ready_file
    async with server_process("fine", ready_file) as server:
        await server.until_health(SERVING)
        assert content_of(ready_file) == {
            "port": server.port,
            "control_port": server.control_port,
            "pid": server.process.pid,
        }
        running = asyncio.create_task(ids_over(server, 200))
        while (await server.control.GetLoad(GetLoadRequest())).num_running == 0:
            pass
        server.send(signal.SIGTERM)
        await server.until_health(NOT_SERVING)
        assert content_of(ready_file) is None
        assert await running == expected_output(PROMPT, 200)
        assert await server.exit_code() == 0
    assert left_in(ready_file.parent) == []


async def test_the_log_says_where_to_connect_and_what_is_on(ready_file: Path) -> None:
    flags = "--speculation prompt_lookup --weight-dtype int8 --target-tpot-ms 50 --target-ttft-ms 500"
    async with server_process("fine", ready_file, *flags.split()) as server:
        await server.until_health(SERVING)
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    (ready,) = (event for event in server.events() if event["event"] == "ready")
    said = {
        "address": f"127.0.0.1:{server.port}",
        "model": "fake",
        "weight_dtype": "int8",
        "speculation": "prompt_lookup",
        "latency_budget": "tpot=50ms ttft=500ms",
        "tls": False,
        "auth": False,
    }
    assert ready | said == ready
    # How much fits, too: blocks, tokens, the longest sequence.
    names = ("kv_tokens", "kv_blocks", "block_size", "max_model_len")
    num_tokens, num_blocks, block_size, longest = (int(str(ready[name])) for name in names)
    assert num_tokens == num_blocks * block_size > 0
    assert longest > 0


async def test_a_server_needs_no_home_that_it_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    async with served_tiny(tmp_path) as tiny:
        await tiny.assert_unharmed()


async def test_a_ready_file_that_cannot_be_written_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    ready_file = tmp_path / "no-such-folder" / "ready.json"
    problem = rf"ended with 2: .*--ready-file {ready_file}: can't be written: No such file or directory"
    with pytest.raises(AssertionError, match=problem):
        async with server_process("hangs_in_load", ready_file):
            pass


async def test_new_requests_are_refused_while_the_running_ones_finish(ready_file: Path) -> None:
    async with server_process("fine", ready_file) as server:
        await server.until_health(SERVING)
        running = asyncio.create_task(ids_over(server, 200))
        while (await server.control.GetLoad(GetLoadRequest())).num_running == 0:
            pass
        server.send(signal.SIGTERM)
        await server.until_health(NOT_SERVING)
        refusal = None
        while refusal is None:
            try:
                await ids_over(server, 1)
            except grpc.aio.AioRpcError as error:
                refusal = error
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        assert await running == expected_output(PROMPT, 200)
        assert await server.exit_code() == 0


async def test_a_stream_longer_than_the_grace_is_ended_with_a_status(ready_file: Path) -> None:
    async with server_process("fine", ready_file, "--drain-grace-s", "0.2") as server:
        await server.until_health(SERVING)
        running = asyncio.create_task(ids_over(server, 16000))
        while (await server.control.GetLoad(GetLoadRequest())).num_running == 0:
            pass
        server.send(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await running
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await server.exit_code() == 0


async def test_a_second_signal_ends_it_at_once(ready_file: Path) -> None:
    async with server_process("fine", ready_file) as server:
        await server.until_health(SERVING)
        running = asyncio.create_task(ids_over(server, 16000))
        while (await server.control.GetLoad(GetLoadRequest())).num_running == 0:
            pass
        server.send(signal.SIGINT)
        await server.until_health(NOT_SERVING)
        server.send(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await running
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await server.exit_code() == 128 + signal.SIGINT


async def test_a_step_that_hangs_does_not_hold_up_a_second_signal(ready_file: Path) -> None:
    async with server_process("hangs", ready_file, "--stall-timeout-s", "0.2") as server:
        await server.until_health(SERVING)
        running = asyncio.create_task(ids_over(server, 4, prompt=(1,) * 13))
        await server.until_health(NOT_SERVING)
        await server.until_health(NOT_SERVING, "liveness")
        server.send(signal.SIGTERM)
        await until(lambda: any('"draining"' in line for line in server.lines))
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_while_the_model_loads_it_answers_not_yet_and_a_signal_ends_it(stale_ready_file: Path) -> None:
    ready_file = stale_ready_file
    async with server_process("hangs_in_load", ready_file) as server:
        assert await server.health() == NOT_SERVING
        assert content_of(ready_file) is None
        assert await server.health("liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await ids_over(server, 1)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0


async def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_two(ready_file: Path) -> None:
    async with server_process("fails_in_load", ready_file) as server:
        assert await server.exit_code() == 2
    assert server.lines[-1] == "headrace: /models/x: config.json is missing"
    assert not any("Traceback" in line for line in server.lines)


async def test_a_warm_up_that_fails_never_becomes_ready(ready_file: Path) -> None:
    async with server_process("fails_in_warm_up", ready_file) as server:
        assert await server.exit_code() == 2
    assert "tell-nobody" not in "\n".join(server.lines)
    assert not any('"ready"' in line for line in server.lines)


async def test_an_engine_that_dies_tells_everybody_and_takes_the_process_down(ready_file: Path) -> None:
    async with server_process("dies", ready_file, "--max-num-seqs", "16") as server:
        await server.until_health(SERVING)
        running = [asyncio.create_task(ids_over(server, 16000, prompt=(i + 1, 2))) for i in range(8)]
        while (await server.control.GetLoad(GetLoadRequest())).num_running < 8:
            pass
        killer = make_start(max_tokens=4, prompt=(1,) * 13)
        call = server.generation.Generate(GenerateRequest(start=killer))
        outcomes = await asyncio.gather(*running, all_of(call), return_exceptions=True)
        assert await server.exit_code() == 1
    assert all(isinstance(outcome, grpc.aio.AioRpcError) for outcome in outcomes)
    codes = {outcome.code() for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)}
    assert codes <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
    assert "engine died" in [event["event"] for event in server.events()]
    assert "tell-nobody" not in "\n".join(server.lines)


async def test_a_port_in_use_is_one_line_and_exit_code_two(ready_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=rf"ended with 2: .*127\.0\.0\.1:{port} is in use"):
            async with server_process("fine", ready_file, "--port", str(port)):
                pass


async def test_the_log_holds_no_text_of_anybody(ready_file: Path) -> None:
    secret = "tell-nobody"
    prompt = tuple(secret.encode())
    async with server_process("fine", ready_file, "--log-level", "debug") as server:
        await server.until_health(SERVING)
        assert await ids_over(server, 4, prompt=prompt) == expected_output(prompt, 4)
        bad = make_start(temperature=-1.0)
        bad.text = secret
        bad.stop.strings.append(secret)
        bad.request_id = f"{secret}\n"
        with pytest.raises(grpc.aio.AioRpcError):
            await server.generation.Generate(GenerateRequest(start=bad)).read()
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    assert secret not in "\n".join(server.lines)
    ended = [event for event in server.events() if event["event"] == "request ended"]
    assert [(event["outcome"], event["completion_tokens"]) for event in ended] == [("LENGTH", 4)]
