from __future__ import annotations

import pytest

from headrace.service.config import InvalidConfig, ServiceConfig, load_config
from headrace.service.edge_settings import is_loopback
from headrace.service.identity import Role

TLS = ("--tls-cert", "c", "--tls-key", "k")
TOKENS = ("--auth-tokens", "t")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServiceConfig.model_fields:
        monkeypatch.delenv(f"HEADRACE_{name.upper()}", raising=False)


def load(*argv: str) -> ServiceConfig:
    return load_config(("--model", "m", *argv))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_alone_may_be_served_in_plain_text(host: str) -> None:
    assert is_loopback(host)
    assert not load("--host", host, "--control-host", host).caller_rules().is_on


@pytest.mark.parametrize("flag", ["--host", "--control-host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
@pytest.mark.parametrize(("given", "lacks"), [((), "TLS"), (TLS, "authentication"), (TOKENS, "TLS")])
def test_a_port_open_to_others_needs_tls_and_auth_or_a_clear_word(
    flag: str, host: str, given: tuple[str, ...], lacks: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"open to other machines without.*{lacks}"):
        load(flag, host, *given)
    load(flag, host, *given, "--insecure")
    load(flag, host, *TLS, *TOKENS)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (TLS[:2], "belong together"),
        (("--tls-client-ca", "x"), "needs TLS"),
        (("--control-tls-client-ca", "x"), "needs TLS"),
        (("--jwt-jwks", "x"), "needs --jwt-issuer and --jwt-audience"),
        (("--jwt-jwks", "x", "--jwt-issuer", "i"), "needs --jwt-issuer and --jwt-audience"),
        (("--jwt-issuer", "i"), "mean nothing without --jwt-jwks"),
        ((*TOKENS, "--auth-health", "--health-port", "0"), "contradict each other"),
    ],
)
def test_half_of_a_setting_is_refused(argv: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        load(*argv)


def test_a_callers_certificate_gives_no_right_at_the_operators_port() -> None:
    config = load(*TLS, "--tls-client-ca", "callers")
    assert config.caller_rules().certificate_roles == frozenset({Role.GENERATE})
    assert config.control_rules().certificate_roles == frozenset()
    config = load(*TLS, "--tls-client-ca", "callers", "--control-tls-client-ca", "operators")
    assert config.control_rules().certificate_roles == frozenset({Role.CONTROL})
    tls = config.control_tls()
    assert tls is not None
    assert str(tls.client_ca) == "operators"


def test_health_is_open_unless_told_otherwise() -> None:
    assert load(*TOKENS).caller_rules().health_is_open
    assert not load(*TOKENS, "--auth-health").caller_rules().health_is_open
