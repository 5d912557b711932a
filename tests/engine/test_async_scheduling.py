"""When steps are planned ahead, and what the log says about it."""

from __future__ import annotations

import logging

import pytest

from headrace.engine import AsyncScheduling, ConfigError, Speculation
from headrace.engine.async_scheduling import runs_ahead
from tests.support.requests import make_config, speculating


@pytest.mark.parametrize(
    ("wanted", "computes_apart", "is_speculating", "expected", "words"),
    [
        ("auto", True, False, True, "is on"),
        ("auto", False, False, False, "is off: a CPU computes, which gains nothing by it"),
        ("auto", True, True, False, "is off: the drafts of speculation come of tokens that have to be known"),
        ("auto", False, True, False, "is off: a CPU computes"),
        ("on", True, False, True, "is on"),
        ("on", False, False, True, "is on"),
        ("off", True, False, False, "is off: it was asked to be"),
        ("off", False, True, False, "is off: it was asked to be"),
    ],
)
def test_it_is_on_where_it_gains_something_or_is_asked_for(
    wanted: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
    *,
    computes_apart: bool,
    is_speculating: bool,
    expected: bool,
) -> None:
    caplog.set_level(logging.INFO)
    chosen = runs_ahead(AsyncScheduling(wanted), computes_apart=computes_apart, is_speculating=is_speculating)
    assert chosen == expected
    (message,) = caplog.messages
    assert message.startswith(f"asynchronous scheduling {words}")


@pytest.mark.parametrize("kind", [Speculation.PROMPT_LOOKUP, Speculation.DRAFT_MODEL])
def test_nobody_may_ask_for_what_speculation_rules_out(kind: Speculation) -> None:
    for fine in (AsyncScheduling.AUTO, AsyncScheduling.OFF):
        make_config(async_scheduling=fine, speculation=speculating(kind))
    with pytest.raises(ConfigError, match=f"async_scheduling=on can't be had with speculation={kind.value}"):
        make_config(async_scheduling=AsyncScheduling.ON, speculation=speculating(kind))
