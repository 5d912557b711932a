from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.clients.bench_dataset import read_workload
from headrace.clients.bench_workload import Conversation, Lengths, Turn, WorkloadError

IDS = {"prompt_token_ids": [5, 6, 7], "output_len": 4}


def written(folder: Path, name: str, content: object) -> Path:
    """A file; what is no text is written as JSON."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_requests_of_a_json_file_are_conversations_of_one_turn(tmp_path: Path) -> None:
    path = written(tmp_path, "w.json", {"name": "mix", "w2": {}, "requests": [IDS, {**IDS, "output_len": 9}]})
    workload = read_workload(path)
    assert (workload.name, workload.size, workload.has_arrivals) == ("mix", 2, False)
    assert workload.conversation(1) == Conversation((Turn((5, 6, 7), 9),))


def test_arrivals_and_turns_are_read(tmp_path: Path) -> None:
    request = {
        "arrival_s": 1.5,
        "turns": [{"prompt": "a", "output_len": 1}, {"prompt": "b", "output_len": 2}],
    }
    workload = read_workload(written(tmp_path, "w.json", {"requests": [request]}))
    assert workload.conversation(0) == Conversation((Turn("a", 1), Turn("b", 2)), 1.5)
    assert workload.has_arrivals
    assert workload.has_several_turns


def test_lines_of_json(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, "w.jsonl", f"{json.dumps(IDS)}\n\n{json.dumps(IDS)}\n"))
    assert workload.size == 2


def test_lines_of_text_take_their_lengths_from_outside(tmp_path: Path) -> None:
    path = written(tmp_path, "w.txt", "What is a mill?\n\n  Why?  \n")
    workload = read_workload(path, Lengths("2-9"), seed=3)
    first, second = (workload.conversation(number).turns[0] for number in range(2))
    assert (first.prompt, second.prompt) == ("What is a mill?", "Why?")
    assert read_workload(path, Lengths("2-9"), seed=3).conversation(0).turns[0] == first
    assert 2 <= first.output_len <= 9


def test_lengths_from_outside_win_over_the_files_own(tmp_path: Path) -> None:
    path = written(tmp_path, "w.json", {"requests": [IDS]})
    assert read_workload(path, Lengths("77")).conversation(0).turns[0].output_len == 77


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.json", "{", r"w\.json: is no JSON"),
        ("w.json", "[]", 'no object with a list "requests"'),
        ("w.json", {"requests": {}}, 'no object with a list "requests"'),
        ("w.json", {"requests": []}, "holds no prompt"),
        ("w.json", {"requests": [IDS, 5]}, r"requests\[1\]: is 5"),
        ("w.json", {"requests": [{"output_len": 4}]}, r"requests\[0\]: needs either .* has neither"),
        ("w.json", {"requests": [{**IDS, "prompt": "x"}]}, "has prompt_token_ids and prompt"),
        ("w.json", {"requests": [{"prompt_token_ids": [1]}]}, "output_len is missing"),
        ("w.json", {"requests": [{**IDS, "output_len": 0}]}, "output_len is 0"),
        ("w.json", {"requests": [{**IDS, "output_len": True}]}, "output_len is True"),
        ("w.json", {"requests": [{**IDS, "output_len": 2.5}]}, r"output_len is 2\.5"),
        ("w.json", {"requests": [{**IDS, "prompt_token_ids": []}]}, "prompt_token_ids: is"),
        ("w.json", {"requests": [{**IDS, "prompt_token_ids": [1, -2]}]}, "list of token ids"),
        ("w.json", {"requests": [{**IDS, "prompt_token_ids": [1, 2**32]}]}, "list of token ids"),
        ("w.json", {"requests": [{**IDS, "prompt_token_ids": [True]}]}, "list of token ids"),
        ("w.json", {"requests": [{"prompt": "", "output_len": 1}]}, "not empty"),
        ("w.json", {"requests": [IDS, {"prompt": "x", "output_len": 1}]}, "texts and token ids"),
        ("w.json", {"requests": [IDS, {**IDS, "arrival_s": 0}]}, "1 of 2 requests have arrival_s"),
        ("w.json", {"requests": [{**IDS, "arrival_s": -1}]}, "arrival_s is -1"),
        ("w.json", {"requests": [{**IDS, "arrival_s": "now"}]}, "arrival_s is 'now'"),
        ("w.json", {"requests": [{"turns": []}]}, "at least one request"),
        ("w.json", {"requests": [{"turns": [IDS, {"prompt_token_ids": [1]}]}]}, r"turns\[1\]: output_len"),
        ("w.jsonl", f"{json.dumps(IDS)}\nnonsense\n", r"w\.jsonl:2: is no JSON"),
        ("w.txt", "\n \n", "output_len|holds no prompt"),
        ("w.txt", "one\n", r"w\.txt:1: output_len is missing: give it there, or with --output-len"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_what_would_be_right(
    tmp_path: Path, name: str, content: object, said: str
) -> None:
    with pytest.raises(WorkloadError, match=said):
        read_workload(written(tmp_path, name, content))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.json: can't be read: No such file or directory$"):
        read_workload(tmp_path / "none.json")
    path = tmp_path / "w.json"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(WorkloadError, match="can't be read as text"):
        read_workload(path)
