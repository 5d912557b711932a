"""TLS of a port: certificate, key and the clients' authority are files, and may change while it is open."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from headrace.service.file_watch import UnusableFile, WatchedFiles, read_text

_LABEL = re.compile(r"-----BEGIN [A-Z0-9 ]*?(CERTIFICATE|PRIVATE KEY)-----")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the certificates are, PEM.

    Args:
        cert: the server's certificate, and after it those between it and its authority.
        key: its private key, not encrypted.
        client_ca: authorities of clients' certificates; None asks clients for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key, *([] if self.client_ca is None else [self.client_ca]))

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What they say now.

        Raises:
            UnusableFile: one can't be read, or they don't fit together.
        """
        cert = _pem(self.cert, "certificate", "--tls-cert")
        key = _pem(self.key, "private key", "--tls-key")
        client_ca = None if self.client_ca is None else _pem(self.client_ca, "certificate", "--tls-client-ca")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Never asks on the terminal for the passphrase of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            raise UnusableFile(
                f"{self.cert} and {self.key} are no certificate and its key, in PEM and not encrypted: "
                f"{error.strerror or error}"
            ) from error
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca)
            except ssl.SSLError as error:
                raise UnusableFile(f"{self.client_ca}: holds no certificates in PEM") from error
        return grpc.ssl_server_certificate_configuration(
            [(key.encode(), cert.encode())], None if client_ca is None else client_ca.encode()
        )


def _pem(path: Path, wanted: str, flag: str) -> str:
    """The text of a file that holds a certificate or a key, or both."""
    text = read_text(path)
    found = {label.lower() for label in _LABEL.findall(text)}
    if wanted not in found:
        held = f"a {' and a '.join(sorted(found))}" if found else "neither certificates nor keys in PEM"
        raise UnusableFile(f"{path}: holds {held}, and {flag} takes a {wanted}")
    return text


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a port. Each handshake takes what the files say by then; what is connected goes on.

    Raises:
        UnusableFile: they can't be taken at the start.
    """
    # Handshakes ask from gRPC's threads, and at each: a look at the files costs less than the handshake.
    watched = WatchedFiles(files.paths, files.configuration, look_every_s=0.0)
    given = watched.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        current = watched.current()
        if current is given:
            return None
        given = current
        return current

    return grpc.dynamic_ssl_server_credentials(
        given,
        fetch,  # type: ignore[arg-type]  # None says that nothing has changed
        require_client_authentication=files.client_ca is not None,
    )


def certificate_name(peer: dict[str, list[bytes]]) -> str | None:
    """The name in a client's certificate: its common name, else its first alternative name; None for none.

    Args:
        peer: what gRPC says of a TLS peer. Its certificate has been verified against the clients' authority.
    """
    if not peer.get("x509_pem_cert"):
        return None
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for name in peer.get(key, ()):
            if name:
                return name.decode(errors="replace")
    return None
