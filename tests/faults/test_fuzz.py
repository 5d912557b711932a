"""Odd messages of every type to every method of the real program: each ends as documented, no harm is done.

Seeded and short. The long run: ``python -m tests.benchmarks.fuzz --seconds 1800``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.support.fuzzing import CALLER_FILES, CONTROL_FILES, fuzz, methods_of
from tests.support.served_tiny import ServedTiny, served_tiny

pytestmark = pytest.mark.slow

NUM_CALLS = 40


def test_whatever_is_sent_ends_as_is_documented_and_the_server_is_as_new(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        served = served_tiny(tmp_path)
        tiny: ServedTiny = runner.run(served.__aenter__())
        channels: list[grpc.Channel] = []
        try:
            for address, files in ((tiny.address, CALLER_FILES), (tiny.control_address, CONTROL_FILES)):
                channel = grpc.insecure_channel(address)
                channels.append(channel)
                for number, method in enumerate(methods_of(files)):
                    outcomes = fuzz(runner, channel, method, NUM_CALLS, seed=number)
                    # Hypothesis may see that there are no more cases to be made.
                    assert outcomes.total() > 0
                    runner.run(tiny.assert_unharmed())
        finally:
            for channel in channels:
                channel.close()
            runner.run(served.__aexit__(None, None, None))
