"""The Python client over a link that breaks: what its caller reads is what an unbroken one would say."""

from __future__ import annotations

import pytest

from headrace.clients import (
    Delta,
    Event,
    FinishReason,
    Generation,
    InferenceClient,
    NotFound,
    RetryPolicy,
    Unavailable,
)
from headrace.engine import LoadedModel
from headrace.service.limits import Limits
from tests.support.breakable_link import breakable_link
from tests.support.fake_runner import expected_output, make_fake_model
from tests.support.requests import make_config
from tests.support.service import running_service, until
from tests.support.step_gate import StepGate

QUICK = RetryPolicy(max_attempts=8, initial_backoff_s=0.01, max_backoff_s=0.05)
PROMPTS = [(97 + i, 98, 99) for i in range(4)]


def paced_model(gate: StepGate) -> LoadedModel:
    return make_fake_model(max_model_len=1024, num_blocks=1024, before_step=gate)


class Reading:
    """A request that is read an event at a time."""

    def __init__(self, generation: Generation) -> None:
        self._events = aiter(generation)
        self.ids: list[int] = []
        self.last: Event | None = None

    async def until(self, num_ids: int) -> None:
        while len(self.ids) < num_ids:
            await self._next()

    async def to_the_end(self) -> None:
        async for event in self._events:
            self._take(event)

    async def _next(self) -> None:
        self._take(await anext(self._events))

    def _take(self, event: Event) -> None:
        self.last = event
        if isinstance(event, Delta):
            self.ids += event.token_ids


async def test_requests_go_on_over_a_link_that_breaks_again_and_again() -> None:
    gate = StepGate()
    async with (
        running_service(paced_model(gate), make_config(max_num_seqs=4)) as service,
        breakable_link(service.address) as link,
        InferenceClient(link.address, retry=QUICK) as client,
        client.session(resumes=True) as session,
    ):
        readings = [
            Reading(session.generate(prompt, max_tokens=100, temperature=0, wants_text=False))
            for prompt in PROMPTS
        ]
        for number in range(1, 6):
            gate.let(10)
            # Some have been read as far as they are made, and some lag.
            for reading in readings[: number % 4 + 1]:
                await reading.until(6 * number)
            link.cut()
        gate.open()
        for reading in readings:
            await reading.to_the_end()
        late = await session.generate(PROMPTS[0], max_tokens=5, temperature=0).answer()
    assert link.num_connections >= 3
    assert [reading.ids for reading in readings] == [expected_output(prompt, 100) for prompt in PROMPTS]
    assert list(late.completions[0].token_ids) == expected_output(PROMPTS[0], 5)
    assert len(service.serving.resumables) == 0, "all of it was acknowledged"


async def test_what_was_cancelled_while_the_link_was_broken_is_cancelled() -> None:
    gate = StepGate()
    async with (
        running_service(paced_model(gate)) as service,
        breakable_link(service.address) as link,
        InferenceClient(link.address, retry=QUICK) as client,
        client.session(resumes=True) as session,
    ):
        generation = session.generate(PROMPTS[0], max_tokens=1000, temperature=0)
        reading = Reading(generation)
        gate.let(5)
        await reading.until(2)
        link.cut()
        generation.cancel()
        gate.open()
        await reading.to_the_end()
        await service.engine.wait_idle()
    assert getattr(reading.last, "reason", None) is FinishReason.CANCELLED
    assert reading.ids == expected_output(PROMPTS[0], len(reading.ids))


async def test_a_restarted_server_gets_what_nothing_was_seen_of_and_loses_the_rest() -> None:
    gate, second_gate = StepGate(), StepGate()
    async with running_service(paced_model(second_gate), make_config(max_num_seqs=1)) as second:
        first_service = running_service(paced_model(gate), make_config(max_num_seqs=1))
        async with first_service as first, breakable_link(first.address) as link:
            async with (
                InferenceClient(link.address, retry=QUICK) as client,
                client.session(resumes=True) as session,
            ):
                begun = Reading(session.generate(PROMPTS[0], max_tokens=50, temperature=0))
                unseen = Reading(session.generate(PROMPTS[1], max_tokens=50, temperature=0))
                gate.let(5)
                await begun.until(2)
                link.target = second.address
                link.cut()
                with pytest.raises(NotFound, match="restarted"):
                    await begun.to_the_end()
                second_gate.open()
                await unseen.to_the_end()
            gate.open()
    assert begun.ids == expected_output(PROMPTS[0], len(begun.ids))
    assert unseen.ids == expected_output(PROMPTS[1], 50)


async def test_to_leave_by_an_exception_leaves_nothing_running_behind() -> None:
    gate = StepGate()
    async with (
        running_service(paced_model(gate)) as service,
        InferenceClient(service.address, retry=QUICK) as client,
    ):
        gate.open()

        async def leave_early() -> None:
            async with client.session(resumes=True) as session:
                reading = Reading(session.generate(PROMPTS[0], max_tokens=1000, temperature=0))
                await reading.until(1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await leave_early()
        await service.engine.wait_idle()
        assert service.serving.resumables.num_detached == 0


async def test_a_server_that_stays_away_is_given_up_as_the_policy_says() -> None:
    gate = StepGate()
    async with running_service(paced_model(gate)) as service, breakable_link(service.address) as link:
        async with (
            InferenceClient(link.address, retry=QUICK) as client,
            client.session(resumes=True) as session,
        ):
            reading = Reading(session.generate(PROMPTS[0], max_tokens=50, temperature=0))
            gate.let(4)
            await reading.until(1)
            link.target = "127.0.0.1:1"
            link.cut()
            with pytest.raises(Unavailable):
                await reading.to_the_end()
            with pytest.raises(Unavailable):
                session.generate(PROMPTS[0])
        gate.open()
        # On the server it waits for its grace to pass, and is cancelled here instead.
        await until(lambda: service.serving.resumables.num_detached == 1)
        service.serving.close()
        await service.engine.wait_idle()


async def test_only_what_may_be_resumed_is() -> None:
    gate = StepGate()
    async with (
        running_service(paced_model(gate), limits=Limits(detach_grace_s=30.0)) as service,
        breakable_link(service.address) as link,
        InferenceClient(link.address, retry=QUICK) as client,
        client.session(resumes=True) as session,
    ):
        kept = Reading(session.generate(PROMPTS[0], max_tokens=40, temperature=0))
        lost = Reading(session.generate(PROMPTS[1], max_tokens=40, temperature=0, detach=False))
        gate.let(5)
        await kept.until(2)
        await lost.until(2)
        link.cut()
        with pytest.raises(Unavailable):
            await lost.to_the_end()
        gate.open()
        await kept.to_the_end()
    assert kept.ids == expected_output(PROMPTS[0], 40)
