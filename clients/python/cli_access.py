"""Options before the command that say how to reach the server: `headrace --tls-ca ca.pem generate …`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clients.cli_outcome import USAGE, fail

if TYPE_CHECKING:
    from headrace.clients.connection import ConnectionOptions

REACHING = "Reaching a server"

UsesTls = Annotated[
    bool,
    typer.Option("--tls", help="Encrypt; the server's certificate is checked.", rich_help_panel=REACHING),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="HEADRACE_TLS_CA",
        help="Authorities that the server's certificate may come from, PEM; means --tls.",
        rich_help_panel=REACHING,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Own certificate, PEM, where the server asks for one; means --tls.",
        rich_help_panel=REACHING,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.", rich_help_panel=REACHING),
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        "--tls-server-name",
        metavar="NAME",
        help="Name in the server's certificate, if it isn't the host's; means --tls.",
        rich_help_panel=REACHING,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Holds the token that says who calls. The variable HEADRACE_TOKEN holds it itself; there is no "
        "option for it, as others on the machine can read a command line.",
        rich_help_panel=REACHING,
    ),
]
Token = Annotated[str | None, typer.Option("--token", envvar="HEADRACE_TOKEN", hidden=True)]


@dataclass(frozen=True, slots=True)
class Access:
    """What was given of them."""

    uses_tls: bool
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_server_name: str | None
    token_file: Path | None
    token: str | None = field(repr=False)


_given: ContextVar[Access | None] = ContextVar("headrace_access", default=None)


def remember(access: Access) -> None:
    """Take what stands before the command, for the command."""
    _given.set(access)


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
        return access.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--token-file {access.token_file}: can't be read: {error}", USAGE)
