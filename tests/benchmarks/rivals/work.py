"""The work that both sides do. Every answer is greedy and exactly as long as is said here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from headrace.clients.bench_workload import Lengths

VOCABULARY = (1_000, 49_000)
"""Token ids that are plain text in the model's vocabulary."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many tokens to make."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class Work:
    """Requests that are all due at once.

    Args:
        name: short.
        title: for the table.
        figure: what is told of it: "output" tokens/s over the whole, "decode" tokens/s of its one request
            between first and last token, or "prompt" tokens/s of its one request up to the first token.
        num_repeats: how often it is done in a pass; the median of these is the pass's figure.
    """

    name: str
    title: str
    figure: str
    requests: tuple[Request, ...]
    num_repeats: int = 1


def all_work(path: Path | None) -> list[Work]:
    """W1, W2 and W3, made from a seed or read from a file.

    Args:
        path: JSON with `requests`, and `w2` and `w3` as further requests; each of `prompt_token_ids` and
            `output_len`.
    """
    if path is None:
        mix, one_stream, long_prompt = _made(random.Random(1))
    else:
        document = json.loads(path.read_text(encoding="utf-8"))
        mix = tuple(map(_request, document["requests"]))
        one_stream, long_prompt = _request(document["w2"]), _request(document["w3"])
    num_prompt_tokens = sum(len(request.prompt) for request in mix)
    num_output_tokens = sum(request.output_len for request in mix)
    return [
        Work(
            "w1",
            f"W1: {len(mix)} requests at once, {num_prompt_tokens} tokens in, {num_output_tokens} out; "
            "output tokens/s",
            "output",
            mix,
        ),
        Work(
            "w2",
            f"W2: one stream, {len(one_stream.prompt)} in, {one_stream.output_len} out; decode tokens/s",
            "decode",
            (one_stream,),
            num_repeats=3,
        ),
        Work(
            "w3",
            f"W3: one prompt of {len(long_prompt.prompt)}; prompt tokens/s",
            "prompt",
            (long_prompt,),
            num_repeats=3,
        ),
    ]


def warm_up(work: Work) -> Work:
    """A little of the same kind that shares no beginning with it."""
    requests = tuple(Request(request.prompt[::-1], 8) for request in work.requests[:32])
    return Work("warm-up", "", "output", requests)


def _made(rng: random.Random) -> tuple[tuple[Request, ...], Request, Request]:
    output_lens = Lengths("geometric:64:8-256")
    mix = tuple(Request(_ids(rng, rng.randint(16, 128)), output_lens.draw(rng)) for _ in range(64))
    return mix, Request(_ids(rng, 32), 128), Request(_ids(rng, 1024), 1)


def _ids(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(*VOCABULARY) for _ in range(length))


def _request(fields: dict[str, object]) -> Request:
    prompt, output_len = fields["prompt_token_ids"], fields["output_len"]
    assert isinstance(prompt, list)
    assert isinstance(output_len, int)
    return Request(tuple(prompt), output_len)


@dataclass(frozen=True)
class Timing:
    """One request as it went. Seconds since all were sent."""

    first_s: float
    last_s: float
    num_tokens: int


def figure_of(work: Work, timings: list[Timing]) -> float:
    """The figure of one run, tokens per second.

    Raises:
        ValueError: somebody made another number of tokens than was asked for.
    """
    made = [timing.num_tokens for timing in timings]
    wanted = [request.output_len for request in work.requests]
    if made != wanted:
        raise ValueError(f"{work.name}: {sum(made)} tokens were made where {sum(wanted)} were asked for")
    if work.figure == "output":
        return sum(made) / max(timing.last_s for timing in timings)
    (only,), (request,) = timings, work.requests
    if work.figure == "decode":
        return (only.num_tokens - 1) / (only.last_s - only.first_s)
    return len(request.prompt) / only.first_s
