import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.stop_strings import StopStrings


def run(
    pieces: list[str], stops: tuple[str, ...], *, is_included: bool = False
) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, is_included=is_included)
    deltas = []
    for piece in pieces:
        delta, matched = watcher.push(piece)
        deltas.append(delta)
        if matched is not None:
            return deltas, matched
    deltas.append(watcher.flush())
    return deltas, None


def first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """By definition: the shortest beginning of the text that ends with a stop, and the longest such stop."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["hello world"], ("wor",), "hello ", "wor"),
        (["hel", "lo w", "orld"], ("lo wor",), "hel", "lo wor"),
        (["a", "a", "a", "b"], ("aab",), "a", "aab"),
        (["abcde"], ("abcde", "bcd"), "a", "bcd"),
        (["ab", "c"], ("bc", "abc"), "", "abc"),
        (["日本", "語🦀", "です"], ("語🦀で",), "日本", "語🦀で"),
        (["whole"], ("whole",), "", "whole"),
        (["ends in a half ma"], ("match",), "ends in a half ma", None),
        (["END"], ("end",), "END", None),
    ],
)
def test_the_text_ends_at_the_stop_that_ends_first(pieces, stops, text, matched):
    deltas, found = run(pieces, stops)
    assert ("".join(deltas), found) == (text, matched)
    included, _ = run(pieces, stops, is_included=True)
    assert "".join(included) == text + (matched or "")


def test_no_more_is_held_back_than_may_become_a_stop():
    watcher = StopStrings(("STOP",))
    assert watcher.push("text S") == ("text ", None)
    assert watcher.push("T") == ("", None)
    assert watcher.push("x") == ("STx", None)
    assert watcher.push("y") == ("y", None)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.data(),
)
def test_the_cuts_between_pieces_never_matter(text, stops, is_included, data):
    pieces, rest = [], text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    deltas, matched = run(pieces, stops, is_included=is_included)
    found = first_end(text, stops)
    if found is None:
        assert ("".join(deltas), matched) == (text, None)
    else:
        end, stop = found
        assert matched == stop
        assert "".join(deltas) == text[: end if is_included else end - len(stop)]


def test_a_stop_that_ends_while_it_does_not_count_is_passed_over():
    watcher = StopStrings(("ab",))
    assert watcher.pass_over("xab") == "xab"
    assert watcher.pass_over("a") == ""
    assert watcher.push("b") == ("", "ab")
