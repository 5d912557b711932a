"""Nothing that a caller says, and nothing that he is answered, is left behind in logs, metrics or errors."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from headrace.v1.generation_pb2 import (
    CacheOptions,
    ChatMessage,
    ChatPrompt,
    Constraint,
    GenerateOnceRequest,
    GenerateRequest,
    SamplingOptions,
    SessionRequest,
    StartGeneration,
    StopOptions,
    TokenIds,
)
from tests.support.server_process import ServerProcess, server_process

SECRET = "xyzzy-plugh"
# An error may quote its own sender's grammar back to him, to show him the place.
QUOTED = "frotz-gnusto"
SECRET_IDS = [200, 201, 202, 203]


async def failure_of(server: ServerProcess, start: StartGeneration, **call: object) -> str:
    """What a request that fails is told."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await server.generation.GenerateOnce(GenerateOnceRequest(start=start), **call)  # type: ignore[arg-type]
    return repr(failure.value) + str(failure.value.trailing_metadata())


async def ask_in_every_way(server: ServerProcess) -> list[str]:
    """Requests that hold the secret in every field that holds text; what errors say."""
    chat = ChatPrompt(messages=[ChatMessage(role="user", content=SECRET, name=SECRET)])
    few = StopOptions(max_tokens=4, strings=[SECRET])
    fine = StartGeneration(chat=chat, stop=few, cache=CacheOptions(salt=SECRET))
    fine.sampling.bad_words.append(SECRET)
    long = StopOptions(max_tokens=16_000)
    metadata = (("x-note", SECRET), ("traceparent", SECRET), ("authorization", SECRET))
    response = await server.generation.GenerateOnce(GenerateOnceRequest(start=fine), metadata=metadata)
    told = [
        await failure_of(server, StartGeneration(text=SECRET, stop=long), timeout=0.3),
        await failure_of(server, StartGeneration(text=SECRET, sampling=SamplingOptions(top_p=7))),
        await failure_of(server, StartGeneration(text=SECRET, constraint=Constraint(regex=f"({QUOTED}"))),
        await failure_of(server, StartGeneration(text=SECRET, constraint=Constraint(json_schema=QUOTED))),
        await failure_of(server, StartGeneration(text=SECRET, constraint=Constraint(grammar=QUOTED))),
        await failure_of(server, StartGeneration(text=SECRET, request_id=f"{SECRET}\n")),
        await failure_of(server, StartGeneration(text=SECRET * 2**18)),
    ]
    cancelled = server.generation.Generate(
        GenerateRequest(start=StartGeneration(token_ids=TokenIds(ids=SECRET_IDS), stop=long))
    )
    await cancelled.read()
    cancelled.cancel()
    session = server.generation.Session(iter([SessionRequest(start=fine), SessionRequest()]))
    with pytest.raises(grpc.aio.AioRpcError) as breach:
        async for _ in session:
            pass
    assert response.completions[0].text
    return [*told, repr(breach.value)]


async def test_no_word_of_it_is_left_behind(tmp_path: Path) -> None:
    flags = ("--log-level", "debug", "--access-log", "--metrics-port", "0")
    ready = tmp_path / "ready"
    async with server_process("fine", ready, *flags) as server:
        await server.until_health(1)
        told = await ask_in_every_way(server)
        port = json.loads(await asyncio.to_thread(ready.read_text))["metrics_port"]

        def scrape() -> str:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                return str(response.read().decode())

        metrics = await asyncio.to_thread(scrape)
        server.send(signal.SIGTERM)
        assert await server.exit_code() == 0
    ids = re.compile(r"\b200\b\D{1,3}\b201\b")
    logged = "\n".join(server.lines)
    for place, text in (("log", logged), ("metrics", metrics), ("errors", "".join(told))):
        assert SECRET not in text, place
        assert QUOTED not in text or place == "errors"
        assert not ids.search(text), place
    assert "headrace_generation_tokens_total" in metrics
    outcomes = [event for event in server.events() if event["event"] == "request ended"]
    assert {str(event["outcome"]).partition("/")[0] for event in outcomes} >= {"CANCELLED", "LENGTH"}
    accesses = [event for event in server.events() if str(event["event"]).startswith("rpc ")]
    assert {event["outcome"] for event in accesses} >= {"OK", "INVALID_ARGUMENT", "CANCELLED"}
    (fine,) = [
        event
        for event in accesses
        if event["outcome"] == "OK" and str(event["method"]).endswith("/GenerateOnce")
    ]
    assert (fine["peer"], fine["completion_tokens"]) == ("127.0.0.1", 4)
