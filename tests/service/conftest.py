"""What tests of the service share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Logging is afterwards what it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("headrace").setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
