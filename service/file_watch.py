"""Files that may be replaced while the server runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from headrace.service.telemetry import log

T = TypeVar("T")

LOOK_EVERY_S = 1.0


class UnusableFile(Exception):
    """A file can't be taken; the message names it and says why, and quotes nothing that is secret."""


class WatchedFiles(Generic[T]):
    """What some files say now. Changed to something that can't be taken, what they said before stays.

    May be asked from any thread.

    Args:
        paths: the files that `read` reads.
        read: makes the value.
        look_every_s: how old the answer may be, seconds.

    Raises:
        UnusableFile: they can't be taken at the start.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._signature = self._sign()
        self._value = read()
        self._looked_s = time.monotonic()

    def current(self) -> T:
        """The value, read anew if a file has changed."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s >= self._look_every_s:
                self._looked_s = now_s
                self._look()
            return self._value

    def _look(self) -> None:
        signature = self._sign()
        if signature == self._signature:
            return
        # Remembered first: what can't be taken is told once, not at every look.
        self._signature = signature
        try:
            value = self._read()
        except UnusableFile as error:
            log.error("changed file can't be taken; the one before stays in force", reason=str(error))
            return
        self._value = value
        log.info("file read anew", files=[str(path) for path in self._paths])

    def _sign(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        return tuple(_sign(path) for path in self._paths)


def _sign(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - through links: a mounted secret is swapped by one
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_text(path: Path, most_bytes: int = 2**20) -> str:
    """The whole of a text file.

    Raises:
        UnusableFile: it can't be read, or is longer than `most_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UnusableFile(f"{path}: can't be read: {error.strerror}") from error
    if len(content) > most_bytes:
        raise UnusableFile(f"{path}: is longer than {most_bytes} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnusableFile(f"{path}: is no text in UTF-8") from error
