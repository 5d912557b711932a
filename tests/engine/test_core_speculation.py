"""Runs of drafts that are kept end where plain decoding ends, whatever ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace.engine import (
    FinishEvent,
    FinishReason,
    InvalidRequest,
    LoadedModel,
    Request,
    SamplingParams,
    Speculation,
    SpeculationConfig,
    SpeculationParams,
    TokenEvent,
    TokenLogprobs,
)
from headrace.engine.core import EngineCore, RequestEvent
from headrace.engine.outputs import SpeculationTotals
from tests.support.fake_runner import half_right_draft, make_fake_model, next_token, useless_draft
from tests.support.indexed_runner import IndexedRunner, seed_of
from tests.support.requests import make_config, make_request, speculating

PROMPT = (4, 8, 15)
MOST = 12


@dataclass
class Told:
    """What a caller hears of one sequence."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    end: FinishEvent | None = None
    num_events: int = 0

    @property
    def last(self) -> FinishEvent:
        assert self.end is not None
        return self.end


class Server:
    """An engine core over a fake model with a draft model."""

    def __init__(
        self,
        speculation: SpeculationConfig | None = None,
        draft: Callable[[Sequence[int], int], int] = next_token,
        model: LoadedModel | None = None,
    ) -> None:
        self.model = model or make_fake_model(draft=draft)
        self.config = make_config(speculation=speculation)
        self.now_s = 0.0
        self.core = EngineCore(
            self.model.info,
            self.model.layout,
            self.model.tokenizer,
            self.config,
            lambda: self.now_s,
            draft_max_len=self.model.draft_max_len,
        )

    def step(self) -> list[RequestEvent]:
        plan = self.core.begin_step()
        assert plan is not None
        return list(self.core.finish_step(self.model.runner.execute(plan))[0])

    def run(self, *requests: Request) -> list[Told]:
        """Serve requests together; what each hears of its first sequence."""
        told = {request.request_id: Told([], "", []) for request in requests}
        for request in requests:
            self.core.add(request)
        while self.core.has_work:
            for request_id, event in self.step():
                heard = told[request_id]
                if isinstance(event, TokenEvent):
                    heard.token_ids += event.token_ids
                    heard.text += event.text
                    heard.logprobs += event.logprobs
                    heard.num_events += 1
                else:
                    assert isinstance(event, FinishEvent)
                    heard.end = event
        self.core.check_integrity()
        return list(told.values())

    @property
    def totals(self) -> SpeculationTotals:
        return self.core.load.totals.speculation


def indexed_server(speculation: SpeculationConfig | None) -> Server:
    """One whose model tells logprobs, and whose draft model is always right."""
    model = make_fake_model(draft=next_token)
    return Server(speculation, model=replace(model, runner=IndexedRunner(model.layout, draft=next_token)))


def same(one: Told, other: Told) -> bool:
    """Whether two callers hear the same, pieces and drafts aside."""
    ends = [
        (heard.last.reason, heard.last.matched_stop, heard.last.usage.num_completion_tokens)
        for heard in (one, other)
    ]
    return (one.token_ids, one.text, one.logprobs, ends[0]) == (
        other.token_ids,
        other.text,
        other.logprobs,
        ends[1],
    )


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["id", "string", "string over two tokens", "string, kept in"])
def test_every_stop_in_every_place_of_a_run_ends_it_as_in_plain_decoding(num_drafts: int, kind: str) -> None:
    plain, fast = indexed_server(None), indexed_server(speculating(Speculation.DRAFT_MODEL, num_drafts))
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    (whole,) = plain.run(make_request(prompt=PROMPT, max_tokens=MOST, sampling=sampling))
    for place in range(2 * num_drafts + 2):
        for max_tokens in range(1, MOST + 1):
            options: dict[str, Any] = {}
            if kind == "id":
                options["stop_token_ids"] = frozenset({whole.token_ids[place]})
            else:
                length = 2 if "two" in kind else 1
                options["stop_strings"] = (whole.text[place : place + length],)
                options["is_stop_included"] = "kept" in kind
            heard = [
                server.run(make_request(prompt=PROMPT, max_tokens=max_tokens, sampling=sampling, **options))[
                    0
                ]
                for server in (plain, fast)
            ]
            assert same(*heard), (place, max_tokens)
            usage = heard[1].last.usage
            # Of a draft model that is always right every draft that was judged is kept.
            assert usage.num_accepted_draft_tokens == usage.num_draft_tokens <= usage.num_completion_tokens
    assert fast.totals.acceptance_rate == 1.0
    assert plain.totals.num_output_tokens == fast.totals.num_output_tokens + MOST


@pytest.mark.parametrize("min_tokens", range(8))
def test_what_may_not_end_yet_does_not_end_within_a_run(min_tokens: int) -> None:
    plain, fast = Server(), Server(speculating(Speculation.DRAFT_MODEL, 3))
    (whole,) = plain.run(make_request(prompt=PROMPT, max_tokens=MOST))
    stops = (whole.text[2:4], whole.text[5])

    heard = [
        server.run(make_request(prompt=PROMPT, max_tokens=MOST, min_tokens=min_tokens, stop_strings=stops))[0]
        for server in (plain, fast)
    ]

    assert same(*heard)
    assert heard[0].last.usage.num_completion_tokens > min(min_tokens, 3)


