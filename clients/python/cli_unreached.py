"""Why no server was reached, in a user's words: gRPC tells it in its own."""

from __future__ import annotations

import re
from urllib.parse import unquote

_NO_HOST = re.compile(r"errors resolving (?P<target>.+?): \[")
_ADDRESS = re.compile(r"^(?:ipv[46]:)?(?P<address>\S+?): (?P<reason>.*)$", re.DOTALL)
_START = "is a server running there? `headrace serve` starts one"
_AUTHORITY = "is --tls-ca the authority of its certificate?"
_REASONS = (
    (r".*Connection refused", f"nobody listens at {{address}} ({_START})"),
    (
        r".*Socket closed",
        (
            "{address} hung up (a server with TLS wants --tls or --tls-ca; one that asks for "
            "certificates wants --tls-cert and --tls-key, too)"
        ),
    ),
    (
        r".*HTTP/2",
        "what listens at {address} speaks no gRPC (the port is that of `headrace serve --port`)",
    ),
    (
        r".*WRONG_VERSION_NUMBER",
        (
            "what listens at {address} speaks no TLS (leave --tls and its like out, or start the server with "
            "--tls-cert and --tls-key)"
        ),
    ),
    (
        r".*CERTIFICATE_VERIFY_FAILED: (?P<why>[^:]+)",
        f"the certificate of {{address}} is not trusted: {{why}} ({_AUTHORITY})",
    ),
    (
        r".*(Hostname Verification|Peer name)",
        (
            "the certificate of {address} is for another name (--target has to be what it names, or "
            "--tls-server-name)"
        ),
    ),
    (
        r".*create security handshaker",
        "the file of --tls-ca, --tls-cert or --tls-key is not PEM of its kind, or a key is another's",
    ),
    (r"(?P<why>.*?handshake.*?)(: OK)?$", f"{{address}}: {{why}} (does it speak TLS, and {_AUTHORITY})"),
    (r"(?P<why>.*)", f"{{address}}: {{why}} ({_START})"),
)
"""What gRPC says of an address, and what that means; the first that fits holds, the last one always does."""


def explain_unreached(message: str) -> str:
    """Say why nobody was reached and what may help.

    Args:
        message: what gRPC or a server said with UNAVAILABLE; a server's own words stay as they are.
    """
    if no_host := _NO_HOST.search(message):
        return f"{no_host['target']}: no host of that name is known (is --target right?)"
    if "connect" not in message:
        return message
    # gRPC tells of every address that it tried; the last one says it all.
    last = re.sub(r"^[A-Z_]+: ", "", message.rpartition("last error: ")[2])
    found = _ADDRESS.match(last)
    if found is None:
        return last
    told = ((re.match(pattern, found["reason"], re.DOTALL), template) for pattern, template in _REASONS)
    reason, template = next((reason, template) for reason, template in told if reason is not None)
    # gRPC quotes the brackets of IPv6.
    return template.format(address=unquote(found["address"]), **reason.groupdict())
