"""Certificates and keys in files: told apart before gRPC fails on them without saying which one it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from headrace.clients.errors import InvalidArgument

_LABEL = re.compile(rb"-----BEGIN [A-Z0-9 ]*?(CERTIFICATE|PRIVATE KEY)-----")


def read_pem(path: Path | str, wanted: Literal["certificate", "private key"], place: str) -> bytes:
    """The content of a file that holds a certificate or a key, or both.

    Args:
        place: what it is given for.

    Raises:
        InvalidArgument: it can't be read, or holds something else.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: can't be read: {error.strerror}") from None
    found = {label.decode().lower() for label in _LABEL.findall(content)}
    if wanted not in found:
        held = f"a {' and a '.join(sorted(found))}" if found else "neither certificates nor keys in PEM"
        raise InvalidArgument(f"{path}: holds {held}, and {place} takes a {wanted}")
    if wanted == "private key" and b"ENCRYPTED" in content:
        raise InvalidArgument(f"{path}: is encrypted, and {place} takes a private key that is not")
    return content
