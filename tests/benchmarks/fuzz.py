"""Odd messages to every method of the real program, for as long as is asked; the seed tells which.

python -m tests.benchmarks.fuzz --seconds 1800 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc

from tests.support.fuzzing import CALLER_FILES, CONTROL_FILES, fuzz, methods_of, seeds
from tests.support.served_tiny import served_tiny

CALLS_AT_ONCE = 100


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Fuzz one method after the other until the time is over; print how calls ended.

    Raises:
        AssertionError: a call ended as none may, or the server is no longer as new; the case is told.
    """
    totals: dict[str, Counter[grpc.StatusCode]] = {}
    with asyncio.Runner() as runner:
        served = served_tiny(folder)
        tiny = runner.run(served.__aenter__())
        try:
            channels = [grpc.insecure_channel(address) for address in (tiny.address, tiny.control_address)]
            work = [
                (channel, method)
                for channel, files in zip(channels, (CALLER_FILES, CONTROL_FILES), strict=True)
                for method in methods_of(files)
            ]
            ends_s = time.monotonic() + arguments.seconds
            first_bytes = tiny.rss_bytes
            for seed in seeds(arguments.seed):
                for channel, method in work:
                    outcomes = fuzz(runner, channel, method, CALLS_AT_ONCE, seed)
                    totals.setdefault(method.path, Counter()).update(outcomes)
                runner.run(tiny.assert_unharmed())
                if time.monotonic() > ends_s:
                    break
            for path, outcomes in totals.items():
                told = ", ".join(f"{code.name} {count}" for code, count in outcomes.most_common())
                print(f"{path}: {outcomes.total()} calls; {told}")
            calls = sum(outcomes.total() for outcomes in totals.values())
            grown = (tiny.rss_bytes - first_bytes) / 2**20
            print(
                f"{calls} calls in {arguments.seconds:g} s, the server is as new; it grew by {grown:.0f} MiB"
            )
            for channel in channels:
                channel.close()
        finally:
            runner.run(served.__aexit__(None, None, None))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    with tempfile.TemporaryDirectory() as folder:
        run(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    main()
