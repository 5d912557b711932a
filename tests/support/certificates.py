"""Certificates as an operator makes them: by openssl, into files."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
LOCAL = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, PEM."""

    cert: Path
    key: Path

    def replace_with(self, other: Certificate) -> None:
        """Take the other's content, as a renewal does: file by file."""
        for ours, theirs in ((self.key, other.key), (self.cert, other.cert)):
            fresh = ours.with_suffix(".fresh")
            shutil.copy(theirs, fresh)
            fresh.replace(ours)


class Authority:
    """Signs certificates, in a folder of its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", *_KEY, "-subj", f"/CN={name}", "-days", "2"),
            *("-keyout", str(self._key), "-out", str(self.cert)),
        )

    def issue(self, name: str, alternative_names: str = LOCAL, *, is_expired: bool = False) -> Certificate:
        """A certificate for `name`; the files are called after it."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request))
        extensions.write_text(f"subjectAltName={alternative_names}\n")
        # Of a negative number of days it has ended before it began.
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", "-1" if is_expired else "2"),
            *("-extfile", str(extensions), "-out", str(made.cert)),
        )
        return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
