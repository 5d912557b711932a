from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import headrace.engine.distillation.corpus as corpus_module
from headrace.engine import (
    CacheConfig,
    ConfigError,
    DistillationSettings,
    DraftingFailed,
    EngineConfig,
    ModelConfig,
    ModelLoadError,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
)
from headrace.engine.distillation.corpus import Corpus, Examples
from headrace.engine.distillation.distil import distil
from headrace.engine.distillation.writing import Writer
from headrace.engine.models.loader import read_spec
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE, read_reduced_head
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.runner.loading import load
from tests.support.distillation import RecordedProgress, tick_while_learning, tiny_settings
from tests.support.tiny_models import CORPUS, write_tiny_family

TEXT = "\n".join(f"{number}. {line}" for number in range(9) for line in CORPUS)


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick_while_learning(monkeypatch)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_family(tmp_path / "target", "llama", num_hidden_layers=3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def texts_of(settings: DistillationSettings) -> list[tuple[int, ...]]:
    """All that is gathered, piece after piece."""
    pieces = Corpus(settings.output / "distillation").read()
    return [
        tuple(ids.tolist()) for piece in pieces for ids in piece.token_ids.long().split(list(piece.lengths))
    ]


def answers(target: Path, speculation: SpeculationConfig) -> tuple[list[tuple[int, ...]], int]:
    """Greedy ones, and how many drafts were proposed for them."""
    config = EngineConfig(
        model=ModelConfig(target, dtype="float32"),
        cache=CacheConfig(block_size=16, memory_bytes=2**24),
        scheduler=SchedulerConfig(max_num_seqs=4),
        speculation=speculation,
    )
    model = load(config)
    try:
        writer = Writer(model, config, seed=0)
        prompts = [(1, 100, 200), (50,), tuple(range(60, 90))]
        said = writer.greedy_answers(prompts, 40)
        return said, sum(writer.core.load.totals.speculation.drafted_by_place)
    finally:
        model.runner.close()


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_a_target_makes_its_draft_model_from_nothing(tmp_path: Path, variant: str) -> None:
    others = {} if variant == "gemma3" else {"num_hidden_layers": 3}
    target = write_tiny_family(tmp_path / "target", variant, **others)
    settings = tiny_settings(target, tmp_path / "draft")
    progress = RecordedProgress()
    report = distil(settings, progress)

    stages = list(dict.fromkeys(stage for stage, _, _ in progress.told))
    assert stages == ["gathering text", "learning", "measuring"]
    assert all(0 <= done <= total for _, done, total in progress.told)
    assert sum(map(len, texts_of(settings))) >= settings.num_corpus_tokens

    assert len(report.accepted_by_place) == 4
    assert all(0 <= share <= 1 for share in report.accepted_by_place)
    assert 1 <= report.mean_accepted_length <= 5
    assert report.plain_tokens_per_s > 0
    assert report.speed_up > 0
    weights = load_file(settings.output / "model.safetensors")
    assert report.num_parameters == sum(tensor.numel() for tensor in weights.values())
    written = json.loads((settings.output / "report.json").read_text())
    assert written["accepted_by_place"] == [round(share, 4) for share in report.accepted_by_place]
    assert written["draft_weight_dtype"] == report.draft_weight_dtype

    # What it is for: the same answers, some of them drafted.
    drafting = SpeculationConfig(Speculation.DRAFT_MODEL, settings.output, num_speculative_tokens=3)
    plain, none = answers(target, SpeculationConfig())
    drafted, some = answers(target, drafting)
    assert drafted == plain
    assert some > none == 0


def test_it_proposes_so_many_tokens_as_are_asked_for_the_end_among_them(
    tmp_path: Path, target: Path, text: Path
) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,), draft_vocab_size=40)
    progress = RecordedProgress()
    report = distil(settings, progress)

    _, spec = read_spec(settings.output)
    head = read_reduced_head(settings.output, spec)
    assert head is not None
    assert len(head.token_ids) == 40
    assert load_tokenizer(target).eos_token_ids <= set(head.token_ids.tolist())
    assert 0.2 < report.vocabulary_share < 1.0
    assert f"it proposes 40 tokens, {report.vocabulary_share:.1%} of those of unseen text" in progress.notes
    assert json.loads((settings.output / "report.json").read_text())["vocabulary_share"] == pytest.approx(
        report.vocabulary_share, abs=1e-4
    )
    drafting = SpeculationConfig(Speculation.DRAFT_MODEL, settings.output, num_speculative_tokens=3)
    drafted, some = answers(target, drafting)
    assert drafted == answers(target, SpeculationConfig())[0]
    assert some > 0


