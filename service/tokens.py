"""Bearer tokens whose hashes stand in a file: one client a line, ``name:sha256$<hex>[:role,role]``.

A token is drawn at random by ``headrace token``, 256 bits of it, so one round of SHA-256 hides it: there is
nothing to guess from. The file is read anew when it changes; a token that is no longer in it is revoked.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.service.file_watch import UnusableFile, WatchedFiles, read_text
from headrace.service.identity import Identity, Role, is_valid_name
from headrace.service.token_drawing import digest_of, roles_from

_HASH = re.compile(r"sha256\$([0-9a-fA-F]{64})")
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A line of the file.

    Args:
        digest: SHA-256 of the token.
    """

    identity: Identity
    digest: bytes


class TokenFile:
    """Says whose token one is.

    Args:
        path: the file.

    Raises:
        UnusableFile: it can't be taken.
    """

    def __init__(self, path: Path) -> None:
        self._entries = WatchedFiles([path], lambda: read_entries(path))

    def identify(self, token: str) -> Identity | None:
        """The client of `token`; None if it is nobody's. Takes as long for any token."""
        presented = digest_of(token)
        found: Identity | None = None
        for entry in self._entries.current():
            if hmac.compare_digest(entry.digest, presented):
                found = entry.identity
        return found


def read_entries(path: Path) -> tuple[TokenEntry, ...]:
    """What the file says.

    Raises:
        UnusableFile: it can't be read, or a line of it.
    """
    entries: list[TokenEntry] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        content = line.strip()
        if content and not content.startswith("#"):
            entries.append(_entry(content, f"{path}, line {number}"))
    if len(entries) > _MAX_ENTRIES:
        raise UnusableFile(f"{path}: holds more than {_MAX_ENTRIES} tokens")
    return tuple(entries)


def _entry(line: str, place: str) -> TokenEntry:
    # Of the line nothing is quoted: somebody may have written the token itself there.
    name, _, rest = line.partition(":")
    written_hash, _, roles = rest.partition(":")
    found = _HASH.fullmatch(written_hash.strip())
    if found is None or not is_valid_name(name):
        raise UnusableFile(
            f"{place}: must be name:sha256$<64 hex digits>[:roles]; `headrace token` makes one"
        )
    try:
        taken = roles_from(roles.split(",")) if roles.strip() else frozenset({Role.GENERATE})
    except ValueError as error:
        known = ", ".join(Role)
        raise UnusableFile(f"{place}: has a role that is not known; the roles are {known}") from error
    return TokenEntry(Identity(name, taken), bytes.fromhex(found[1]))
