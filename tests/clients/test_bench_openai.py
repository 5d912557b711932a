from __future__ import annotations

import json

import pytest

from headrace.clients.bench_backend import Ask, BackendError, End, RequestFailedError, Tokens
from headrace.clients.bench_openai import OpenAiBackend
from tests.support.openai_server import DONE, chatted, event, running_openai_server, said, used
from tests.support.service import running_service

IDS = Ask((5, 6, 7), 3)


async def asked(backend: OpenAiBackend, ask: Ask = IDS) -> list[Tokens | End]:
    """Everything that comes back."""
    async with backend.connect() as connection:
        return [part async for part in connection.ask(ask)]


async def test_a_completion_is_a_token_a_chunk_and_the_usage_at_the_end() -> None:
    pieces = (said("a"), said("b"), said("c", "length"), used(3, 3), DONE)
    async with running_openai_server(*pieces) as server:
        parts = await asked(OpenAiBackend(server.url))
    assert parts == [Tokens(1, "a"), Tokens(1, "b"), Tokens(1, "c"), End(3, 3)]
    assert server.paths == ["/v1/models", "/v1/completions"]
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 3,
            "min_tokens": 3,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_may_be_cut_anywhere(size: int) -> None:
    whole = said("grüße") + ": a comment\n\n" + said("b", "stop") + used(3, 2) + DONE
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    async with running_openai_server(*pieces) as server:
        assert await asked(OpenAiBackend(server.url)) == [Tokens(1, "grüße"), Tokens(1, "b"), End(3, 2)]


async def test_an_empty_chunk_is_a_token_unless_it_only_tells_the_end() -> None:
    pieces = (said(""), said("a"), said("", "length"), DONE)
    async with running_openai_server(*pieces) as server:
        assert await asked(OpenAiBackend(server.url)) == [Tokens(1, ""), Tokens(1, "a"), End()]


async def test_a_chat_sends_a_message_and_does_not_count_the_role() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}])
    pieces = (role, thought, chatted("a"), chatted("", "stop"), DONE)
    async with running_openai_server(*pieces) as server:
        backend = OpenAiBackend(f"{server.url}/v1/", is_chat=True, model="other")
        parts = await asked(backend, Ask("Why?", 9, is_length_forced=False))
    assert parts == [Tokens(1, "hm"), Tokens(1, "a"), End()]
    assert server.paths == ["/v1/chat/completions"]
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert body["model"] == "other"
    assert "ignore_eos" not in body
    assert "min_tokens" not in body


async def test_further_fields_and_a_key_are_sent() -> None:
    async with running_openai_server(said("a", "length"), DONE) as server:
        backend = OpenAiBackend(server.url, api_key="secret", extra={"top_k": 1, "temperature": 0.5})
        await asked(backend)
        assert "secret" not in repr(backend)
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert (server.bodies[0]["top_k"], server.bodies[0]["temperature"]) == (1, 0.5)


async def test_cached_tokens_are_told() -> None:
    usage = used(3, 1, prompt_tokens_details={"cached_tokens": 2})
    async with running_openai_server(said("a", "length"), usage, DONE) as server:
        assert (await asked(OpenAiBackend(server.url)))[-1] == End(3, 1, 2)


@pytest.mark.parametrize(
    ("pieces", "status", "is_cut", "code", "message"),
    [
        ((json.dumps({"error": {"message": "no such model"}}),), 404, False, "HTTP_404", "no such model"),
        ((json.dumps({"message": "busy"}),), 503, False, "HTTP_503", "busy"),
        (("<html>gone",), 502, False, "HTTP_502", "<html>gone"),
        ((said("a"), event(error={"message": "out of memory"})), 200, False, "STREAM_ERROR", "out of memory"),
        ((said("a"),), 200, False, "STREAM_CUT", "ended before"),
        (("data: {oops\n\n",), 200, False, "BAD_CHUNK", "no JSON"),
        (("data: 5\n\n",), 200, False, "BAD_CHUNK", "no object"),
        ((said("a"),), 200, True, "RemoteProtocolError", "closed"),
    ],
)
async def test_a_failure_has_a_code_and_the_servers_words(
    pieces: tuple[str, ...], status: int, is_cut: bool, code: str, message: str
) -> None:
    async with running_openai_server(*pieces, status=status, is_cut=is_cut) as server:
        with pytest.raises(RequestFailedError, match=message) as failure:
            await asked(OpenAiBackend(server.url, model="tiny"))
    assert failure.value.code == code


async def test_nobody_there_is_said() -> None:
    hint = r"no answer: .*takes .* such as http://127.0.0.1:8000.*with --target"
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:1/v1/"):
        with pytest.raises(BackendError, match=f"^GET http://127.0.0.1:1/v1/models: {hint}"):
            await OpenAiBackend(url).describe()
        with pytest.raises(
            RequestFailedError, match=f"^POST http://127.0.0.1:1/v1/completions: {hint}"
        ) as failure:
            await asked(OpenAiBackend(url, model="tiny"))
        assert failure.value.code == "ConnectError"


async def test_a_port_that_speaks_grpc_is_told_with_the_flag_for_it() -> None:
    async with running_service() as service:
        with pytest.raises(BackendError, match=f"^GET http://{service.address}/v1/models: .*with --target"):
            await OpenAiBackend(f"http://{service.address}").describe()


async def test_a_server_that_names_no_model_needs_one_named() -> None:
    async with running_openai_server("{}", status=404) as server:
        with pytest.raises(
            BackendError, match=rf"^GET {server.url}/v1/models answers 404 .*with --model .*takes"
        ):
            await OpenAiBackend(server.url).describe()


async def test_ids_can_not_be_chatted() -> None:
    async with running_openai_server() as server:
        with pytest.raises(BackendError, match="texts"):
            await asked(OpenAiBackend(server.url, is_chat=True), IDS)
