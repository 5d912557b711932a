from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace.engine.distillation.training as training_module
from headrace.engine import ConfigError, DistillationSettings, DraftingFailed
from headrace.engine.distillation.corpus import Corpus, Example, Examples, Piece
from headrace.engine.distillation.student import Student
from headrace.engine.distillation.training import Judgement, Lesson, Training
from tests.support.distillation import (
    RecordedProgress,
    drawn_sequences,
    taught_corpus,
    tick_while_learning,
    tiny_settings,
)
from tests.support.tiny_models import write_tiny_family, write_tiny_llama


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick_while_learning(monkeypatch)


class Bench:
    """What a training needs, made anew as a new process would."""

    def __init__(self, folder: Path, variant: str = "llama", **settings: object) -> None:
        self.target = write_tiny_family(folder / "target", variant, num_hidden_layers=3)
        # The same few texts, so that there is something to learn.
        sequences = drawn_sequences([20] * 12) * 5 + drawn_sequences([20] * 3, seed=1)
        self.examples = taught_corpus(self.target, folder / "work", sequences)
        self.settings = tiny_settings(self.target, folder / "draft", **{"training_s": 40.0, **settings})
        self.checkpoint = folder / "work" / "checkpoint.pt"

    def begin(self, settings: DistillationSettings | None = None) -> tuple[Student, Training]:
        student = Student(self.target, 1)
        vocabulary = self.examples.most_frequent(512)
        settings = settings or self.settings
        return student, Training(student, self.examples, settings, self.checkpoint, vocabulary)


def assert_equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0)


def changed(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, other[name]) for name, tensor in state.items())


def test_a_lesson_is_padded_on_the_right() -> None:
    examples = [Example(torch.arange(n), torch.ones(n, 4)) for n in (2, 3)]
    lesson = Lesson(examples)
    assert lesson.token_ids.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert lesson.mask.tolist() == [[True, True, False], [True, True, True]]
    assert lesson.hidden.shape == (2, 3, 4)


@pytest.mark.parametrize("variant", ["llama", "granite"])
def test_it_learns_to_say_what_the_target_says(tmp_path: Path, variant: str) -> None:
    bench = Bench(tmp_path, variant, training_s=200.0, learning_rate=3e-3)
    # Judged by what is learnt: what random weights say of other text can't be foreseen.
    bench.examples.held_back = bench.examples.learnt[:5]
    _, training = bench.begin()
    before = training.judge()
    progress = RecordedProgress()
    training.run(progress)
    after = training.judge()
    assert after.same_token > before.same_token + 0.2
    assert 1 - after.overlap < 0.7 * (1 - before.overlap)
    losses = [float(note.split("loss ")[1].split(";")[0]) for note in progress.notes]
    assert len(losses) > 5
    # The target's own uncertainty is a part of the loss that can't be learnt away: for some, most of it.
    assert losses[-1] < losses[0]


def test_progress_goes_up_to_the_whole_time(tmp_path: Path) -> None:
    _, training = Bench(tmp_path).begin()
    progress = RecordedProgress()
    training.run(progress)
    done = [done for _, done, _ in progress.told]
    assert done == sorted(done)
    assert progress.told[-1] == ("learning", 40, 40)
    assert training.num_updates == len(done)


def test_a_judge_finds_the_target_like_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    student, training = bench.begin()
    for example in bench.examples.held_back:
        example.hidden.copy_(
            student.hidden(example.token_ids[None], torch.ones(1, 20, dtype=torch.bool))[0].detach()
        )
    judged = training.judge()
    # Nothing but rounding to bfloat16 lies between them.
    assert judged.same_token > 0.9
    assert judged.overlap > 0.95


def test_embedding_and_head_stay(tmp_path: Path) -> None:
    student, training = Bench(tmp_path).begin()
    before = {name: tensor.clone() for name, tensor in student.model.state_dict().items()}
    training.run(RecordedProgress())
    after = student.model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_state_is_gone_on_with_as_it_was_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    student, training = bench.begin()
    training.run(RecordedProgress())
    again, restored = bench.begin()
    assert_equal(again.state(), student.state())
    assert restored.num_updates == training.num_updates > 10
    # The time is over, so nothing more is learnt, and nothing is told of it.
    progress = RecordedProgress()
    restored.run(progress)
    assert_equal(again.state(), student.state())
    assert progress.told == []
    assert progress.notes == []


