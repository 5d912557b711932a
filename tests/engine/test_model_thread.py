"""The thread beside the event loop's: what is asked of it is done in order, and whoever waits is answered."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from headrace.engine.model_thread import ModelThread


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    thread = ModelThread()
    yield thread
    thread.close()


async def test_calls_are_made_in_order_in_one_other_thread(thread: ModelThread) -> None:
    called: list[tuple[int, str]] = []

    def call(number: int) -> int:
        called.append((number, threading.current_thread().name))
        return 10 * number

    results = await asyncio.gather(*(thread.run(call, number) for number in range(20)))

    assert results == [10 * number for number in range(20)]
    assert called == [(number, "headrace-model") for number in range(20)]
    assert threading.current_thread().name != "headrace-model"


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt("stop")], ids=["error", "interrupt"])
async def test_what_is_raised_comes_back_and_the_thread_goes_on(
    thread: ModelThread, fault: BaseException
) -> None:
    def fail() -> None:
        raise fault

    with pytest.raises(type(fault), match=str(fault)):
        await thread.run(fail)

    assert await thread.run(str, 5) == "5"


async def test_an_iterator_that_is_at_its_end_leaves_nobody_waiting(thread: ModelThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.run(next, iter(()))


async def test_a_call_that_waits_for_the_event_loop_does_not_stop_it(thread: ModelThread) -> None:
    is_told = threading.Event()
    asyncio.get_running_loop().call_soon(is_told.set)

    assert await thread.run(is_told.wait, 60)


async def test_whoever_is_cancelled_leaves_the_call_to_go_on(thread: ModelThread) -> None:
    may_end, ended = threading.Event(), list[int]()

    def call() -> None:
        may_end.wait(60)
        ended.append(1)

    waiting = asyncio.create_task(thread.run(call))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended

    may_end.set()
    assert await thread.run(lambda: list(ended)) == [1]


def test_a_loop_that_is_closed_meanwhile_harms_nobody(thread: ModelThread) -> None:
    may_end = threading.Event()

    async def leave() -> None:
        waiting = asyncio.create_task(thread.run(may_end.wait, 60))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(leave())
    may_end.set()

    assert asyncio.run(thread.run(str, 5)) == "5"


async def test_it_keeps_nothing_of_what_it_was_given(thread: ModelThread) -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    assert await thread.run(lambda given: given is not None, big)
    # Behind the first call's end: the thread takes the next one only when it has let go.
    await thread.run(str)
    del big
    gc.collect()

    assert gone() is None


async def test_nothing_is_called_once_it_is_closed() -> None:
    thread = ModelThread()
    assert await thread.run(str, 5) == "5"
    thread.close()
    thread.close()

    with pytest.raises(RuntimeError, match="closed"):
        await thread.run(str, 5)


def test_an_interpreter_ends_though_nobody_has_closed_it() -> None:
    source = (
        "import asyncio\n"
        "from headrace.engine.model_thread import ModelThread\n"
        "thread = ModelThread()\n"
        "print(asyncio.run(thread.run(str, 5)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )

    assert (ended.stdout, ended.stderr) == ("5\n", "")
