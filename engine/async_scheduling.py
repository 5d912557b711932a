"""Whether steps are planned and launched ahead, while the ones before them run on a device."""

from __future__ import annotations

import logging
from enum import StrEnum

from headrace.engine.errors import ConfigError

logger = logging.getLogger(__name__)


class AsyncScheduling(StrEnum):
    """When a step is planned before the one that it follows has returned."""

    AUTO = "auto"
    """On a device that computes while the host goes on, unless tokens are proposed."""
    ON = "on"
    """Wherever steps are computed. On a CPU it gains nothing."""
    OFF = "off"
    """Never: each step is planned when all before it is known."""


def check_suits(wanted: AsyncScheduling, speculation: str) -> None:
    """Check that nobody asks for what can't be.

    Raises:
        ConfigError: tokens are proposed.
    """
    if wanted is AsyncScheduling.ON and speculation != "none":
        raise ConfigError(
            f"async_scheduling=on can't be had with speculation={speculation}: drafts come of tokens that "
            "have to be known, so no step is planned ahead; leave one of the two out"
        )


def runs_ahead(wanted: AsyncScheduling, *, computes_apart: bool, is_speculating: bool) -> bool:
    """Whether an engine plans ahead; the log says so, and why.

    Args:
        computes_apart: whether a device computes while the host goes on.
        is_speculating: whether tokens are proposed: drafts come of tokens that have to be known.
    """
    if wanted is AsyncScheduling.ON or (
        wanted is AsyncScheduling.AUTO and computes_apart and not is_speculating
    ):
        logger.info("asynchronous scheduling is on: the next step is prepared while one runs")
        return True
    reason = "a CPU computes, which gains nothing by it"
    if wanted is AsyncScheduling.OFF:
        reason = "it was asked to be"
    elif computes_apart:
        reason = "the drafts of speculation come of tokens that have to be known"
    logger.info("asynchronous scheduling is off: %s", reason)
    return False
