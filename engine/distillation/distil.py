"""The whole way to a draft model: text, lessons, learning, and what came of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from headrace.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    Speculation,
    SpeculationConfig,
)
from headrace.engine.distillation.corpus import Corpus, Examples, Piece
from headrace.engine.distillation.settings import DistillationProgress, DistillationSettings, DraftReport
from headrace.engine.distillation.student import Student
from headrace.engine.distillation.target import Teacher
from headrace.engine.distillation.training import Training
from headrace.engine.distillation.writing import Writer
from headrace.engine.errors import ConfigError
from headrace.engine.models.loader import read_spec
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.native.kit import native_kit
from headrace.engine.runner.loading import load

_log = logging.getLogger(__name__)

WORK_FOLDER = "distillation"
SETTINGS_FILE = "settings.json"
REPORT_FILE = "report.json"
_CHECKPOINT_FILE = "checkpoint.pt"
_PIECE_TOKENS = 32_768
_BATCH_ROWS = 64
_JUDGED_DRAFTS = 4
_JUDGED_PROMPTS = 8
_JUDGED_TOKENS = 96
_WRITING, _LESSONS, _JUDGING = "writing text", "preparing lessons", "measuring"


def distil(settings: DistillationSettings, progress: DistillationProgress) -> DraftReport:
    """Make a draft model, or go on with one that was begun in the same folder under the same settings.

    Returns:
        What it is worth. The same, and the settings, are left beside the model.

    Raises:
        ConfigError: the settings don't suit the target, or the folder holds other work.
        ModelLoadError: the target can't be loaded.
    """
    work = settings.output / WORK_FOLDER
    # First of all what may be wrong with what is asked for.
    read_spec(settings.target)
    student = Student(settings.target, settings.num_layers)
    _claim(work, settings)
    corpus = Corpus(work)
    _fill_corpus(corpus, settings, progress)
    training = Training(student, Examples(corpus), settings, work / _CHECKPOINT_FILE)
    training.run(progress)
    student.save(settings.output)
    report = _measured(settings, student.num_parameters, progress)
    (settings.output / REPORT_FILE).write_text(_as_json(report), encoding="utf-8")
    return report


def _claim(work: Path, settings: DistillationSettings) -> None:
    """Take the folder, unless it holds work of other settings."""
    described = json.loads(json.dumps(settings.described()))
    file = work / SETTINGS_FILE
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        others = sorted(name for name in described if found.get(name) != described[name])
        if others:
            name = others[0]
            raise ConfigError(
                f"{work} holds work that was begun with {name}={found.get(name)!r}, not {described[name]!r}: "
                "go on with the same settings, name another folder, or delete this one"
            )
        return
    work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _fill_corpus(corpus: Corpus, settings: DistillationSettings, progress: DistillationProgress) -> None:
    num_wanted, num_there = settings.num_corpus_tokens, corpus.num_tokens
    if num_there >= num_wanted:
        return
    num_pieces = corpus.num_pieces
    source = _read_texts(settings, num_there) if settings.text else _written_texts(settings, num_pieces)
    teacher: Teacher | None = None
    while num_there < num_wanted:
        sequences = _taken(source, min(_PIECE_TOKENS, num_wanted - num_there), num_there, settings, progress)
        if not sequences:
            break
        teacher = teacher or Teacher(settings.target)
        lengths = tuple(len(sequence) for sequence in sequences)
        token_ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
        corpus.add(Piece(token_ids, teacher.hidden(sequences), lengths))
        num_there += sum(lengths)
    if corpus.num_tokens == 0:
        raise ConfigError("there is no text to learn from: the files given are empty")
    if num_there < num_wanted:
        progress.note(f"the text ends after {num_there} of {num_wanted} tokens: that is what is learnt from")


def _taken(
    source: Iterator[tuple[int, ...]],
    num_tokens: int,
    num_before: int,
    settings: DistillationSettings,
    progress: DistillationProgress,
) -> list[tuple[int, ...]]:
    """The next sequences of a source, of at least `num_tokens` together unless it ends."""
    taken: list[tuple[int, ...]] = []
    num_taken = 0
    while num_taken < num_tokens:
        sequence = next(source, None)
        if sequence is None:
            break
        taken.append(sequence)
        num_taken += len(sequence)
        done = min(num_before + num_taken, settings.num_corpus_tokens)
        progress(_WRITING, done, settings.num_corpus_tokens)
    return taken


def _written_texts(settings: DistillationSettings, num_pieces: int) -> Iterator[tuple[int, ...]]:
    config = _engine_config(settings.target, _BATCH_ROWS)
    model = load(config)
    try:
        # What is there was drawn from other seeds.
        writer = Writer(model, config, settings.seed + 1000 * num_pieces)
        yield from writer.texts(settings.max_sequence_len)
    finally:
        model.runner.close()


def _read_texts(settings: DistillationSettings, num_there: int) -> Iterator[tuple[int, ...]]:
    """The given files, cut to pieces of the greatest length, behind the first `num_there` tokens."""
    tokenizer = load_tokenizer(settings.target)
    for path in settings.text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read as UTF-8 text: {error}") from error
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(token_ids), settings.max_sequence_len):
            sequence = tuple(token_ids[start : start + settings.max_sequence_len])
            if num_there > 0:
                num_there -= len(sequence)
            elif len(sequence) > 1:
                yield sequence


def _engine_config(target: Path, num_rows: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target),
        cache=CacheConfig(block_size=16, memory_bytes=2**30),
        scheduler=SchedulerConfig(max_num_seqs=num_rows, max_num_waiting=4096),
    )


def _measured(
    settings: DistillationSettings, num_parameters: int, progress: DistillationProgress
) -> DraftReport:
    """Let the target answer, one prompt at a time, with the draft model and without."""
    plain = _engine_config(settings.target, 1)
    prompts = _prompts(settings)
    kit = native_kit()
    narrow = "int8" if kit is not None and kit.linears.suits_quantised() else "same"
    drafting = SpeculationConfig(Speculation.DRAFT_MODEL, settings.output, draft_weight_dtype=narrow)
    fixed = replace(drafting, num_speculative_tokens=_JUDGED_DRAFTS)
    progress(_JUDGING, 0, 3)
    plain_rate, _ = _rate_of(plain, prompts)
    progress(_JUDGING, 1, 3)
    _, writer = _rate_of(replace(plain, speculation=fixed), prompts)
    progress(_JUDGING, 2, 3)
    drafted_rate, _ = _rate_of(replace(plain, speculation=drafting), prompts)
    progress(_JUDGING, 3, 3)
    totals = writer.core.load.totals.speculation
    places = zip(totals.accepted_by_place, totals.drafted_by_place, strict=True)
    return DraftReport(
        num_parameters=num_parameters,
        accepted_by_place=tuple(kept / made if made else 0.0 for kept, made in places)[:_JUDGED_DRAFTS],
        mean_accepted_length=totals.mean_accepted_length,
        plain_tokens_per_s=plain_rate,
        drafted_tokens_per_s=drafted_rate,
    )


def _rate_of(config: EngineConfig, prompts: Sequence[tuple[int, ...]]) -> tuple[float, Writer]:
    model = load(config)
    try:
        writer = Writer(model, config, seed=0)
        writer.greedy_answers(prompts[:1], 16)
        began_s = time.perf_counter()
        for prompt in prompts:
            writer.greedy_answers([prompt], _JUDGED_TOKENS)
        return len(prompts) * _JUDGED_TOKENS / (time.perf_counter() - began_s), writer
    finally:
        model.runner.close()


def _prompts(settings: DistillationSettings) -> list[tuple[int, ...]]:
    """Beginnings that were not learnt from."""
    unseen = replace(settings, seed=settings.seed + 500)
    if settings.text:
        held_back = Examples(Corpus(settings.output / WORK_FOLDER)).held_back
        return [tuple(example.token_ids[:48].tolist()) for example in held_back[:_JUDGED_PROMPTS]]
    texts = _written_texts(unseen, 0)
    return [text[: max(2, len(text) // 2)] for text in islice(texts, _JUDGED_PROMPTS)]


def _as_json(report: DraftReport) -> str:
    fields = {
        "num_parameters": report.num_parameters,
        "accepted_by_place": [round(share, 4) for share in report.accepted_by_place],
        "mean_accepted_length": round(report.mean_accepted_length, 3),
        "plain_tokens_per_s": round(report.plain_tokens_per_s, 1),
        "drafted_tokens_per_s": round(report.drafted_tokens_per_s, 1),
        "speed_up": round(report.speed_up, 3),
    }
    return json.dumps(fields, indent=2) + "\n"