@pytest.mark.parametrize("num_drafts", range(1, 6))
@pytest.mark.parametrize("room", range(1, 8))
@pytest.mark.parametrize("block_size", [1, 4])
def test_texts_grow_to_the_last_token_of_the_context_and_no_draft_beyond(
    num_drafts: int, room: int, block_size: int
) -> None:
    limit = 24
    model = make_fake_model(draft=next_token, max_model_len=limit, block_size=block_size)
    server = Server(speculating(Speculation.DRAFT_MODEL, num_drafts), model=model)
    prompt = tuple(range(limit - room))
    seen: list[int] = []

    server.core.add(make_request(prompt=prompt, max_tokens=None))
    made: list[int] = []
    while server.core.has_work:
        plan = server.core.begin_step()
        assert plan is not None
        seen += [row.known_end + row.draft.num_drafts for row in plan.rows if row.draft is not None]
        for _, event in server.core.finish_step(model.runner.execute(plan))[0]:
            if isinstance(event, TokenEvent):
                made += event.token_ids
            else:
                assert isinstance(event, FinishEvent)
                assert event.reason is FinishReason.LENGTH

    assert len(made) == room
    # Behind the last draft comes one more token, which may be the last one that there is room for.
    assert max(seen) < limit


@pytest.mark.parametrize("draft_max_len", [1, 4, 6, 9, 13])
def test_a_draft_model_of_shorter_context_stops_proposing_and_nothing_else_changes(
    draft_max_len: int,
) -> None:
    model = make_fake_model(draft=next_token, draft_max_len=draft_max_len)
    server = Server(speculating(Speculation.DRAFT_MODEL, 3), model=model)

    (heard,) = server.run(make_request(prompt=PROMPT, max_tokens=20))

    assert heard.token_ids == Server().run(make_request(prompt=PROMPT, max_tokens=20))[0].token_ids
    assert (heard.last.usage.num_draft_tokens > 0) == (draft_max_len > len(PROMPT))


@pytest.mark.parametrize("num_blocks", [7, 8, 11])
def test_draft_kv_of_a_block_that_another_text_has_taken_over_is_not_trusted(num_blocks: int) -> None:
    """A block keeps its number, not its content: made for one text, then for another by the target alone."""
    model = make_fake_model(draft=next_token, num_blocks=num_blocks, block_size=2, max_model_len=14)
    server = Server(speculating(Speculation.DRAFT_MODEL, 2), model=model)
    plain = SpeculationParams(is_enabled=False)

    # Round by round the texts take the blocks in another order, among them such as begin a text.
    for first in range(0, 90, 10):
        prompt = tuple(range(first, first + 10))
        server.run(make_request(prompt=prompt, max_tokens=4, speculation=plain))
        (heard,) = server.run(make_request(prompt=prompt, max_tokens=4))

        assert heard.last.usage.num_cached_tokens > 0
        assert heard.last.usage.num_accepted_draft_tokens == heard.last.usage.num_draft_tokens > 0
        server.core.flush_cache()


def test_draft_kv_in_shared_blocks_is_used_where_it_is_known_to_be_there() -> None:
    model = make_fake_model(draft=next_token, block_size=2)
    server = Server(speculating(Speculation.DRAFT_MODEL, 2), model=model)
    prompt = tuple(range(10))
    server.run(make_request(prompt=prompt, max_tokens=4))

    server.core.add(make_request(prompt=prompt, max_tokens=4))
    plan = server.core.begin_step()
    assert plan is not None
    (row,) = plan.rows
    assert row.draft is not None
    assert row.first_position == row.draft.first_position == 8


@pytest.mark.parametrize(
    ("draft", "low", "high"),
    [(next_token, 1.0, 1.0), (half_right_draft, 0.2, 0.8), (useless_draft, 0.0, 0.0)],
)
def test_counts_say_what_became_of_the_drafts(
    draft: Callable[[Sequence[int], int], int], low: float, high: float
) -> None:
    server = Server(speculating(Speculation.DRAFT_MODEL, 3), draft)
    (heard,) = server.run(make_request(prompt=PROMPT, max_tokens=40))

    totals, usage = server.totals, heard.last.usage
    assert totals.num_output_tokens == len(heard.token_ids) == 40
    assert totals.num_output_tokens == totals.num_draws + totals.num_accepted_tokens
    assert (totals.num_draft_tokens, totals.num_accepted_tokens) == (
        usage.num_draft_tokens,
        usage.num_accepted_draft_tokens,
    )
    assert sum(totals.drafted_by_place) == totals.num_draft_tokens
    assert sum(totals.accepted_by_place) == totals.num_accepted_tokens
    assert list(totals.accepted_by_place) == sorted(totals.accepted_by_place, reverse=True)
    assert totals.tokens_per_target_step == 40 / totals.num_draws
    assert low <= totals.acceptance_rate <= high


