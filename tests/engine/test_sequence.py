import pytest

from headrace.engine.errors import InvalidTransition
from headrace.engine.sequence import SequenceStatus
from tests.support.requests import make_request
from tests.support.sequences import make_sequence

LEGAL = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.WAITING, SequenceStatus.PAUSED),
    (SequenceStatus.RUNNING, SequenceStatus.PAUSED),
    (SequenceStatus.PAUSED, SequenceStatus.WAITING),
    (SequenceStatus.PAUSED, SequenceStatus.FINISHED),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
}


@pytest.mark.parametrize("old", list(SequenceStatus))
@pytest.mark.parametrize("new", list(SequenceStatus))
def test_only_the_edges_of_the_table_can_be_taken(old, new):
    sequence = make_sequence()
    sequence.status = old
    if (old, new) in LEGAL:
        sequence.transition(new)
        assert sequence.status is new
    else:
        with pytest.raises(InvalidTransition, match=f"{old.name} -> {new.name}"):
            sequence.transition(new)
        assert sequence.status is old


def test_the_phase_is_a_question_of_numbers():
    sequence = make_sequence(prompt_len=3)
    assert (sequence.num_new_tokens, sequence.is_decoding) == (3, False)
    sequence.num_computed_tokens = 2
    assert (sequence.num_new_tokens, sequence.is_decoding) == (1, False), "the last prompt token is no decode"
    sequence.num_computed_tokens = 3
    sequence.token_ids.append(7)
    assert (sequence.num_new_tokens, sequence.is_decoding, sequence.num_output_tokens) == (1, True, 1)


@pytest.mark.parametrize(
    ("limit_s", "deadline_s", "expires_s"),
    [(None, None, None), (2.0, None, 12.0), (None, 11.0, 11.0), (2.0, 11.0, 11.0), (2.0, 15.0, 12.0)],
)
def test_it_expires_at_the_first_of_its_limits(limit_s, deadline_s, expires_s):
    sequence = make_sequence()
    sequence.request = make_request(time_limit_s=limit_s, deadline_s=deadline_s)
    sequence.arrival_s = 10.0
    assert sequence.expires_s == expires_s
