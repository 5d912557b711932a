"""Headrace's Python client and command line. Light on purpose: it needs gRPC, protobuf, typer and rich alone.

async with InferenceClient("127.0.0.1:50051") as client:
    async for event in client.generate("Once upon a time", max_tokens=40):
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.clients.client import InferenceClient as InferenceClient
    from headrace.clients.connection import ConnectionOptions as ConnectionOptions
    from headrace.clients.connection import Tls as Tls
    from headrace.clients.control import ControlClient as ControlClient
    from headrace.clients.errors import AlreadyExists as AlreadyExists
    from headrace.clients.errors import Cancelled as Cancelled
    from headrace.clients.errors import DeadlineExceeded as DeadlineExceeded
    from headrace.clients.errors import FieldViolation as FieldViolation
    from headrace.clients.errors import HeadraceError as HeadraceError
    from headrace.clients.errors import InvalidArgument as InvalidArgument
    from headrace.clients.errors import NotFound as NotFound
    from headrace.clients.errors import Overloaded as Overloaded
    from headrace.clients.errors import PermissionDenied as PermissionDenied
    from headrace.clients.errors import ProtocolError as ProtocolError
    from headrace.clients.errors import ServerError as ServerError
    from headrace.clients.errors import Unauthenticated as Unauthenticated
    from headrace.clients.errors import Unavailable as Unavailable
    from headrace.clients.errors import Unimplemented as Unimplemented
    from headrace.clients.events import Accepted as Accepted
    from headrace.clients.events import Answer as Answer
    from headrace.clients.events import Completion as Completion
    from headrace.clients.events import Delta as Delta
    from headrace.clients.events import Event as Event
    from headrace.clients.events import Finished as Finished
    from headrace.clients.events import FinishReason as FinishReason
    from headrace.clients.events import Score as Score
    from headrace.clients.events import ServingStatus as ServingStatus
    from headrace.clients.events import TokenLogprob as TokenLogprob
    from headrace.clients.events import TokenLogprobs as TokenLogprobs
    from headrace.clients.generation import Generation as Generation
    from headrace.clients.prompts import Chat as Chat
    from headrace.clients.prompts import ChatMessage as ChatMessage
    from headrace.clients.prompts import Prompt as Prompt
    from headrace.clients.prompts import RequestOptions as RequestOptions
    from headrace.clients.prompts import Tool as Tool
    from headrace.clients.prompts import ToolCall as ToolCall
    from headrace.clients.retry import RetryPolicy as RetryPolicy
    from headrace.clients.session import Session as Session

_HOME_OF = {
    "InferenceClient": "client",
    "ConnectionOptions": "connection",
    "Tls": "connection",
    "ControlClient": "control",
    "AlreadyExists": "errors",
    "Cancelled": "errors",
    "DeadlineExceeded": "errors",
    "FieldViolation": "errors",
    "HeadraceError": "errors",
    "InvalidArgument": "errors",
    "NotFound": "errors",
    "Overloaded": "errors",
    "PermissionDenied": "errors",
    "ProtocolError": "errors",
    "ServerError": "errors",
    "Unauthenticated": "errors",
    "Unavailable": "errors",
    "Unimplemented": "errors",
    "Accepted": "events",
    "Answer": "events",
    "Completion": "events",
    "Delta": "events",
    "Event": "events",
    "FinishReason": "events",
    "Finished": "events",
    "Score": "events",
    "ServingStatus": "events",
    "TokenLogprob": "events",
    "TokenLogprobs": "events",
    "Generation": "generation",
    "Chat": "prompts",
    "ChatMessage": "prompts",
    "Prompt": "prompts",
    "RequestOptions": "prompts",
    "Tool": "prompts",
    "ToolCall": "prompts",
    "RetryPolicy": "retry",
    "Session": "session",
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  (one table instead of two lists that may differ)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `headrace --help` must not wait for gRPC."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
