from __future__ import annotations

import random
import statistics

import pytest

from headrace.clients.bench_workload import (
    Lengths,
    SyntheticOptions,
    Turn,
    Workload,
    WorkloadError,
    joined,
    synthetic,
    warm_up_turn,
)


def drawn(word: str, num: int = 4000) -> list[int]:
    """Lengths of a distribution."""
    rng = random.Random(1)
    lengths = Lengths(word)
    return [lengths.draw(rng) for _ in range(num)]


def made(**options: object) -> Workload:
    """A synthetic workload of short prompts."""
    defaults: dict[str, object] = {
        "prompt_len": Lengths("3-6"),
        "output_len": Lengths("4"),
        "vocabulary_size": 50,
    }
    return synthetic(SyntheticOptions(**{**defaults, **options}))  # type: ignore[arg-type]


def test_fixed_and_uniform_lengths() -> None:
    assert set(drawn("128")) == {128}
    assert set(drawn("3-5")) == {3, 4, 5}


@pytest.mark.parametrize(
    ("word", "mean"), [("geometric:64", 64), ("normal:100:10", 100), ("lognormal:50:0.25", 50 * 1.0317)]
)
def test_shaped_lengths_have_their_mean(word: str, mean: float) -> None:
    assert statistics.fmean(drawn(word)) == pytest.approx(mean, rel=0.06)


@pytest.mark.parametrize("word", ["geometric:64:8-20", "normal:12:90:8-20", "lognormal:12:3:8-20"])
def test_bounds_are_kept_and_reached(word: str) -> None:
    lengths = drawn(word)
    assert (min(lengths), max(lengths)) == (8, 20)


def test_no_length_is_below_one() -> None:
    assert min(drawn("normal:1:50")) == 1
    assert set(drawn("geometric:1")) == {1}


@pytest.mark.parametrize(
    "word",
    [
        "",
        "x",
        "0",
        "5-3",
        "0-3",
        "1:2",
        "geometric",
        "geometric:0.5",
        "geometric:nan",
        "geometric:9:3-x",
        "geometric:9:5-3",
        "normal:5",
        "normal:5:-1",
        "lognormal:5:inf",
        "zipf:3",
    ],
)
def test_what_is_no_distribution_is_refused_with_the_right_forms(word: str) -> None:
    with pytest.raises(WorkloadError, match="use 128, 16-128"):
        Lengths(word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("x", "'x' is no whole number"),
        ("3-y", "'y' is no whole number"),
        ("normal:5:z", "'z' is no number"),
        ("5-3", "the smaller one comes first"),
    ],
)
def test_what_is_wrong_with_a_distribution_is_said(word: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        Lengths(word)


def test_the_same_number_is_the_same_conversation_whatever_was_made_before() -> None:
    assert made().conversation(7) == made().conversation(7)
    assert made().conversation(7) != made().conversation(8)
    assert made(seed=1).conversation(7) != made(seed=2).conversation(7)


def test_prompts_are_ids_of_the_vocabulary_and_of_the_drawn_lengths() -> None:
    for number in range(50):
        (turn,) = made().conversation(number).turns
        assert isinstance(turn.prompt, tuple)
        assert 3 <= len(turn.prompt) <= 6
        assert all(3 <= token_id < 50 for token_id in turn.prompt)


def test_without_a_vocabulary_prompts_are_texts() -> None:
    workload = made(vocabulary_size=None, prompt_len=Lengths("5"))
    (turn,) = workload.conversation(0).turns
    assert isinstance(turn.prompt, str)
    assert len(turn.prompt.split()) == 5
    assert workload.is_text


def test_shared_beginnings_are_used_in_turn() -> None:
    workload = made(shared_prefix_len=8, num_prefixes=2)
    starts = [workload.conversation(number).turns[0].prompt[:8] for number in range(4)]
    assert starts[0] == starts[2] != starts[1] == starts[3]
    assert len(workload.conversation(0).turns[0].prompt) >= 11


def test_conversations_have_as_many_turns_as_asked_for_and_share_the_prefix_once() -> None:
    workload = made(num_turns=3, shared_prefix_len=8, prompt_len=Lengths("4"))
    assert [len(turn.prompt) for turn in workload.conversation(0).turns] == [12, 4, 4]
    assert workload.has_several_turns


@pytest.mark.parametrize(
    "options", [{"num_turns": 0}, {"num_prefixes": 0}, {"shared_prefix_len": -1}, {"vocabulary_size": 3}]
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(WorkloadError):
        made(**options)


def test_a_workload_begins_again_behind_its_last_conversation() -> None:
    workload = made()
    small = Workload("small", 3, workload.make)
    assert small.conversation(4) == small.conversation(1)


def test_parts_of_a_prompt_are_joined_as_what_they_are() -> None:
    assert joined((1, 2), (3,)) == (1, 2, 3)
    assert joined("a b", "c") == "a b c"
    assert joined("", "c") == "c"
    with pytest.raises(TypeError):
        joined("a", (1,))


def test_a_warm_up_prompt_shares_no_beginning_with_the_workload() -> None:
    workload = made(prompt_len=Lengths("6"))
    prompt = workload.conversation(0).turns[0].prompt
    assert warm_up_turn(workload, 0, 9) == Turn(prompt[::-1], 9)
    texts = made(vocabulary_size=None)
    (turn,) = texts.conversation(0).turns
    assert isinstance(turn.prompt, str)
    assert warm_up_turn(texts, 0, 9).prompt == " ".join(turn.prompt.split()[::-1])
