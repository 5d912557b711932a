"""What speculation gains: tokens per second with and without it, on a real model, in one run.

    .venv/bin/python -m tests.benchmarks.speculation --model DIR
    .venv/bin/python -m tests.benchmarks.speculation --model DIR --draft-model DIR --draft-weight-dtype int8
    .venv/bin/python -m tests.benchmarks.speculation --model DIR --what prose --tokens 32 --rounds 1

Ten tasks that copy from their prompt (extract, rewrite, edit code), five that don't, each alone; then sixteen
tasks of either kind at once. Every task is answered by two engines over the same weights, one of which
speculates, in turns, there and back again, so that what else the machine does falls on both. Tokens per
second count the whole time of an answer, the reading of its prompt included; the ratio is the median over
rounds. Beside it stands how often drafts were kept at each place of their step, counted over all rounds.
Greedy; prompts are computed anew each time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from headrace.engine import (
    AsyncEngine,
    CacheConfig,
    Chat,
    ChatMessage,
    EngineConfig,
    FinishEvent,
    ModelConfig,
    Request,
    RequestId,
    SamplingParams,
    Speculation,
    SpeculationConfig,
    SpeculationTotals,
    StopConditions,
    load_model,
)
from tests.benchmarks.options import add_compute_options, add_model_options, model_path

_LETTER = """Dear Mrs Albright,

Thank you for your order number 48213 of 14 March. We have packed three sacks of stone-ground rye flour, \
two sacks of spelt and one barrel of oats. The cart leaves our mill at Ottery Bridge on Thursday morning \
at seven, and should reach your bakery in Harbour Lane before noon. Please have the empty sacks from \
February ready for the carter, Mr Thomas Penrose, who will give you a receipt for them. The total comes to \
61 pounds and 40 pence, payable by the end of April.

Yours faithfully,
Edwin Marsh, Marsh and Daughters, Millers"""

_ARTICLE = """The water wheel at Ottery Bridge was built in 1784 by the brothers John and Samuel Marsh. \
It is an overshot wheel of oak and iron, five metres across, and it drives two pairs of stones. In 1851 \
a flood tore away the old headrace, and the family dug a new one, four hundred metres long, which is still \
in use. The mill stopped grinding for trade in 1932, when the last miller, Ruth Marsh, retired at the age of \
eighty. A trust bought the buildings in 1978 and repaired the wheel over six years. Today the mill grinds \
about twenty tonnes of wheat a year, most of which is sold to bakers in the valley. Visitors can see the \
stones turn on Sundays from April to October."""

_CODE = """def average_level(readings):
    total = 0
    count = 0
    for reading in readings:
        if reading.level is None:
            continue
        total = total + reading.level
        count = count + 1
    if count == 0:
        return None
    return total / count


def highest_level(readings):
    highest = None
    for reading in readings:
        if reading.level is None:
            continue
        if highest is None or reading.level > highest:
            highest = reading.level
    return highest
