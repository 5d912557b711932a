"""Logs: one event is one line on stderr. Ids, sizes, times, outcomes: never a prompt, never an answer.

The text of an exception may quote what a caller sent, so of an exception its type and its places are logged.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

log: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("headrace.service")

_MAX_FRAMES = 12


def configure_logging(level: str, log_format: str) -> None:
    """Send everything, other libraries' records and warnings included, to stderr in one format.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "json", "console", or "auto": console on a terminal.
    """
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _places_of_exception,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *before,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if is_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = _Lines(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level.upper())
    logging.captureWarnings(capture=True)


@contextmanager
def lines_through(write: Callable[[str], None]) -> Iterator[None]:
    """Within the block, give log lines to `write`: who draws on the terminal puts them where nothing stands.

    Args:
        write: takes a line without its end, from any thread.
    """
    _writers.append(write)
    try:
        yield
    finally:
        _writers.remove(write)


_writers: list[Callable[[str], None]] = []
"""Who has taken over the terminal, the latest last."""


class _Lines(logging.StreamHandler[TextIO]):
    """Writes to its stream, or through whoever draws there now."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _writers:
            super().emit(record)
            return
        try:
            _writers[-1](self.format(record))
        except Exception:
            self.handleError(record)


class RarelyLogged:
    """A warning that others can cause as often as they like: told once a second, and how many it stands for.

    Args:
        event: what happened.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._told_s = -1.0
        self._num_untold = 0

    def log(self, **fields: str) -> None:
        """It happened again."""
        now_s = time.monotonic()
        if now_s - self._told_s < 1.0:
            self._num_untold += 1
            return
        log.warning(self._event, **fields, unlogged=self._num_untold)
        self._told_s, self._num_untold = now_s, 0


def places_of(error: BaseException) -> dict[str, object]:
    """What may be logged of an exception: its type, and the lines it went through."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    return {
        "error": type(error).__name__,
        "places": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }


def log_loop_fault(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """asyncio's handler of last resort. Its own message quotes exceptions, so it is left out."""
    del loop
    error = context.get("exception")
    log.error("asyncio fault", **(places_of(error) if isinstance(error, BaseException) else {}))


def _places_of_exception(logger: WrappedLogger, method_name: str, event: EventDict) -> EventDict:
    del logger, method_name
    raised = event.pop("exc_info", None)
    if raised is True:
        raised = sys.exc_info()
    error = raised[1] if isinstance(raised, tuple) else raised
    if isinstance(error, BaseException):
        event.update(places_of(error))
    return event
