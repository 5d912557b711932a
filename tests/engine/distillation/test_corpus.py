from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import headrace.engine.distillation.corpus as corpus_module
from headrace.engine import ConfigError, DraftingFailed
from headrace.engine.distillation.corpus import Corpus, Example, Examples, Piece


def piece(*sequences: tuple[int, ...]) -> Piece:
    token_ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
    return Piece(token_ids, token_ids[:, None].float(), tuple(map(len, sequences)))


def ids_of(examples: list[Example]) -> list[tuple[int, ...]]:
    return [tuple(example.token_ids.tolist()) for example in examples]


def filled(folder: Path, *pieces: Piece) -> Corpus:
    corpus = Corpus(folder)
    for each in pieces:
        corpus.add(each)
    return corpus


def of_lengths(folder: Path, *lengths: int) -> Corpus:
    """Sequences of these lengths, each of one token alone, its place."""
    return filled(folder, piece(*((place,) * length for place, length in enumerate(lengths))))


def test_pieces_come_back_in_order_as_they_were(tmp_path: Path) -> None:
    first, second = piece((1, 2), (3,)), piece((4, 5, 6))
    corpus = filled(tmp_path, first, second)
    assert (corpus.num_pieces, corpus.num_tokens) == (2, 6)
    for found, wanted in zip(corpus.read(), (first, second), strict=True):
        assert found.lengths == wanted.lengths
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.hidden, wanted.hidden)


def test_numbers_go_on_where_they_ended(tmp_path: Path) -> None:
    filled(tmp_path, piece((1, 2)))
    corpus = filled(tmp_path, piece((3, 4)))
    assert [found.token_ids.tolist() for found in corpus.read()] == [[1, 2], [3, 4]]


def test_a_piece_that_was_broken_off_is_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = filled(tmp_path, piece((1, 2)))

    def broken_off(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a pie")
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "save_file", broken_off)
    with pytest.raises(KeyboardInterrupt):
        corpus.add(piece((3, 4)))
    monkeypatch.setattr(corpus_module, "save_file", save_file)
    assert (corpus.num_pieces, corpus.num_tokens) == (1, 2)
    corpus.add(piece((5, 6)))
    assert [found.token_ids.tolist() for found in corpus.read()] == [[1, 2], [5, 6]]


