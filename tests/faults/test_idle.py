"""A short run of the clients that wait in silence; the long one is a command of `tests.benchmarks`."""

from __future__ import annotations

import pytest

from tests.benchmarks.idle import NUM_TOKENS, idle
from tests.support import http2


@pytest.mark.slow
async def test_clients_that_wait_are_left_alone_unless_they_ping_more_often_than_is_allowed() -> None:
    result = await idle(seconds=6, keepalive_s=1, freezes=False)
    waits = {wait.name: wait for wait in result.waits}
    # The one that pings as rarely as Headrace's own client does.
    assert waits.pop("queued_by_default").faults == []
    assert result.num_long_tokens == 24
    for wait in waits.values():
        assert wait.asked.num_pings > 2
        assert "the server said GOAWAY" in wait.faults
    # Who has no call open at that moment connects anew and loses nothing.
    assert waits["no_call"].num_tokens == NUM_TOKENS


def test_frames_are_counted_in_whatever_pieces_they_come() -> None:
    sent = http2.opening() + http2.ping() + http2.message(1, b"x" * 300) + http2.ping(2) + http2.reset(1)
    for size in (1, 7, 100, len(sent)):
        counter = http2.FrameCounter(is_client=True)
        for at in range(0, len(sent), size):
            counter.feed(sent[at : at + size])
        assert counter.num_pings == 2
        assert dict(counter.kinds) == {http2.SETTINGS: 1, http2.PING: 2, http2.DATA: 1, http2.RST_STREAM: 1}
