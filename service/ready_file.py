"""A file for whoever starts the server: it is there exactly while requests are welcome."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.service.file_watch import UnusableFile
from headrace.service.health import Health
from headrace.service.telemetry import log


@contextmanager
def ready_file(path: Path | None, health: Health, ports: Mapping[str, int]) -> Iterator[None]:
    """Within the block a file says that the server is ready, and how it is reached.

    What an earlier process has left at `path` is gone when the block begins, and ours when it ends.

    Args:
        path: the file; None for none.
        health: whose readiness it follows.
        ports: by name; written as JSON, with the process id as `pid`.

    Raises:
        UnusableFile: the file can't be made.
    """
    if path is None:
        yield
        return
    content = json.dumps({**ports, "pid": os.getpid()}) + "\n"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")

    def follow(is_ready: bool) -> None:
        try:
            if is_ready:
                # Readers see the whole file or none.
                unfinished.write_text(content, encoding="utf-8")
                unfinished.replace(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.error("the ready file can't be kept", path=str(path), reason=error.strerror)

    try:
        # Whoever can't ever be told is told now, before a model is loaded for nothing.
        path.unlink(missing_ok=True)
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        raise UnusableFile(f"--ready-file {path}: can't be written: {error.strerror}") from error
    try:
        with health.followed(follow):
            yield
    finally:
        follow(False)
