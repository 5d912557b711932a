"""Grace and resume at one moment: either is first, and nothing is in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headrace.service.identity import Caller, Identity
from headrace.service.limits import Limits
from headrace.service.live import Live
from headrace.service.resumable import EXPIRED, Resumables
from headrace.service.status import RpcFailure
from tests.support.detaching import BOUNDED, begun, broken, long_model
from tests.support.requests import make_config
from tests.support.service import RunningService, running_service, until


@dataclass
class FakeHolder:
    """A stream that notes what it is told."""

    lost: list[Live] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    told: list[Live] = field(default_factory=list)

    def lose(self, live: Live) -> None:
        self.lost.append(live)

    def cancel(self, label: str) -> None:
        self.cancelled.append(label)

    def tell(self, source: Live) -> None:
        self.told.append(source)


async def detached(service: RunningService) -> tuple[Resumables, Live]:
    """A request that no stream holds, and where it is kept."""
    await broken(service, await begun(service))
    resumables = service.serving.resumables
    entry = resumables.find(Caller(host="127.0.0.1"), "a")
    assert entry is not None
    return resumables, entry.live


async def test_a_resume_at_the_last_moment_is_in_time() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        resumables, before = await detached(service)
        entry = resumables.of(before)
        assert entry is not None
        entry.release(0.0, is_detached=True)
        holder = FakeHolder()
        live = resumables.take_up(before.parsed.caller, "a", 1, None, holder)
        for _ in range(5):
            await asyncio.sleep(0)
        assert resumables.of(live) is entry
        assert (resumables.num_detached, live.is_ended, before.stream) == (0, False, None)
        entry.end(EXPIRED)
        await service.engine.wait_idle()


async def test_a_resume_a_moment_late_finds_nothing_and_nothing_runs_on() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        resumables, live = await detached(service)
        entry = resumables.of(live)
        assert entry is not None
        entry.release(0.0, is_detached=True)
        await until(lambda: not len(resumables))
        with pytest.raises(RpcFailure) as refusal:
            resumables.take_up(live.parsed.caller, "a", 1, None, FakeHolder())
        assert refusal.value.reason == "NOT_RESUMABLE"
        await service.engine.wait_idle()
        assert service.engine.load().blocks.live == 0


async def test_whoever_takes_it_up_has_it_until_the_next_one_does() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        resumables, first = await detached(service)
        caller, one, other = first.parsed.caller, FakeHolder(), FakeHolder()
        second = resumables.take_up(caller, "a", 1, None, one)
        third = resumables.take_up(caller, "a", 1, None, other)
        assert (one.lost, other.lost) == ([second], [])
        assert list(second.told()) == []
        sequences: list[int] = []

        def has_two() -> bool:
            sequences.extend(event.sequence for event in third.told())
            return len(sequences) >= 2

        await until(has_two)
        assert sequences[:2] == [2, 3]
        entry = resumables.of(third)
        assert entry is not None
        entry.end(EXPIRED)
        await service.engine.wait_idle()


async def test_a_name_is_nobodys_address() -> None:
    async with running_service(long_model(), make_config(**BOUNDED)) as service:
        resumables, live = await detached(service)
        impostor = Caller(Identity("host 127.0.0.1", frozenset()), "127.0.0.1")
        assert resumables.find(impostor, "a") is None
        assert resumables.find(Caller(Identity("127.0.0.1", frozenset()), "10.0.0.1"), "a") is None
        with pytest.raises(RpcFailure):
            resumables.check(Caller(host="127.0.0.1"), "a", Limits())
        resumables.check(impostor, "a", Limits())
        entry = resumables.of(live)
        assert entry is not None
        entry.end(EXPIRED)
        await service.engine.wait_idle()
