"""Settings of the service's edge: who may enter, how much each client may ask for, what is shown of it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from headrace.service.auth import AuthRules
from headrace.service.edge import Edge
from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Role
from headrace.service.jwt_rules import JwtRules
from headrace.service.metrics import Metrics
from headrace.service.quotas import QuotaRules, Quotas
from headrace.service.tls import TlsFiles
from headrace.service.tracing import NoTracer, Tracer


class EdgeSettings(BaseSettings):
    """Part of `ServiceConfig`."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(50051, ge=0, le=65535, description="port for callers; 0 picks a free one")
    control_host: str = Field("127.0.0.1", min_length=1, description="address of the operator's port")
    control_port: int = Field(50052, ge=0, le=65535, description="port for the operator; 0 picks a free one")

    health_host: str = Field("127.0.0.1", min_length=1, description="address of the health port")
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port that tells health alone, in plain text and to everybody, for probes that know no "
        "TLS; 0 picks a free one; unset: none",
    )
    max_connection_age_s: float | None = Field(
        None,
        ge=1,
        le=86400,
        allow_inf_nan=False,
        description="age at which a caller's connection is to be replaced by a new one, which a balancer may "
        "send elsewhere, seconds; running streams go on; unset: never",
    )

    tls_cert: Path | None = Field(
        None,
        description="the server's certificate, PEM, read anew when it changes; TLS on every port of gRPC",
    )
    tls_key: Path | None = Field(None, description="its private key, PEM")
    tls_client_ca: Path | None = Field(
        None, description="authorities of the certificates that callers have to show, PEM"
    )
    control_tls_client_ca: Path | None = Field(
        None, description="the same for the operator's port; unset: the callers' authorities"
    )
    auth_tokens: Path | None = Field(
        None, description="file of bearer tokens, name:sha256$HEX[:roles] a line, read anew when it changes"
    )
    jwt_jwks: Path | None = Field(
        None, description="JSON Web Key Set with public keys that sign tokens, read anew when it changes"
    )
    jwt_issuer: str = Field("", description="the iss that signed tokens must have")
    jwt_audience: str = Field("", description="the aud that signed tokens must have")
    jwt_roles_claim: str = Field(
        "roles", min_length=1, description="claim that lists a signed token's roles; without it: generate"
    )
    auth_health: bool = Field(False, description="whether health, too, is told only to who may enter")
    insecure: bool = Field(
        False, description="whether a port may be open to other machines without TLS, or to everybody"
    )

    max_client_requests: int | None = Field(
        None, ge=1, description="most requests that one client may have open; unset: no bound"
    )
    max_client_rpcs: int | None = Field(
        None, ge=1, description="most RPCs that one client may have open; unset: no bound"
    )
    client_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="tokens, prompts and answers, that one client may use per minute; unset: no bound",
    )

    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of the metrics' port")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port that Prometheus scrapes; 0 picks a free one; unset: none"
    )
    metrics_by_client: bool = Field(
        False, description="whether metrics count tokens by client, for those that have shown who they are"
    )
    access_log: bool = Field(
        False, description="whether each RPC is logged: method, client, code, tokens, time"
    )
    otlp_endpoint: str = Field(
        "", description="where traces are sent, such as http://127.0.0.1:4318/v1/traces; empty: nowhere"
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, allow_inf_nan=False, description="share of requests traced where callers don't say"
    )

    @model_validator(mode="after")
    def _lets_in_whom_it_means_to(self) -> Self:
        problems = [*self._incomplete(), *self._too_open()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def make_edge(self) -> Edge:
        """Quotas, metrics and traces, as set.

        Raises:
            UnusableFile: what traces need is not installed.
        """
        rules = QuotaRules(self.max_client_requests, self.max_client_rpcs, self.client_tokens_per_minute)
        tracer = _otlp_tracer(self.otlp_endpoint, self.trace_ratio) if self.otlp_endpoint else NoTracer()
        return Edge(Quotas(rules), Metrics(names_clients=self.metrics_by_client), tracer)

    def tls(self, client_ca: Path | None) -> TlsFiles | None:
        """TLS of a port; None for plain text."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, client_ca)

    def caller_tls(self) -> TlsFiles | None:
        """TLS of the callers' port."""
        return self.tls(self.tls_client_ca)

    def control_tls(self) -> TlsFiles | None:
        """TLS of the operator's port."""
        return self.tls(self.control_tls_client_ca or self.tls_client_ca)

    def caller_rules(self) -> AuthRules:
        """Who may enter the callers' port."""
        may = None if self.tls_client_ca is None else frozenset({Role.GENERATE})
        return self._rules(Role.GENERATE, may)

    def control_rules(self) -> AuthRules:
        """Who may enter the operator's port. A caller's certificate gives no right there."""
        may: frozenset[Role] | None = None
        if self.control_tls_client_ca is not None:
            may = frozenset({Role.CONTROL})
        elif self.tls_client_ca is not None:
            may = frozenset()
        return self._rules(Role.CONTROL, may)

    def _rules(self, role: Role, certificate_roles: frozenset[Role] | None) -> AuthRules:
        jwt = None
        if self.jwt_jwks is not None:
            jwt = JwtRules(self.jwt_jwks, self.jwt_issuer, self.jwt_audience, self.jwt_roles_claim)
        return AuthRules(role, self.auth_tokens, jwt, certificate_roles, not self.auth_health)

    def _incomplete(self) -> Iterator[str]:
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "--tls-cert and --tls-key belong together: give both, or neither"
        elif self.tls_cert is None and (self.tls_client_ca or self.control_tls_client_ca):
            yield "--tls-client-ca needs TLS: give --tls-cert and --tls-key, too"
        if self.jwt_jwks is not None and not (self.jwt_issuer and self.jwt_audience):
            yield (
                "--jwt-jwks needs --jwt-issuer and --jwt-audience: else tokens for other services would open "
                "this"
            )
        if self.auth_health and self.health_port is not None:
            yield "--auth-health and --health-port contradict each other: leave one out"
        if self.jwt_jwks is None and (self.jwt_issuer or self.jwt_audience):
            yield "--jwt-issuer and --jwt-audience mean nothing without --jwt-jwks"

    def _too_open(self) -> Iterator[str]:
        if self.insecure:
            return
        for flag, host, rules in (
            ("--host", self.host, self.caller_rules()),
            ("--control-host", self.control_host, self.control_rules()),
        ):
            lacks = [*([] if self.tls_cert else ["TLS (--tls-cert, --tls-key)"])]
            lacks += [] if rules.is_on else ["authentication (--auth-tokens, --jwt-jwks or --tls-client-ca)"]
            if lacks and not is_loopback(host):
                yield (
                    f"{flag} {host!r} is open to other machines without {' and '.join(lacks)}: give it, "
                    "listen on 127.0.0.1, or set --insecure where something in front of it does that"
                )


def _otlp_tracer(endpoint: str, ratio: float) -> Tracer:
    try:
        # An extra of its own: whoever traces nothing needs no such library.
        from headrace.service.otel import otlp_tracer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnusableFile(f"--otlp-endpoint needs {error.name}: pip install 'headrace[otel]'") from error
    return otlp_tracer(endpoint, ratio)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