def test_a_whole_head_replaces_a_reduced_one(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,), draft_vocab_size=40)
    distil(settings, RecordedProgress())
    shutil.rmtree(settings.output / "distillation")
    report = distil(replace(settings, draft_vocab_size=0), RecordedProgress())
    assert report.vocabulary_share == 1.0
    assert not (settings.output / REDUCED_HEAD_FILE).exists()


def test_text_from_files_is_learnt_in_their_order(tmp_path: Path, target: Path, text: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("Another mill stands further down. " * 5, encoding="utf-8")
    settings = tiny_settings(target, tmp_path / "draft", text=(text, other), num_corpus_tokens=10_000)
    progress = RecordedProgress()
    distil(settings, progress)
    tokenizer = load_tokenizer(target)
    wanted = []
    for path in (text, other):
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        wanted += [tuple(ids[start : start + 32]) for start in range(0, len(ids), 32)]
    assert texts_of(settings) == [ids for ids in wanted if len(ids) > 1]
    assert progress.notes[0].startswith("the text ends after ")


@pytest.mark.parametrize("is_written", [True, False])
def test_broken_off_at_any_stage_the_same_command_goes_on(
    tmp_path: Path, target: Path, text: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    monkeypatch.setattr("headrace.engine.distillation.distil.PIECE_TOKENS", 400)
    files = {} if is_written else {"text": (text,)}
    settings = tiny_settings(target, tmp_path / "draft", **files)
    num_kept = 0
    # In the first piece, in a later one, while it learns, while it is measured.
    for breaks_at in (("gathering text", 2), ("gathering text", 20), ("learning", 3), ("measuring", 2)):
        with pytest.raises(KeyboardInterrupt):
            distil(settings, RecordedProgress(breaks_at))
        texts = texts_of(settings)
        assert len(texts) >= num_kept
        num_kept = len(texts)
    kept = texts_of(settings)
    progress = RecordedProgress()
    report = distil(settings, progress)
    assert texts_of(settings) == kept
    assert {stage for stage, _, _ in progress.told} == {"measuring"}
    assert report.num_parameters > 0
    # What was made up behind a piece isn't made up again, nor is any file's text read twice.
    long = [ids for ids in kept if len(ids) == 32]
    assert len(set(long)) == len(long) > 10


def test_what_is_finished_may_learn_for_longer(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    distil(settings, RecordedProgress())
    first = (settings.output / "model.safetensors").read_bytes()
    progress = RecordedProgress()
    distil(replace(settings, training_s=24.0, learning_rate=2e-3), progress)
    assert {stage for stage, _, _ in progress.told} == {"learning", "measuring"}
    assert (settings.output / "model.safetensors").read_bytes() != first


def test_what_is_finished_may_learn_from_more_text(tmp_path: Path, target: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft")
    distil(settings, RecordedProgress())
    before = texts_of(settings)
    progress = RecordedProgress()
    more = replace(settings, num_corpus_tokens=2 * sum(map(len, before)), training_s=2 * settings.training_s)
    distil(more, progress)
    after = texts_of(settings)
    assert after[: len(before)] == before
    assert sum(map(len, after)) >= more.num_corpus_tokens
    stages = list(dict.fromkeys(stage for stage, _, _ in progress.told))
    assert stages == ["gathering text", "learning", "measuring"]


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", 2), ("seed", 1), ("draft_vocab_size", 99), ("batch_tokens", 64)]
)
def test_work_of_other_settings_is_left_alone(tmp_path: Path, target: Path, name: str, value: Any) -> None:
    settings = tiny_settings(target, tmp_path / "draft")
    with pytest.raises(KeyboardInterrupt):
        distil(settings, RecordedProgress(("gathering text", 1)))
    with pytest.raises(ConfigError, match=f"begun with {name}=.* name another folder, or delete this one"):
        distil(replace(settings, **{name: value}), RecordedProgress())


def test_a_text_that_has_changed_is_another_text(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    with pytest.raises(KeyboardInterrupt):
        distil(settings, RecordedProgress(("gathering text", 1)))
    text.write_text(TEXT.replace("mill", "pump"), encoding="utf-8")
    with pytest.raises(ConfigError, match="begun with text_digests="):
        distil(settings, RecordedProgress())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "there is no text to learn from"),
        (b"mill", "give it more text"),
        (b"\xff\xfe", "can't be read as UTF-8 text"),
        (None, r"text\.txt can't be read"),
    ],
)
def test_text_that_is_none_is_refused(
    tmp_path: Path, target: Path, content: bytes | None, complaint: str
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        distil(tiny_settings(target, tmp_path / "draft", text=(text,)), RecordedProgress())


def test_no_smaller_model_is_refused_before_anything_is_written(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match="would be no smaller"):
        distil(tiny_settings(target, tmp_path / "draft", num_layers=3), RecordedProgress())
    assert not (tmp_path / "draft").exists()


def test_without_a_target_there_is_no_draft_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        distil(tiny_settings(tmp_path / "none", tmp_path / "draft"), RecordedProgress())


def test_no_other_model_is_overwritten(tmp_path: Path, target: Path) -> None:
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="no draft model made here: name another folder"):
        distil(tiny_settings(target, target), RecordedProgress())
    assert (target / "model.safetensors").read_bytes() == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, target: Path) -> None:
    (tmp_path / "draft").write_text("no folder")
    with pytest.raises(ConfigError, match="draft can't be made a folder"):
        distil(tiny_settings(target, tmp_path / "draft"), RecordedProgress())


