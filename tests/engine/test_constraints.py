"""The desk: off the loop, once per content, bounded, clear where it can't serve."""

from __future__ import annotations

import asyncio
import sys

import pytest

from headrace.engine import Constraint, ConstraintKind, InvalidRequest, Overloaded, RequestFailed
from headrace.engine.constraints import ConstraintDesk
from tests.support.engines import assert_serves, collect, running_engine
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_request

ANY_OBJECT = Constraint(ConstraintKind.JSON_OBJECT)


async def test_those_who_come_together_get_the_same() -> None:
    async with running_engine() as engine:
        compiled = await asyncio.gather(*(engine.constraints.compile(ANY_OBJECT) for _ in range(5)))
        assert len({id(one) for one in compiled}) == 1
        assert compiled[0].source == ANY_OBJECT


async def test_a_hostile_constraint_is_refused_while_a_neighbour_gets_its_tokens() -> None:
    hostile = Constraint(
        ConstraintKind.GRAMMAR,
        "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(9000)) + 'r9000 ::= "b"\n',
    )
    async with running_engine() as engine:
        refusal = asyncio.create_task(engine.constraints.compile(hostile))
        neighbour = make_request(max_tokens=60)
        token_ids, _, _ = await collect(engine.submit(neighbour))
        assert token_ids == expected_output(neighbour.prompt_token_ids, 60)
        assert not refusal.done(), "the neighbour has waited for the compiler"
        with pytest.raises(InvalidRequest, match=r"constraint\.grammar: takes more than"):
            await refusal
        await assert_serves(engine)


async def test_more_than_can_wait_are_told_to_come_again() -> None:
    async with running_engine() as engine:
        constraints = [Constraint(ConstraintKind.REGEX, f"a{{{i}}}") for i in range(1, 66)]
        waiting = [asyncio.create_task(engine.constraints.compile(each)) for each in constraints[:64]]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="64 constraints are waiting to be compiled"):
            await engine.constraints.compile(constraints[64])
        assert [(await task).source for task in waiting] == constraints[:64]
        assert (await engine.constraints.compile(constraints[64])).source == constraints[64]


async def test_one_that_is_known_need_not_wait() -> None:
    async with running_engine() as engine:
        known = await engine.constraints.compile(ANY_OBJECT)
        others = [Constraint(ConstraintKind.REGEX, f"b{{{i}}}") for i in range(1, 65)]
        waiting = [asyncio.create_task(engine.constraints.compile(each)) for each in others]
        await asyncio.sleep(0)
        assert await engine.constraints.compile(ANY_OBJECT) is known
        assert not waiting[-1].done()
        await asyncio.gather(*waiting)


async def test_without_the_library_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.engine.sampling.constraint_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with running_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"pip install 'headrace\[structured\]'") as refusal:
            await engine.constraints.compile(ANY_OBJECT)
        assert [violation.field for violation in refusal.value.violations] == ["constraint.json_object"]
        assert not await engine.constraints.prepare()
        await assert_serves(engine)


async def test_what_is_prepared_is_ready() -> None:
    async with running_engine() as engine:
        assert await engine.constraints.prepare()
        assert await engine.constraints.prepare()
        assert (await engine.constraints.compile(ANY_OBJECT)).source == ANY_OBJECT


async def test_a_closed_desk_compiles_nothing() -> None:
    desk = ConstraintDesk(make_fake_model())
    compiling = asyncio.create_task(desk.compile(ANY_OBJECT))
    await asyncio.sleep(0)
    desk.close()
    with pytest.raises(RequestFailed):
        await compiling
