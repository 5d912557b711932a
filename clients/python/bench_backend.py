"""How requests reach a server, and what comes back: what a load test needs to know of a protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeAlias

from headrace.clients.bench_workload import TextOrIds
from headrace.clients.client import InferenceClient
from headrace.clients.connection import ConnectionOptions
from headrace.clients.control import ControlClient
from headrace.clients.errors import HeadraceError, NotFound
from headrace.clients.events import Delta, Finished, FinishReason, Model
from headrace.clients.generation import Generation
from headrace.clients.prompts import RequestOptions
from headrace.clients.retry import RetryPolicy


class RequestFailedError(Exception):
    """One request failed.

    Args:
        code: short and the same for all failures of a kind: it is counted by it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class BackendError(Exception):
    """The server can't be measured at all, or not with these options; the message says what would be
    right."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Args:
        output_len: most tokens to make.
        is_length_forced: make exactly so many, whatever the model would end with.
    """

    prompt: TextOrIds
    output_len: int
    is_length_forced: bool = True


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that arrived together.

    Args:
        output: what a following turn repeats of them: their ids or their text, as the prompt was; None where
            the server does not tell.
    """

    count: int
    output: TextOrIds | None


@dataclass(frozen=True, slots=True)
class End:
    """The request is over. None: the server doesn't tell.

    Args:
        num_tokens: tokens that the server says it made.
    """

    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    num_cached_tokens: int | None = None
    queued_s: float | None = None
    num_preemptions: int = 0


class Connection(Protocol):
    """An open connection, shared by all requests of a run."""

    def ask(self, ask: Ask) -> AsyncGenerator[Tokens | End]:
        """Send a request and tell what comes back, `End` last.

        Raises, when it is iterated:
            RequestFailedError: it failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Server:
    """What is measured.

    Args:
        protocol: "grpc session", "grpc streams", "openai completions", "openai chat".
        facts: what it says about itself.
        vocabulary_size: token ids are below it; None: it doesn't say.
    """

    protocol: str
    address: str
    facts: Mapping[str, object] = field(default_factory=dict)
    vocabulary_size: int | None = None


class Backend(Protocol):
    """A server, over one protocol."""

    @property
    def tells_output(self) -> bool:
        """Whether `Tokens.output` of token ids is told: conversations of ids need it."""
        ...

    async def describe(self) -> Server:
        """What it is.

        Raises:
            BackendError: it does not answer.
        """
        ...

    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """Open a connection for as long as the block lasts."""
        ...


@dataclass(frozen=True, slots=True)
class GrpcBackend:
    """A Headrace server.

    Args:
        target, control_target: where it listens; without the latter less is told about it.
        is_multiplexed: all requests over one `Session`; otherwise an RPC for each.
        bypass_cache: keep the server's prefix cache out of it.
        model: name of a served model; None: the default one.
        temperature: 0 is greedy.
        connection: how the channel is opened.
    """

    target: str
    control_target: str | None = None
    is_multiplexed: bool = True
    bypass_cache: bool = False
    model: str | None = None
    temperature: float = 0.0
    connection: ConnectionOptions | None = None

    @property
    def tells_output(self) -> bool:
        """See `Backend`."""
        return True

    async def describe(self) -> Server:
        """See `Backend`."""
        protocol = "grpc session" if self.is_multiplexed else "grpc streams"
        try:
            async with InferenceClient(self.target, connection=self.connection) as client:
                model = _chosen(await client.models(timeout_s=30), self.model)
            facts: dict[str, object] = {"model": asdict(model)}
            if self.control_target is not None:
                async with ControlClient(self.control_target, connection=self.connection) as control:
                    load = await control.load(timeout_s=30)
                facts |= {"max_num_seqs": load.max_num_seqs, "batching": load.batching}
        except HeadraceError as error:
            raise BackendError(f"{self.target}: {error.message}") from error
        return Server(protocol, self.target, facts, model.vocabulary_size)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """See `Backend`."""
        # No retries: a refusal is a result, and a second attempt would be hidden in the latency of the first.
        once = RetryPolicy(max_attempts=1)
        async with InferenceClient(self.target, retry=once, connection=self.connection) as client:
            if not self.is_multiplexed:
                yield _GrpcConnection(client.generate, self)
                return
            async with client.session() as session:
                yield _GrpcConnection(session.generate, self)


def _chosen(models: tuple[Model, ...], name: str | None) -> Model:
    for model in models:
        if name is None or model.name == name:
            return model
    names = ", ".join(model.name for model in models)
    raise NotFound(f"no model is served under the name {name!r}; there is: {names}")


_Generate: TypeAlias = Callable[..., Generation]
"""`generate` of a session or of a client: the same prompt and options."""


class _GrpcConnection:
    def __init__(self, generate: _Generate, backend: GrpcBackend) -> None:
        self._generate = generate
        self._backend = backend

    async def ask(self, ask: Ask) -> AsyncGenerator[Tokens | End]:
        try:
            async with self._generate(ask.prompt, **self._options(ask)) as generation:
                async for event in generation:
                    match event:
                        case Delta(token_ids=token_ids, text=text) if token_ids:
                            yield Tokens(len(token_ids), text if isinstance(ask.prompt, str) else token_ids)
                        case Finished():
                            yield _end(event)
        except HeadraceError as error:
            raise RequestFailedError(error.code.name, error.message) from error

    def _options(self, ask: Ask) -> RequestOptions:
        options: RequestOptions = {"max_tokens": ask.output_len, "temperature": self._backend.temperature}
        if ask.is_length_forced:
            options["ignore_eos"] = True
        if self._backend.bypass_cache:
            options["cache_bypass"] = True
        if self._backend.model is not None:
            options["model"] = self._backend.model
        return options


def _end(finished: Finished) -> End:
    if finished.reason in (FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.TIME_LIMIT):
        raise RequestFailedError(finished.reason.name, f"the server ended it: {finished.reason.value}")
    return End(
        num_prompt_tokens=finished.usage.num_prompt_tokens,
        num_tokens=finished.usage.num_completion_tokens,
        num_cached_tokens=finished.usage.num_cached_tokens,
        queued_s=finished.timings.queued_s,
        num_preemptions=finished.num_preemptions,
    )