"""

_RECORDS = """name: Anna Lindqvist; city: Uppsala; role: carter; since: 2014
name: Bruno Keller; city: Basel; role: miller; since: 2009
name: Carmen Ortiz; city: Sevilla; role: baker; since: 2018
name: Dmitri Volkov; city: Tver; role: cooper; since: 2011
name: Elif Demir; city: Bursa; role: miller; since: 2020"""

COPYING = (
    f"Repeat the following letter word for word.\n\n{_LETTER}",
    f"Correct the spelling of this text and give the whole corrected text back.\n\n{_ARTICLE}",
    f"Rename the variable `count` to `num_readings` in this code. Give the whole code.\n\n{_CODE}",
    f"Add a docstring to each function of this code. Give the whole code.\n\n{_CODE}",
    f"List every sentence of this text that has a year in it, word for word.\n\n{_ARTICLE}",
    f"Write these records as a JSON list with the keys name, city, role and since.\n\n{_RECORDS}",
    f"Write these records as a Markdown table.\n\n{_RECORDS}",
    f"Copy the records of all millers, word for word.\n\n{_RECORDS}",
    f"Quote the paragraph of this letter that says what was packed and when it comes.\n\n{_LETTER}",
    f"Change the name Edwin Marsh to Ruth Marsh in this letter and give the whole letter.\n\n{_LETTER}",
)
WRITING = (
    "Write a short story about a miller who finds an old map.",
    "Why do rivers bend? Explain it to a child.",
    "Describe a quiet morning in a town by the sea.",
    "What should one think of before learning to play the violin?",
    "Tell me about the history of bread.",
)
_ids = count()


@dataclass(frozen=True, slots=True)
class Round:
    """What answering some tasks at once took."""

    num_tokens: int
    seconds: float
    num_drafts: int
    num_accepted: int
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


async def answer(engine: AsyncEngine, prompts: list[list[int]], num_tokens: int, temperature: float) -> Round:
    """Answer all prompts at once."""
    began = time.perf_counter()
    parts = await asyncio.gather(*(_one(engine, prompt, num_tokens, temperature) for prompt in prompts))
    seconds = time.perf_counter() - began
    usages = [end.usage for _, end in parts]
    return Round(
        sum(usage.num_completion_tokens for usage in usages),
        seconds,
        sum(usage.num_draft_tokens for usage in usages),
        sum(usage.num_accepted_draft_tokens for usage in usages),
        tuple(token_ids for token_ids, _ in parts),
    )


async def _one(
    engine: AsyncEngine, prompt: list[int], num_tokens: int, temperature: float
) -> tuple[tuple[int, ...], FinishEvent]:
    request = Request(
        request_id=RequestId(f"r{next(_ids)}"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=temperature, seed=7),
        stop=StopConditions(max_tokens=num_tokens),
        uses_prefix_cache=False,
    )
    token_ids: tuple[int, ...] = ()
    async for event in engine.submit(request):
        match event:
            case FinishEvent():
                return token_ids, event
            case _ if hasattr(event, "token_ids"):
                token_ids += event.token_ids
    raise RuntimeError("the answer had no end")


async def compare(
    name: str,
    engines: tuple[AsyncEngine, AsyncEngine],
    tasks: list[list[list[int]]],
    options: argparse.Namespace,
) -> None:
    """Print a line: all of `tasks`, one after the other, by either engine, again and again."""
    ratios, rates, lines = [], [], []
    num_drafts = num_accepted = num_equal = num_all = 0
    before = engines[1].load().totals.speculation
    for number in range(options.rounds):
        first = number % 2
        rounds: dict[int, list[Round]] = {0: [], 1: []}
        for prompts in tasks:
            # There and back again: what drifts meanwhile falls on both alike.
            for which in (first, 1 - first, 1 - first, first):
                rounds[which].append(
                    await answer(engines[which], prompts, options.tokens, options.temperature)
                )
        totals = [
            sum(each.num_tokens for each in rounds[which]) / sum(each.seconds for each in rounds[which])
            for which in (0, 1)
        ]
        ratios.append(totals[1] / totals[0])
        rates.append(totals)
        num_drafts = sum(r.num_drafts for r in rounds[1])
        num_accepted = sum(r.num_accepted for r in rounds[1])
        pairs = list(zip(rounds[0], rounds[1], strict=True))
        num_equal = sum(a.token_ids == b.token_ids for a, b in pairs)
        num_all = len(pairs)
        lines = [f"{b.rate / a.rate:.2f}" for a, b in pairs]
    plain, speculating = (statistics.median(rate[which] for rate in rates) for which in (0, 1))
    print(
        f"{name:22s} plain {plain:7.1f}  speculating {speculating:7.1f} tokens/s  "
        f"ratio {statistics.median(ratios):.3f} (rounds {' '.join(f'{r:.3f}' for r in ratios)})  "
        f"kept {num_accepted}/{num_drafts}  same answers {num_equal}/{num_all}",
        flush=True,
    )
    print("    " + told(before, engines[1].load().totals.speculation), flush=True)
    if options.each:
        print("    each task: " + " ".join(lines), flush=True)


def told(before: SpeculationTotals, after: SpeculationTotals) -> str:
    """What became of the drafts between two moments."""

    def since(name: str) -> list[int]:
        counts: list[int] = list(getattr(after, name))
        for place, count_before in enumerate(getattr(before, name)):
            counts[place] -= count_before
        return counts

    num_steps = after.num_draws - before.num_draws
    num_drafted = after.num_drafted_draws - before.num_drafted_draws
    if not num_drafted:
        return f"no drafts in {num_steps} target steps"
    num_kept = after.num_accepted_tokens - before.num_accepted_tokens
    places = zip(since("accepted_by_place"), since("drafted_by_place"), strict=False)
    return (
        f"drafts in {num_drafted} of {num_steps} target steps, mean accepted length "
        f"{1 + num_kept / num_drafted:.2f}, tokens per target step "
        f"{(after.num_output_tokens - before.num_output_tokens) / num_steps:.2f}, kept by place "
        + " ".join(f"{kept / made:.2f}" for kept, made in places if made)
    )


async def run(options: argparse.Namespace) -> None:
    """Load once, compare all."""
    kind = Speculation.PROMPT_LOOKUP if options.draft_model is None else Speculation.DRAFT_MODEL
    config = EngineConfig(
        model=ModelConfig(model_path(options), dtype=options.dtype, max_model_len=2048),
        cache=CacheConfig(block_size=4, num_blocks=8192),
        num_threads=options.threads,
        speculation=SpeculationConfig(
            kind,
            options.draft_model,
            options.num_speculative_tokens,
            options.max_speculative_tokens,
            draft_weight_dtype=options.draft_weight_dtype,
        ),
    )
    model = load_model(config)
    plain = replace(config, speculation=SpeculationConfig())
    encode = model.tokenizer.encode_chat
    copying, writing = (
        [encode(model.tokenizer.render_chat(Chat((ChatMessage("user", text),)))) for text in texts]
        for texts in (COPYING, WRITING)
    )
    async with AsyncEngine(model, plain) as without, AsyncEngine(model, config) as with_drafts:
        engines = (without, with_drafts)
        # First calls, and the cost of steps, which the engines learn.
        for engine in engines:
            await answer(engine, writing[:1], 32, 0.0)
        if "copy" in options.what:
            await compare("copying, alone", engines, [[prompt] for prompt in copying], options)
        if "prose" in options.what:
            await compare("prose, alone", engines, [[prompt] for prompt in writing], options)
        if "busy" in options.what:
            crowd = (writing * 4)[:16]
            await compare("prose, 16 at once", engines, [crowd], options)
            crowd = (copying * 2)[:16]
            await compare("copying, 16 at once", engines, [crowd], options)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_options(parser)
    add_compute_options(parser, has_weight_dtype=False)
    parser.add_argument("--draft-model", type=Path, default=None, help="unset: prompt lookup")
    parser.add_argument(
        "--draft-weight-dtype", default="same", choices=("same", "int8", "int4"), help="as of headrace serve"
    )
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=None, help="unset: as many as pay")
    parser.add_argument("--max-speculative-tokens", type=int, default=8)
    parser.add_argument("--what", nargs="+", default=["copy", "prose", "busy"])
    parser.add_argument("--each", action="store_true", help="tell the ratio of each task, too")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
