"""Odd messages to every method of the real program, for as long as is asked; the seed tells which.

python -m tests.benchmarks.fuzz --seconds 1800 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc

from tests.support.fuzzing import CALLER_FILES, CONTROL_FILES, Method, fuzz, methods_of, seeds
from tests.support.served_tiny import served_tiny

CALLS_AT_ONCE = 100


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Fuzz one method after the other until the time is over; print how calls ended.

    Raises:
        AssertionError: a call ended as none may, or the server is no longer as new; the case is told.
    """
    totals: dict[str, Counter[grpc.StatusCode]] = {}
    with asyncio.Runner() as runner, ExitStack() as closing:
        served = served_tiny(folder)
        tiny = runner.run(served.__aenter__())
        closing.callback(lambda: runner.run(served.__aexit__(None, None, None)))
        work: list[tuple[grpc.Channel, Method]] = []
        for address, files in ((tiny.address, CALLER_FILES), (tiny.control_address, CONTROL_FILES)):
            channel = grpc.insecure_channel(address)
            closing.callback(channel.close)
            work += [(channel, method) for method in methods_of(files)]
        began_s, first_bytes = time.monotonic(), tiny.rss_bytes
        endless = ((seed, *one) for seed in seeds(arguments.seed) for one in work)
        # Every method has its turn, however short the time.
        for count, (seed, channel, method) in enumerate(endless):
            if count >= len(work) and time.monotonic() - began_s > arguments.seconds:
                break
            outcomes = fuzz(runner, channel, method, CALLS_AT_ONCE, seed)
            totals.setdefault(method.path, Counter()).update(outcomes)
            runner.run(tiny.assert_unharmed())
        for path, outcomes in totals.items():
            told = ", ".join(f"{code.name} {count}" for code, count in outcomes.most_common())
            print(f"{path}: {outcomes.total()} calls; {told}")
        calls = sum(outcomes.total() for outcomes in totals.values())
        took_s, grown = time.monotonic() - began_s, (tiny.rss_bytes - first_bytes) / 2**20
        print(f"{calls} calls in {took_s:.0f} s, the server is as new; it grew by {grown:.0f} MiB")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        run(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    main()