@pytest.mark.parametrize("content", [b"", b"no piece at all"])
def test_a_damaged_piece_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    corpus = filled(tmp_path, piece((1, 2)), piece((3, 4)))
    (tmp_path / "piece-00001.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"piece-00001\.safetensors is damaged .* delete it"):
        list(corpus.read())
    with pytest.raises(ConfigError, match="is damaged"):
        _ = corpus.num_tokens


def test_without_room_the_pieces_that_are_there_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = filled(tmp_path, piece((1, 2)))

    def without_room(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a pie")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus_module, "save_file", without_room)
    with pytest.raises(DraftingFailed, match="No space left"):
        corpus.add(piece((3, 4)))
    assert [path.name for path in tmp_path.iterdir()] == ["piece-00000.safetensors"]


def test_every_text_is_learnt_or_held_back_and_no_single_token_is_an_example(tmp_path: Path) -> None:
    corpus = filled(tmp_path, piece((1, 2), (9,), (3, 4)), piece((5, 6), (7, 8)))
    examples = Examples(corpus, held_back=0.25)
    learnt, held_back = ids_of(examples.learnt), ids_of(examples.held_back)
    assert sorted(learnt + held_back) == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert learnt
    assert held_back
    for example in (*examples.learnt, *examples.held_back):
        assert example.hidden.flatten().tolist() == example.token_ids.tolist()


def test_about_the_share_that_is_asked_for_is_held_back(tmp_path: Path) -> None:
    corpus = filled(tmp_path, piece(*((first, second) for first in range(50) for second in range(40))))
    assert 60 <= len(Examples(corpus, held_back=0.05).held_back) <= 140


def test_what_is_held_back_is_never_learnt_though_it_be_there_twice(tmp_path: Path) -> None:
    corpus = filled(tmp_path, piece((7, 8), (1, 2), (1, 2), (7, 8)))
    examples = Examples(corpus)
    assert set(ids_of(examples.learnt)).isdisjoint(ids_of(examples.held_back))
    assert sorted(map(len, (examples.learnt, examples.held_back))) == [2, 2]
    learnt = {ids for group in examples.batches(8, 0) for ids in ids_of(group)}
    assert learnt == set(ids_of(examples.learnt))


def test_with_more_text_nothing_changes_sides(tmp_path: Path) -> None:
    texts = [(first, second) for first in range(50) for second in range(8)]
    corpus = filled(tmp_path, piece(*texts[:200]))
    before = Examples(corpus)
    corpus.add(piece(*texts[200:]))
    after = Examples(corpus)
    assert len(after.held_back) > len(before.held_back)
    assert set(ids_of(before.held_back)) <= set(ids_of(after.held_back))
    assert set(ids_of(before.learnt)) <= set(ids_of(after.learnt))


@pytest.mark.parametrize("sequences", [[], [(1,)], [(1, 2)], [(1, 2), (3,)], [(1, 2), (1, 2)]])
def test_too_little_to_learn_and_judge_is_refused(tmp_path: Path, sequences: list[tuple[int, ...]]) -> None:
    corpus = filled(tmp_path, *map(piece, sequences))
    with pytest.raises(ConfigError, match="give it more text"):
        Examples(corpus)


def divided(
    folder: Path, learnt: tuple[tuple[int, ...], ...], held_back: tuple[tuple[int, ...], ...]
) -> Examples:
    """Sequences on the side that is asked for, whatever their lots."""
    examples = Examples(filled(folder, piece(*learnt, *held_back)))
    every = {tuple(e.token_ids.tolist()): e for e in (*examples.learnt, *examples.held_back)}
    examples.learnt, examples.held_back = ([every[ids] for ids in side] for side in (learnt, held_back))
    return examples


def test_the_most_frequent_tokens_of_what_is_learnt(tmp_path: Path) -> None:
    examples = divided(tmp_path, ((5, 5, 5), (3, 3), (8, 8, 8, 8, 1)), ((4, 4, 4, 4, 4, 4),))
    assert examples.most_frequent(3).tolist() == [3, 5, 8]
    assert examples.most_frequent(99).tolist() == [1, 3, 5, 8]


def test_some_tokens_are_among_the_most_frequent_whatever_the_text_holds(tmp_path: Path) -> None:
    examples = divided(tmp_path, ((5, 5, 5), (3, 3), (8, 8, 8, 8, 1)), ((4, 4, 4, 4, 4, 4),))
    assert examples.most_frequent(3, always=(30, 1)).tolist() == [1, 8, 30]
    assert examples.most_frequent(1, always=(30, 2)).tolist() == [2, 30]
    assert examples.most_frequent(99, always=(30, 5)).tolist() == [1, 3, 5, 8, 30]


def test_the_share_of_unseen_text_that_a_vocabulary_holds(tmp_path: Path) -> None:
    examples = divided(tmp_path, ((5, 5, 5), (3, 3)), ((1, 2, 2, 7),))
    assert examples.share_of(torch.tensor([1, 2, 3])) == 0.75


@pytest.mark.parametrize("num_tokens", [40, 64, 1000])
def test_each_pass_holds_every_example_once_within_the_bound(tmp_path: Path, num_tokens: int) -> None:
    # More of them than are sorted at once.
    examples = Examples(of_lengths(tmp_path, *(2 + place * 7 % 39 for place in range(1200))))
    for epoch_seed in (0, 1):
        groups = list(examples.batches(num_tokens, epoch_seed))
        seen = Counter(ids for group in groups for ids in ids_of(group))
        assert seen == Counter(ids_of(examples.learnt))
        padded = [len(group) * max(len(example.token_ids) for example in group) for group in groups]
        assert max(padded) <= num_tokens
        assert sum(padded) < 1.4 * sum(len(example.token_ids) for example in examples.learnt)


def test_passes_differ_by_their_seed_and_by_nothing_else(tmp_path: Path) -> None:
    corpus = of_lengths(tmp_path, *([4, 6] * 40))

    def order(seed: int) -> list[list[tuple[int, ...]]]:
        return [ids_of(group) for group in Examples(corpus).batches(12, seed)]

    assert order(3) == order(3)
    assert order(3) != order(4)