@pytest.mark.parametrize("settings_file", [None, "{ half"])
def test_pieces_of_unknown_settings_are_not_gone_on_with(
    tmp_path: Path, target: Path, settings_file: str | None
) -> None:
    work = tmp_path / "draft" / "distillation"
    work.mkdir(parents=True)
    (work / "piece-00000.safetensors").write_bytes(b"whose?")
    if settings_file is not None:
        (work / "settings.json").write_text(settings_file)
    with pytest.raises(ConfigError, match=r"delete .*distillation|distillation holds .* delete it"):
        distil(tiny_settings(target, tmp_path / "draft"), RecordedProgress())


def test_two_do_not_work_in_one_folder(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    seen: list[str] = []

    class Second(RecordedProgress):
        """Begins the same once more while it is told of the first."""

        def __call__(self, stage: str, done: int, total: int) -> None:
            with pytest.raises(ConfigError, match="worked in by another headrace draft"):
                distil(settings, RecordedProgress())
            seen.append(stage)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distil(settings, Second())
    assert seen == ["gathering text"]
    # Whoever was broken off holds nothing back.
    with pytest.raises(KeyboardInterrupt):
        distil(settings, RecordedProgress(("learning", 1)))


def test_a_full_disk_keeps_the_pieces_before(
    tmp_path: Path, target: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.distillation.distil.PIECE_TOKENS", 400)

    def full_behind_the_first(tensors: object, path: Path, metadata: object) -> None:
        if "00000" not in path.name:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)  # type: ignore[arg-type]

    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    monkeypatch.setattr(corpus_module, "save_file", full_behind_the_first)
    with pytest.raises(DraftingFailed, match="No space left"):
        distil(settings, RecordedProgress())
    kept = texts_of(settings)
    assert sum(map(len, kept)) >= 400
    monkeypatch.setattr(corpus_module, "save_file", save_file)
    distil(settings, RecordedProgress())
    assert texts_of(settings)[: len(kept)] == kept


def test_the_work_may_be_deleted_when_it_is_done(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    distil(settings, RecordedProgress())
    shutil.rmtree(settings.output / "distillation")
    said, num_drafted = answers(
        target, SpeculationConfig(Speculation.DRAFT_MODEL, settings.output, num_speculative_tokens=2)
    )
    assert num_drafted > 0
    assert said == answers(target, SpeculationConfig())[0]
    # And another one may be made in its place.
    distil(replace(settings, seed=3), RecordedProgress())


def test_what_it_is_measured_by_was_not_learnt(tmp_path: Path, target: Path, text: Path) -> None:
    settings = tiny_settings(target, tmp_path / "draft", text=(text,))
    distil(settings, RecordedProgress())
    examples = Examples(Corpus(settings.output / "distillation"))
    learnt = {tuple(example.token_ids.tolist()) for example in examples.learnt}
    assert not any(tuple(example.token_ids.tolist()) in learnt for example in examples.held_back)
