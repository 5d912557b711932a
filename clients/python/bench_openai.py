"""Load over the HTTP protocol that OpenAI made common: `/v1/completions` or `/v1/chat/completions`,
streamed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from headrace.clients.bench_backend import (
    Ask,
    BackendError,
    Connection,
    End,
    RequestFailedError,
    Server,
    Tokens,
)

if TYPE_CHECKING:
    import httpx2

_WHAT_IT_TAKES = (
    "is a server running there? --openai takes the address of its HTTP port, such as http://127.0.0.1:8000, "
    "with or without /v1; a Headrace server speaks gRPC and is measured with --target"
)
INSTALL_COMMAND = "pip install 'headrace[bench]'"
_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class OpenAiBackend:
    """Any server of that protocol.

    Token ids as a prompt are standard for completions and impossible in a chat. A length is forced by
    `ignore_eos` and `min_tokens`, which vLLM and llama.cpp understand (OpenAI's own service refuses them).
    How many tokens a chunk holds is not told: a chunk counts as one, and what the final usage says beyond
    them is taken to have come with the last one.

    Args:
        url: "http://host:port", with or without /v1.
        is_chat: `/v1/chat/completions`.
        model: None: the first that the server lists.
        api_key: sent as a bearer token.
        extra: further fields of every request's body.
    """

    url: str
    is_chat: bool = False
    model: str | None = None
    temperature: float = 0.0
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def tells_output(self) -> bool:
        """See `Backend`."""
        return False

    async def describe(self) -> Server:
        """See `Backend`."""
        model = await self._model()
        protocol = "openai chat" if self.is_chat else "openai completions"
        return Server(protocol, self.url, {"model": {"name": model}})

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """See `Backend`."""
        model = await self._model()
        async with self._client() as client:
            yield _OpenAiConnection(client, self, model)

    @property
    def _root(self) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1"

    def _client(self) -> httpx2.AsyncClient:
        import httpx2  # noqa: PLC0415  it comes with an extra

        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return httpx2.AsyncClient(
            base_url=f"{self._root}/",
            headers=headers,
            timeout=httpx2.Timeout(None, connect=30.0),
            # A request waits in the server's queue, never for one of our connections.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def _model(self) -> str:
        require_http_client()
        if self.model is not None:
            return self.model
        import httpx2  # noqa: PLC0415

        try:
            async with self._client() as client:
                response = await client.get("models", timeout=30.0)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise BackendError(_unanswered(f"GET {self._root}/models", error)) from error
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx2.HTTPStatusError, ValueError, LookupError, TypeError):
            raise BackendError(
                f"GET {response.url} answers {response.status_code} and names no model: name one with "
                f"--model ({_WHAT_IT_TAKES})"
            ) from None


def require_http_client() -> None:
    """Check that HTTP can be spoken here.

    Raises:
        BackendError: what to install.
    """
    if importlib.util.find_spec("httpx2") is None:
        raise BackendError(f"--openai needs httpx2, which is not installed. Install it: {INSTALL_COMMAND}")


def _unanswered(tried: str, error: Exception) -> str:
    return f"{tried}: no answer: {str(error) or type(error).__name__} ({_WHAT_IT_TAKES})"


class _OpenAiConnection:
    def __init__(self, client: httpx2.AsyncClient, backend: OpenAiBackend, model: str) -> None:
        self._client = client
        self._backend = backend
        self._model = model

    async def ask(self, ask: Ask) -> AsyncGenerator[Tokens | End]:
        import httpx2  # noqa: PLC0415

        path = "chat/completions" if self._backend.is_chat else "completions"
        try:
            async with self._client.stream("POST", path, json=self._body(ask)) as response:
                if response.status_code != httpx2.codes.OK:
                    await response.aread()
                    raise RequestFailedError(f"HTTP_{response.status_code}", _error_text(response.text))
                async for part in _parts(response):
                    yield part
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            tried = f"POST {self._client.base_url}{path}"
            raise RequestFailedError(type(error).__name__, _unanswered(tried, error)) from error
        except httpx2.HTTPError as error:
            raise RequestFailedError(type(error).__name__, str(error)) from error

    def _body(self, ask: Ask) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": ask.output_len,
            "temperature": self._backend.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._backend.is_chat:
            if not isinstance(ask.prompt, str):
                raise BackendError("a chat takes texts: use a dataset of texts, or completions")
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        if ask.is_length_forced:
            body |= {"ignore_eos": True, "min_tokens": ask.output_len}
        return body | dict(self._backend.extra)


async def _parts(response: httpx2.Response) -> AsyncGenerator[Tokens | End]:
    """Tokens as they arrive, then the end with the usage that the server told."""
    end = End()
    is_over = False
    async for line in _data_lines(response):
        if line == b"[DONE]":
            is_over = True
            break
        chunk = _parsed(line)
        end = _usage(chunk) or end
        for choice in cast("list[dict[str, object]]", chunk.get("choices") or []):
            is_over = is_over or choice.get("finish_reason") is not None
            text = _text(choice)
            # An empty text in the middle of a completion is a token whose characters are not complete yet.
            if text or ("text" in choice and choice.get("finish_reason") is None):
                yield Tokens(1, text)
    if not is_over:
        raise RequestFailedError("STREAM_CUT", "the stream ended before the answer did")
    yield end


async def _data_lines(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """What follows `data:` in each line of a stream of server-sent events."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _parsed(line: bytes) -> dict[str, object]:
    try:
        chunk = json.loads(line)
    except ValueError as error:
        raise RequestFailedError("BAD_CHUNK", f"no JSON: {error}") from None
    if not isinstance(chunk, dict):
        raise RequestFailedError("BAD_CHUNK", f"no object: {line[:60]!r}")
    if chunk.get("error"):
        raise RequestFailedError("STREAM_ERROR", _error_text(line.decode(errors="replace")))
    return cast("dict[str, object]", chunk)


def _text(choice: Mapping[str, object]) -> str:
    """The new text of a choice; what a model thinks before it answers is text, too."""
    parts = choice.get("delta") or {}
    if not isinstance(parts, Mapping):
        return ""
    pieces = (
        choice.get("text"),
        parts.get("reasoning_content"),
        parts.get("reasoning"),
        parts.get("content"),
    )
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _usage(chunk: Mapping[str, object]) -> End | None:
    usage = chunk.get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return End(
        num_prompt_tokens=_count(usage.get("prompt_tokens")),
        num_tokens=_count(usage.get("completion_tokens")),
        num_cached_tokens=_count(cached),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _error_text(body: str) -> str:
    """The message inside an error's body, whatever its shape."""
    try:
        error = json.loads(body)
    except ValueError:
        return body[:_MAX_MESSAGE]
    while isinstance(error, dict) and ("error" in error or "message" in error):
        error = error.get("error") or error["message"]
    return str(error)[:_MAX_MESSAGE]
