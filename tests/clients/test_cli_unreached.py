"""What the command line says where no server is reached."""

from __future__ import annotations

import pytest

from headrace.clients.cli_unreached import explain_unreached

REFUSED = "Failed to connect to remote host: Connection refused"
NO_HTTP2 = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)"
HANDSHAKE = (
    "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:OPENSSL_internal"
)
PLAIN = f"{HANDSHAKE}:WRONG_VERSION_NUMBER: Invalid certificate verification context: OK"
STRANGE = f"{HANDSHAKE}:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK"
OTHER_NAME = (
    "Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed."
)
NO_FILE = "connect failed: addr: unix:/x error: No such file or directory"


@pytest.mark.parametrize(
    ("last_error", "said"),
    [
        (f"UNKNOWN: ipv4:127.0.0.1:1: {REFUSED}", "nobody listens at 127.0.0.1:1 ("),
        (f"UNKNOWN: ipv6:%5B::1%5D:1: {REFUSED}", "nobody listens at [::1]:1 ("),
        (
            "UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed",
            "127.0.0.1:1 hung up (a server with TLS wants --tls ",
        ),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "one that asks for certificates wants --tls-cert"),
        (f"INTERNAL: ipv4:127.0.0.1:1: {NO_HTTP2}", "what listens at 127.0.0.1:1 speaks no gRPC"),
        (f"UNKNOWN: ipv4:127.0.0.1:1: {PLAIN}", "what listens at 127.0.0.1:1 speaks no TLS"),
        (f"UNKNOWN: ipv4:127.0.0.1:1: {STRANGE}", "is not trusted: self signed certificate (is --tls-ca"),
        (f"UNKNOWN: ipv4:127.0.0.1:1: {OTHER_NAME}", "for another name"),
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to create security handshaker.", "not PEM of its kind"),
        ("UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed: OK", "Tls handshake failed (does it speak TLS"),
        (f"FAILED_PRECONDITION: unix:/x: {NO_FILE}", "unix:/x: connect failed"),
        (
            "NEW: ipv4:127.0.0.1:1: something connects badly",
            "127.0.0.1:1: something connects badly (is a server",
        ),
    ],
)
def test_each_reason_is_said_without_grpcs_words(last_error: str, said: str) -> None:
    told = explain_unreached(f"failed to connect to all addresses; last error: {last_error}")
    assert said in told
    for jargon in ("ipv4:", "ipv6:", "last error", "TSI_", "OPENSSL", "%5B", "SETTINGS", ": OK"):
        assert jargon not in told


def test_a_host_that_is_not_known_is_named() -> None:
    told = explain_unreached(
        "errors resolving nosuch:50051: [field:hostname lookup error:address lookup failed]"
    )
    assert told == "nosuch:50051: no host of that name is known (is --target right?)"


def test_a_servers_own_words_stay() -> None:
    assert explain_unreached("the model is loading") == "the model is loading"