def expected_counts(
    prompt: Sequence[int], num_drafts: int, max_tokens: int, stop: int | None
) -> tuple[int, int, int]:
    """Tokens made, drafts judged and drafts kept, by the book: a step at a time."""
    text = list(prompt)
    end = len(prompt) + max_tokens
    text.append(next_token(text))  # the prompt's step has no drafts
    num_judged = num_kept = 0
    while len(text) < end and text[-1] != stop:
        room = end - len(text) - 1
        drafts: list[int] = []
        while len(drafts) < min(num_drafts, room):
            drafts.append(half_right_draft([*text, *drafts], 0))
        is_over, num_made = False, 0
        for draft in [*drafts, None]:
            token_id = next_token(text)
            text.append(token_id)
            num_made += 1
            num_kept += token_id == draft
            is_over = token_id == stop
            if is_over or token_id != draft:
                break
        num_judged += min(len(drafts), num_made) if is_over else len(drafts)
    return len(text) - len(prompt), num_judged, num_kept


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_what_was_judged_and_kept_is_counted_draft_by_draft(num_drafts: int) -> None:
    server = Server(speculating(Speculation.DRAFT_MODEL, num_drafts), half_right_draft)
    made: set[tuple[int, int, int]] = set()
    for i in range(40):
        prompt, stop = (i, 3, 9), 97 + i % 26 if i % 3 else None
        (heard,) = server.run(
            make_request(
                prompt=prompt, max_tokens=30, stop_token_ids=frozenset(() if stop is None else (stop,))
            )
        )
        usage = heard.last.usage
        counts = usage.num_completion_tokens, usage.num_draft_tokens, usage.num_accepted_draft_tokens
        assert counts == expected_counts(prompt, num_drafts, 30, stop)
        made.add(counts)
    assert len(made) > 20


def test_a_time_limit_in_the_midst_of_runs_leaves_counts_that_add_up() -> None:
    server = Server(speculating(Speculation.DRAFT_MODEL, 3))
    server.core.add(make_request(prompt=PROMPT, max_tokens=100, time_limit_s=5.0))
    made = 0
    for _ in range(4):
        made += sum(len(event.token_ids) for _, event in server.step() if isinstance(event, TokenEvent))
    server.now_s = 6.0
    end = server.core.expire()[-1][1]

    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.TIME_LIMIT
    assert end.usage.num_completion_tokens == made
    assert end.usage.num_accepted_draft_tokens == end.usage.num_draft_tokens == made - server.totals.num_draws


def test_several_sequences_speculate_each_by_itself() -> None:
    model = make_fake_model(draft=next_token)
    for n, best_of in ((3, 3), (2, 4)):
        outputs = []
        for speculation in (None, speculating(Speculation.DRAFT_MODEL, 3)):
            runner = IndexedRunner(model.layout, draft=next_token)
            server = Server(speculation, model=replace(model, runner=runner))
            told: dict[int, list[int]] = {}
            server.core.add(
                make_request(prompt=PROMPT, n=n, best_of=best_of, sampling=SamplingParams(seed=3))
            )
            while server.core.has_work:
                for _, event in server.step():
                    if isinstance(event, TokenEvent):
                        told.setdefault(event.index, []).extend(event.token_ids)
            outputs.append(told)
        assert outputs[0] == outputs[1]
    assert seed_of(1, 3) != seed_of(0, 3)


def test_a_request_says_how_many_drafts_it_wants_or_none() -> None:
    server = Server(speculating(Speculation.DRAFT_MODEL, 2, most=4))
    wanted: list[tuple[SpeculationParams, int]] = [
        (SpeculationParams(), 2),
        (SpeculationParams(is_enabled=False), 0),
        (SpeculationParams(num_tokens=0), 0),
        (SpeculationParams(num_tokens=4), 4),
        (SpeculationParams(is_enabled=True, num_tokens=1), 1),
    ]
    for speculation, most in wanted:
        server.core.add(make_request(prompt=PROMPT, max_tokens=9, speculation=speculation))
        planned = set()
        while server.core.has_work:
            plan = server.core.begin_step()
            assert plan is not None
            planned |= {row.draft.num_drafts for row in plan.rows if row.draft is not None}
            server.core.finish_step(server.model.runner.execute(plan))
        assert max(planned, default=0) == most


@pytest.mark.parametrize(
    ("config", "wanted", "field"),
    [
        (SpeculationConfig(), SpeculationParams(is_enabled=True), "speculation.enabled"),
        (SpeculationConfig(), SpeculationParams(num_tokens=2), "speculation.num_speculative_tokens"),
        (
            SpeculationConfig(Speculation.PROMPT_LOOKUP, max_speculative_tokens=4),
            SpeculationParams(num_tokens=5),
            "speculation.num_speculative_tokens",
        ),
        (
            SpeculationConfig(Speculation.PROMPT_LOOKUP),
            SpeculationParams(is_enabled=False, num_tokens=2),
            "speculation.num_speculative_tokens",
        ),
    ],
)
def test_what_the_server_does_not_have_is_refused(
    config: SpeculationConfig, wanted: SpeculationParams, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Server(config).core.add(make_request(speculation=wanted))
    assert [violation.field for violation in refusal.value.violations] == [field]
