import pytest

from headrace.engine.errors import TextFailed
from headrace.engine.sequence import OutputParams, StopConditions
from headrace.engine.text import OutputText
from tests.support.fake_runner import BOS, EOS, FakeTokenizer
from tests.support.faults import Panic

TEXT = "one 🦀 two, naïve. END more"


def run(token_ids, stop, output=None):
    """(text, matched stop, ids taken in)."""
    text = OutputText(FakeTokenizer(), output or OutputParams(), stop)
    told, matched, num_taken = "", None, 0
    for token_id in token_ids:
        delta, matched = text.push(token_id)
        told += delta
        num_taken += 1
        if matched is not None:
            break
    return told + text.flush(), matched, num_taken


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12])
def test_every_piece_of_a_text_works_as_a_stop(length):
    token_ids = list(TEXT.encode())
    for start in range(len(TEXT) - length + 1):
        stop = TEXT[start : start + length]
        before = TEXT.partition(stop)[0]
        told, matched, num_taken = run(token_ids, StopConditions(strings=(stop,)))
        assert (told, matched) == (before, stop)
        assert num_taken == len((before + stop).encode()), "went on past the stop, or ended before it"
        told, _, _ = run(token_ids, StopConditions(strings=(stop,), is_stop_included=True))
        assert told == before + stop


def test_a_half_match_at_the_end_is_told():
    told, matched, _ = run(b"some EN", StopConditions(strings=("END",)))
    assert (told, matched) == ("some EN", None)


def test_stop_strings_work_when_no_text_is_wanted():
    told, matched, num_taken = run(
        TEXT.encode(), StopConditions(strings=("two",)), OutputParams(wants_text=False)
    )
    assert (told, matched) == ("", "two")
    assert num_taken == len("one 🦀 two".encode())


def test_no_text_is_made_when_nobody_needs_it():
    class Untouchable(FakeTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=True):
            raise AssertionError("decoded for nobody")

    text = OutputText(Untouchable(), OutputParams(wants_text=False), StopConditions())
    assert text.push(65) == ("", None)
    assert text.flush() == ""


@pytest.mark.parametrize(
    ("is_included", "skip", "told"), [(False, False, "ab"), (True, False, "ab</s>"), (True, True, "ab")]
)
def test_the_ending_id_s_text_is_left_out_unless_it_is_to_be_left_in(is_included, skip, told):
    output = OutputParams(skip_special_tokens=skip)
    text = OutputText(FakeTokenizer(), output, StopConditions(is_stop_included=is_included))
    pieces = [text.push(token_id)[0] for token_id in b"ab"]
    pieces += [text.end_with(EOS), text.flush()]
    assert "".join(pieces) == told


def test_a_stop_is_found_in_special_text_when_that_is_shown():
    ids = [*b"ab", BOS, *b"cd"]
    shown = OutputParams(skip_special_tokens=False)
    assert run(ids, StopConditions(strings=("<s>",)), shown)[:2] == ("ab", "<s>")
    assert run(ids, StopConditions(strings=("<s>",)))[:2] == ("abcd", None)


class BrokenTokenizer(FakeTokenizer):
    """Breaks over the id 66 by what it is given."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self._fault = fault

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes | None:
        if token_id == 66:
            raise self._fault
        return super().token_bytes(token_id, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("fault", [RuntimeError("tell-nobody"), Panic("tell-nobody")])
def test_a_tokenizer_that_breaks_is_told_as_the_fault_of_one_text(fault: BaseException) -> None:
    text = OutputText(BrokenTokenizer(fault), OutputParams(), StopConditions())
    assert text.push(65)[0] == "A"
    with pytest.raises(TextFailed) as told:
        text.push(66)
    assert "tell-nobody" not in str(told.value)
    with pytest.raises(TextFailed):
        text.echo((65, 66))


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit()])
def test_who_interrupts_is_no_broken_tokenizer(fault: BaseException) -> None:
    text = OutputText(BrokenTokenizer(fault), OutputParams(), StopConditions())
    with pytest.raises(type(fault)):
        text.push(66)
