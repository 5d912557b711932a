"""Options that say how to reach the server, before the command or behind it.

Both `headrace --tls-ca ca.pem generate …` and `headrace generate … --tls-ca ca.pem` are understood; where an
option stands in both places the one behind the command counts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.clients.cli_outcome import USAGE, fail

if TYPE_CHECKING:
    from headrace.clients.connection import ConnectionOptions

REACHING = "Reaching a server"


def _option(flag: str, explanation: str, metavar: str | None = None, envvar: str | None = None) -> Any:
    return typer.Option(flag, help=explanation, metavar=metavar, envvar=envvar, rich_help_panel=REACHING)


_TLS_CA = "Authorities that the server's certificate may come from, PEM; means --tls."

UsesTls = Annotated[bool, _option("--tls", "Encrypt; the server's certificate is checked.")]
TlsCa = Annotated[Path | None, _option("--tls-ca", _TLS_CA, "FILE")]
TlsCaOrVariable = Annotated[Path | None, _option("--tls-ca", _TLS_CA, "FILE", "HEADRACE_TLS_CA")]
TlsCert = Annotated[
    Path | None,
    _option("--tls-cert", "Own certificate, PEM, where the server asks for one; means --tls.", "FILE"),
]
TlsKey = Annotated[Path | None, _option("--tls-key", "Its private key, PEM.", "FILE")]
TlsServerName = Annotated[
    str | None,
    _option(
        "--tls-server-name",
        "Name in the server's certificate, if it isn't the host's; means --tls.",
        "NAME",
    ),
]
TokenFile = Annotated[
    Path | None,
    _option(
        "--token-file",
        "Holds the token that says who calls. The variable HEADRACE_TOKEN holds it itself; there is no "
        "option for it, as others on the machine can read a command line.",
        "FILE",
    ),
]
Token = Annotated[str | None, typer.Option("--token", envvar="HEADRACE_TOKEN", hidden=True)]


@dataclass(frozen=True, slots=True)
class Access:
    """What was given of them."""

    uses_tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str | None = None
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)


_given: ContextVar[Access | None] = ContextVar("headrace_access", default=None)

_BEHIND = (
    ("tls", UsesTls, "uses_tls"),
    ("tls_ca", TlsCa, "tls_ca"),
    ("tls_cert", TlsCert, "tls_cert"),
    ("tls_key", TlsKey, "tls_key"),
    ("tls_server_name", TlsServerName, "tls_server_name"),
    ("token_file", TokenFile, "token_file"),
)
"""Parameter, kind and field of `Access`, of each option that may stand behind a command."""


def remember(access: Access) -> None:
    """Take what stands before the command, for the command."""
    _given.set(access)


def reaching(command: Callable[..., None]) -> Callable[..., None]:
    """A command that understands the options behind its name, too."""
    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=next(each.default for each in fields(Access) if each.name == place),
        )
        for name, kind, place in _BEHIND
    ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        behind = {place: values.pop(name) for name, _, place in _BEHIND}
        remember(replace(_given.get() or Access(), **{key: value for key, value in behind.items() if value}))
        command(**values)

    parameters = [*signature.parameters.values(), *added]
    # What typer reads, in place of the signature that `wraps` points at.
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapped


def connection() -> ConnectionOptions:
    """How the command that runs reaches its server."""
    from headrace.clients.connection import ConnectionOptions, Tls  # noqa: PLC0415

    access = _given.get()
    if access is None:
        return ConnectionOptions()
    given = (access.tls_ca, access.tls_cert, access.tls_key, access.tls_server_name)
    tls = Tls(*given) if access.uses_tls or any(given) else None
    return ConnectionOptions(tls=tls, token=_token(access))


def _token(access: Access) -> str | None:
    if access.token_file is None:
        return access.token or None
    try:
        token = access.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        fail(f"--token-file {access.token_file}: can't be read: {error.strerror}", USAGE)
    except UnicodeDecodeError:
        fail(
            f"--token-file {access.token_file}: is no text: `headrace token NAME > FILE` writes one",
            USAGE,
        )
    if ":sha256$" in token:
        fail(
            f"--token-file {access.token_file}: holds hashes, which are for the server's --auth-tokens: "
            "give the token that `headrace token` printed",
            USAGE,
        )
    return token