def learnt_batches(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Collects the ids of every batch that is learnt from here on."""
    batches: list[list[list[int]]] = []

    class Watched(Lesson):
        def __init__(self, examples: list[Example]) -> None:
            super().__init__(examples)
            if len(examples) > 1:
                batches.append(self.token_ids.tolist())

    monkeypatch.setattr(training_module, "Lesson", Watched)
    return batches


def test_broken_off_it_goes_on_as_if_it_had_not_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So much time that its end has no say in the pace yet.
    whole, halves = (Bench(tmp_path / name, training_s=1e9) for name in ("whole", "halves"))
    batches = learnt_batches(monkeypatch)
    at_once, training = whole.begin()
    with pytest.raises(KeyboardInterrupt):
        training.run(RecordedProgress(breaks_at=("learning", 14)))
    wanted = batches.copy()
    batches.clear()

    student, training = halves.begin()
    with pytest.raises(KeyboardInterrupt):
        training.run(RecordedProgress(breaks_at=("learning", 7)))
    left = student.state()
    student, training = halves.begin()
    assert_equal(student.state(), left)
    assert training.num_updates == 7
    with pytest.raises(KeyboardInterrupt):
        training.run(RecordedProgress(breaks_at=("learning", 7)))
    assert training.num_updates == 14
    assert batches == wanted
    for name, tensor in student.state().items():
        torch.testing.assert_close(tensor, at_once.state()[name], rtol=1e-3, atol=1e-4)


def test_what_knew_unseen_text_best_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    student, training = bench.begin()
    seen: list[dict[str, Tensor]] = []

    def judge(of: Training) -> Judgement:
        # The third look is the best one, whatever comes later.
        seen.append(student.state())
        return Judgement(0.5, {3: 0.9}.get(len(seen), 0.001 * len(seen)))

    monkeypatch.setattr(Training, "judge", judge)
    training.run(RecordedProgress())
    assert len(seen) > 3
    assert_equal(student.state(), seen[2])
    assert changed(seen[2], seen[-1])

    best, num_looks = seen[2], len(seen)
    student, training = bench.begin(replace(bench.settings, training_s=80.0))
    assert_equal(student.state(), seen[num_looks - 1])
    training.run(RecordedProgress())
    assert len(seen) > num_looks
    assert_equal(student.state(), best)


def test_more_time_may_be_given(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    _, training = bench.begin()
    training.run(RecordedProgress())
    student, longer = bench.begin(replace(bench.settings, training_s=80.0))
    before = student.state()
    longer.run(RecordedProgress())
    assert longer.num_updates > training.num_updates
    assert changed(student.state(), before)


def test_what_goes_astray_is_not_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    _, training = bench.begin()
    training.run(RecordedProgress())
    sound = bench.checkpoint.read_bytes()
    astray = replace(bench.settings, training_s=100.0, learning_rate=1e30)
    _, training = bench.begin(astray)
    with pytest.raises(DraftingFailed, match=r"no finite number .* learning rate below 1e\+30"):
        training.run(RecordedProgress())
    assert bench.checkpoint.read_bytes() == sound
    # As it says: at another rate it goes on.
    _, training = bench.begin(replace(astray, learning_rate=1e-3))
    training.run(RecordedProgress())


def test_a_teacher_without_finite_states_is_no_teacher(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.examples.held_back[0].hidden.fill_(float("nan"))
    with pytest.raises(DraftingFailed, match="no finite number"):
        bench.begin()[1].judge()
    for example in bench.examples.learnt:
        example.hidden.fill_(float("nan"))
    student, training = bench.begin()
    before = student.state()
    with pytest.raises(DraftingFailed, match="after 0 updates the loss is no finite number"):
        training.run(RecordedProgress())
    assert_equal(student.state(), before)
    assert not bench.checkpoint.exists()


@pytest.mark.parametrize("state", [b"no state", b"", b"PK\x03\x04 nor this"])
def test_a_damaged_state_is_told_with_what_to_do(tmp_path: Path, state: bytes) -> None:
    bench = Bench(tmp_path)
    bench.checkpoint.write_bytes(state)
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is no state .*, or is damaged: delete it"):
        bench.begin()


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin()[1].run(RecordedProgress())
    bench.target = write_tiny_llama(tmp_path / "other", num_hidden_layers=3, intermediate_size=96)
    with pytest.raises(ConfigError, match="is no state of this draft model"):
        bench.begin()


@pytest.mark.parametrize("abilities", [{}, {"avx512_bf16": True}])
@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16])
def test_any_machine_goes_on_with_any_other_ones_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abilities: dict[str, bool], kept_as: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    bench = Bench(tmp_path, training_s=12.0)
    corpus = Corpus(tmp_path / "other work")
    for piece in Corpus(tmp_path / "work").read():
        corpus.add(Piece(piece.token_ids, piece.hidden.to(kept_as), piece.lengths))
    bench.examples = Examples(corpus)
    student, training = bench.begin()
    before = student.state()
    training.run(RecordedProgress())
    assert changed(student.state(), before)
    assert all(tensor.dtype is torch.float32 for tensor in student.state().values())
    assert 0 < training.judge().overlap <= 1
