"""``headrace token``: draws a bearer token. It needs what every command needs, and no server."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.service.command_parser import CommandParser
from headrace.service.identity import Role, is_valid_name

_PREFIX = "hr_"
_NUM_RANDOM_BYTES = 32


def new_token() -> str:
    """A token that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def digest_of(token: str) -> bytes:
    """SHA-256: what is kept of a token."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


def roles_from(words: Sequence[str]) -> frozenset[Role]:
    """Roles by name.

    Raises:
        ValueError: one of them is unknown.
    """
    return frozenset(Role(word.strip()) for word in words)


def entry_line(name: str, token: str, roles: frozenset[Role]) -> str:
    """The line that lets `token` in."""
    return f"{name}:sha256${digest_of(token).hex()}:{','.join(sorted(roles))}"


def append_line(path: Path, line: str) -> None:
    """Add a line to a token file; a new one is its owner's alone.

    Raises:
        OSError: it can't be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "r+", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
        content = file.read()
        file.write("\n" * (content != "" and not content.endswith("\n")) + line + "\n")


def token(flags: Sequence[str]) -> int:
    """``headrace token``."""
    parser = CommandParser(
        "headrace token",
        description="Draw a token for a client. The token goes to standard output, once: it is kept nowhere. "
        "The line that lets it in goes to the file, or else to standard error.",
    )
    parser.add_argument("name", help="the client's name, as logs and quotas know it")
    parser.add_argument(
        "--role",
        action="append",
        choices=[str(role) for role in Role],
        help="may be repeated (default: generate)",
    )
    parser.add_argument("--file", type=Path, help="token file that the line is added to")
    arguments = parser.parse_args(flags)
    if not is_valid_name(arguments.name) or ":" in arguments.name:
        return _refused("the name must be 1 to 256 printable ASCII characters without a colon")
    drawn = new_token()
    line = entry_line(arguments.name, drawn, roles_from(arguments.role or [Role.GENERATE]))
    if arguments.file is None:
        print(line, file=sys.stderr)
    else:
        try:
            append_line(arguments.file, line)
        except OSError as error:
            return _refused(f"{arguments.file}: can't be written: {error.strerror}")
    print(drawn)
    return 0


def _refused(problem: str) -> int:
    print(f"headrace: {problem}", file=sys.stderr)
    return 2
