"""Who may enter: whoever has a bearer token, a signed token or a client's certificate, and nobody else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Identity, Role, is_valid_name
from headrace.service.jwt_rules import JwtRules
from headrace.service.status import RpcFailure
from headrace.service.tls import certificate_name
from headrace.service.tokens import TokenFile

if TYPE_CHECKING:
    from headrace.service.jwt_tokens import JwtVerifier

_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/=-]+) *", re.IGNORECASE)
_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class AuthRules:
    """What lets a caller in at one port. With nothing set everybody may enter.

    Args:
        role: what a client must be allowed at this port.
        tokens: file of bearer tokens.
        jwt: rules for signed tokens.
        certificate_roles: what whoever shows a certificate of the clients' authority may do, where that is
            all that is asked for; None where certificates name nobody.
        health_is_open: whether health is told to everybody.
    """

    role: Role
    tokens: Path | None = None
    jwt: JwtRules | None = None
    certificate_roles: frozenset[Role] | None = None
    health_is_open: bool = True

    @property
    def needs_token(self) -> bool:
        """Whether a token is asked for; a certificate alone lets nobody in then."""
        return self.tokens is not None or self.jwt is not None

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for."""
        return self.needs_token or self.certificate_roles is not None


@dataclass(frozen=True, slots=True)
class Admittance:
    """A caller who may enter.

    Args:
        is_current: whether he still may.
    """

    identity: Identity | None
    is_current: Callable[[], bool] = field(default=lambda: True)


class Authenticator:
    """Applies the rules of one port.

    Raises:
        UnusableFile: a file that they name can't be taken, or what it needs is not installed.
    """

    def __init__(self, rules: AuthRules) -> None:
        self._rules = rules
        self._tokens = None if rules.tokens is None else TokenFile(rules.tokens)
        self._jwt = None if rules.jwt is None else _jwt_verifier(rules.jwt)

    def is_open(self, method: str) -> bool:
        """Whether everybody may call `method`."""
        return not self._rules.is_on or (self._rules.health_is_open and method.startswith(_HEALTH))

    def by_metadata(
        self, metadata: grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...]
    ) -> Admittance | None:
        """Who the RPC's metadata says calls; None where certificates say it.

        Raises:
            RpcFailure: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        if not self._rules.needs_token:
            return None
        given = [value for key, value in metadata if key == "authorization"]
        if not given:
            raise _unauthenticated("MISSING_CREDENTIALS", "send metadata 'authorization: Bearer <token>'")
        written = _BEARER.fullmatch(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
        if written is None:
            raise _unauthenticated(
                "INVALID_CREDENTIALS", "metadata 'authorization' must be once there, as 'Bearer <token>'"
            )
        return self._permitted(self._by_token(written[1]))

    def by_certificate(self, peer: dict[str, list[bytes]]) -> Admittance:
        """Who the verified certificate says calls.

        Raises:
            RpcFailure: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        name = certificate_name(peer)
        roles = self._rules.certificate_roles
        if name is None or roles is None or not is_valid_name(name):
            raise _unauthenticated(
                "INVALID_CREDENTIALS",
                "the client's certificate must have a name of printable ASCII characters",
            )
        return self._permitted(Admittance(Identity(name, roles)))

    def _by_token(self, token: str) -> Admittance:
        if self._tokens is not None:
            tokens = self._tokens
            identity = tokens.identify(token)
            if identity is not None:
                return Admittance(identity, lambda: tokens.identify(token) == identity)
        if self._jwt is not None:
            verifier = self._jwt
            identity = verifier.verify(token)
            if identity is not None:
                return Admittance(identity, lambda: verifier.verify(token) == identity)
        raise _unauthenticated("INVALID_CREDENTIALS", "the token is not known, not valid or no longer so")

    def _permitted(self, admittance: Admittance) -> Admittance:
        role, identity = self._rules.role, admittance.identity
        if identity is None or role not in identity.roles:
            raise RpcFailure(
                grpc.StatusCode.PERMISSION_DENIED,
                "MISSING_ROLE",
                f"this port is for clients of role {role.value!r}",
            )
        return admittance


def no_longer_welcome() -> RpcFailure:
    """The credentials that opened the stream would not open it any more."""
    return _unauthenticated(
        "CREDENTIALS_EXPIRED", "the credentials that opened this stream are revoked or expired: open another"
    )


def _unauthenticated(reason: str, message: str) -> RpcFailure:
    return RpcFailure(grpc.StatusCode.UNAUTHENTICATED, reason, message)


def _jwt_verifier(rules: JwtRules) -> JwtVerifier:
    try:
        # An extra of its own: whoever uses no signed tokens needs no cryptography library.
        from headrace.service.jwt_tokens import JwtVerifier  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnusableFile(f"signed tokens need {error.name}: pip install 'headrace[jwt]'") from error
    return JwtVerifier(rules)
