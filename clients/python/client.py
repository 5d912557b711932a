"""The typed asyncio client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc
from grpc_health.v1 import health_pb2

from headrace.clients.connection import ConnectionOptions, Tls, open_channel, wait_until_connected
from headrace.clients.convert import answer_from_proto, model_from_proto, score_from_proto
from headrace.clients.errors import DeadlineExceeded, Unavailable
from headrace.clients.events import Answer, Model, RenderedChat, Score, ServingStatus, Tokenization
from headrace.clients.generation import GenerateCall, Generation, RpcGeneration
from headrace.clients.prompts import (
    Chat,
    ChatMessage,
    Prompt,
    RequestOptions,
    chat_message,
    extend_ids,
    score_message,
    start_message,
)
from headrace.clients.retry import Attempts, RetryPolicy, call_with_retries
from headrace.clients.session import Session, SessionCall
from headrace.clients.targets import DEFAULT_TARGET
from headrace.v1 import generation_pb2, model_pb2
from headrace.v1.generation_pb2_grpc import GenerationServiceStub
from headrace.v1.model_pb2_grpc import ModelServiceStub

_ASK_EVERY_S = 0.25
_ANSWER_S = 5.0
"""For one answer of a server that has long to come up."""


class InferenceClient:
    """A client of one server, for one event loop.

        async with InferenceClient("127.0.0.1:50051") as client:
            async for event in client.generate("Once upon a time", max_tokens=40, temperature=0):
                match event:
                    case Delta(text=text):
                        print(text, end="", flush=True)

    Every error that it raises is a `HeadraceError`. Retries: see `RetryPolicy`.

    Args:
        target: where the server listens, "host:port" or "unix:/path".
        credentials: gRPC's own, instead of `tls`; with neither it is plain text.
        tls: how the connection is encrypted.
        token: says who calls; in plain text it goes to a server on this machine only.
        retry: when a request is sent again.
        connection: keepalive and limits.
        rng: source of the jitter between attempts.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: Tls | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
        connection: ConnectionOptions | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.target = target
        self._credentials = credentials
        self._retry = retry or RetryPolicy()
        self._connection = (connection or ConnectionOptions()).with_access(tls, token)
        self._rng = rng or random.Random()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise RuntimeError("the client is open already")
        self._channel = open_channel(self.target, self._credentials, self._connection)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # ---- generation ----

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """A request with an RPC of its own; it is sent when its events are first read.

        Args:
            prompt: raw text, token ids or chat messages.
            timeout_s: longest time for the whole, retries included, seconds; past it `DeadlineExceeded`
                is raised.
            options: see `RequestOptions`.

        Raises:
            InvalidArgument: an option does not fit its type.
        """
        start = start_message(prompt, options, self._connection.max_message_bytes)
        stub = GenerationServiceStub(self._opened())

        def send(remaining_s: float | None) -> GenerateCall:
            return stub.Generate(generation_pb2.GenerateRequest(start=start), timeout=remaining_s)

        return RpcGeneration(start, send, lambda: self._attempts(timeout_s))

    async def generate_once(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Answer:
        """The whole answer in one message: a completion for each of its `n` sequences.

        Arguments as for `generate`.

        Raises:
            HeadraceError: the request failed; the class says why.
        """
        start = start_message(prompt, options, self._connection.max_message_bytes)
        stub = GenerationServiceStub(self._opened())
        response = await call_with_retries(
            lambda remaining_s: stub.GenerateOnce(
                generation_pb2.GenerateOnceRequest(start=start), timeout=remaining_s
            ),
            self._attempts(timeout_s),
        )
        return answer_from_proto(response)

    def session(self, *, timeout_s: float | None = None, resumes: bool = False) -> Session:
        """One stream for many requests: `async with client.session() as session`.

        Args:
            timeout_s: longest life of the session, seconds; past it open requests raise `DeadlineExceeded`.
            resumes: whether a stream that breaks is opened again, as `RetryPolicy` says, and the requests go
                on where they were: no token is lost and none comes twice. The server keeps them meanwhile, as
                long as its operator lets it; one that it has no longer is sent anew if nothing of its output
                had come, and raises `NotFound` otherwise.
        """
        channel = self._opened()
        deadline: list[Attempts] = []

        def open_stream() -> SessionCall:
            if not deadline:
                deadline.append(self._attempts(timeout_s))
            return GenerationServiceStub(channel).Session(timeout=deadline[0].remaining_s)

        return Session(
            connect=lambda: wait_until_connected(channel, self.target, self._attempts(timeout_s)),
            open_stream=open_stream,
            new_attempts=self._attempts,
            max_message_bytes=self._connection.max_message_bytes,
            resumes=resumes,
        )

    # ---- models and text ----

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All served models; the first is the default."""
        stub = ModelServiceStub(self._opened())
        response = await call_with_retries(
            lambda remaining_s: stub.ListModels(model_pb2.ListModelsRequest(), timeout=remaining_s),
            self._attempts(timeout_s),
        )
        return tuple(model_from_proto(model) for model in response.models)

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        with_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """Token ids of `text`, with their texts and the vocabulary's spellings of them when `with_tokens`."""
        stub = ModelServiceStub(self._opened())
        request = model_pb2.TokenizeRequest(
            model=model, text=text, add_special_tokens=add_special_tokens, with_tokens=with_tokens
        )
        response = await call_with_retries(
            lambda remaining_s: stub.Tokenize(request, timeout=remaining_s), self._attempts(timeout_s)
        )
        return Tokenization(tuple(response.token_ids), tuple(response.tokens), tuple(response.texts))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Text of `token_ids`."""
        stub = ModelServiceStub(self._opened())
        request = model_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        extend_ids(request.token_ids, token_ids, "token_ids")
        response = await call_with_retries(
            lambda remaining_s: stub.Detokenize(request, timeout=remaining_s), self._attempts(timeout_s)
        )
        return response.text

    async def apply_chat_template(
        self, chat: Chat | Sequence[ChatMessage], *, model: str = "", timeout_s: float | None = None
    ) -> RenderedChat:
        """The prompt that a conversation becomes: its text and its token ids."""
        stub = ModelServiceStub(self._opened())
        prompt = chat_message(chat if isinstance(chat, Chat) else Chat(chat))
        request = model_pb2.ApplyChatTemplateRequest(model=model, chat=prompt)
        response = await call_with_retries(
            lambda remaining_s: stub.ApplyChatTemplate(request, timeout=remaining_s),
            self._attempts(timeout_s),
        )
        return RenderedChat(response.text, tuple(response.token_ids))

    async def score(
        self,
        text: str | Sequence[int],
        *,
        model: str = "",
        num_context_tokens: int = 0,
        logprobs: int = 0,
        timeout_s: float | None = None,
    ) -> Score:
        """How likely the model finds a text.

        Args:
            text: raw text or token ids, at least two tokens; the first one is never scored.
            num_context_tokens: how many of the first tokens are context only.
            logprobs: tell this many likeliest tokens at each place.
        """
        stub = ModelServiceStub(self._opened())
        request = score_message(text, model, num_context_tokens, logprobs)
        response = await call_with_retries(
            lambda remaining_s: stub.Score(request, timeout=remaining_s), self._attempts(timeout_s)
        )
        return score_from_proto(response)

    # ---- health ----

    async def health(self, service: str = "", *, timeout_s: float | None = 5.0) -> ServingStatus:
        """Whether the server takes requests now. Asked once: no retries.

        Args:
            service: full name of a service; empty asks for the server as a whole.

        Raises:
            NotFound: the server has no such service.
            Unavailable: nobody answers.
        """
        check: grpc.aio.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = self._opened().unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        response = await call_with_retries(
            lambda remaining_s: check(health_pb2.HealthCheckRequest(service=service), timeout=remaining_s),
            Attempts(RetryPolicy(max_attempts=1), self._rng, timeout_s),
        )
        return ServingStatus(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    async def wait_until_serving(self, service: str = "", *, timeout_s: float) -> ServingStatus:
        """Ask every quarter of a second until the server takes requests, or the time is over.

        Args:
            service: as for `health`.
            timeout_s: time for all of it; 0 asks once. The last answer has a quarter of a second even then.

        Returns:
            What was answered last.

        Raises:
            NotFound: the server has no such service.
            Unavailable: nobody answered the last time.
            DeadlineExceeded: somebody was there the last time and said nothing.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while True:
            answer_s = min(_ANSWER_S, max(end_s - loop.time(), _ASK_EVERY_S))
            try:
                status = await self.health(service, timeout_s=answer_s)
                if status is ServingStatus.SERVING or loop.time() + _ASK_EVERY_S > end_s:
                    return status
            except (Unavailable, DeadlineExceeded):
                if loop.time() + _ASK_EVERY_S > end_s:
                    raise
            await asyncio.sleep(_ASK_EVERY_S)

    def _opened(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open: use `async with InferenceClient(...) as client`")
        return self._channel

    def _attempts(self, timeout_s: float | None = None) -> Attempts:
        return Attempts(self._retry, self._rng, timeout_s)
