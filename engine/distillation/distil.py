"""The whole way to a draft model: text, lessons, learning, and what came of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

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
from headrace.engine.distillation.whole_files import write_whole
from headrace.engine.distillation.writing import Writer
from headrace.engine.errors import ConfigError
from headrace.engine.models.checkpoint import CONFIG_FILE
from headrace.engine.models.generation_defaults import declared_eos_token_ids
from headrace.engine.models.loader import read_spec
from headrace.engine.models.tokenizer import load_tokenizer
from headrace.engine.native.kit import native_kit
from headrace.engine.outputs import SpeculationTotals
from headrace.engine.runner.loading import load

WORK_FOLDER = "distillation"
SETTINGS_FILE = "settings.json"
REPORT_FILE = "report.json"
_CHECKPOINT_FILE = "checkpoint.pt"
PIECE_TOKENS = 8192
_BATCH_ROWS = 64
_JUDGED_DRAFTS = 4
_JUDGED_PROMPTS = 8
_JUDGED_TOKENS = 96
_WRITING, _JUDGING = "gathering text", "measuring"


def distil(settings: DistillationSettings, progress: DistillationProgress) -> DraftReport:
    """Make a draft model, or go on with one that was begun in the same folder under the same settings.

    Returns:
        What it is worth. The same, and the settings, are left beside the model.

    Raises:
        ConfigError: the settings don't suit the target, or the folder holds other work.
        DraftingFailed: learning went astray, or there is no room for the files.
        ModelLoadError: the target can't be loaded.
    """
    work = settings.output / WORK_FOLDER
    # First of all what may be wrong with what is asked for.
    read_spec(settings.target)
    student = Student(settings.target, settings.num_layers)
    _claim(work, settings)
    with _alone(work):
        corpus = Corpus(work)
        _fill_corpus(corpus, settings, progress)
        examples = Examples(corpus)
        vocabulary = _vocabulary(settings, examples)
        share = examples.share_of(vocabulary) if settings.draft_vocab_size else 1.0
        if settings.draft_vocab_size:
            progress.note(f"it proposes {len(vocabulary)} tokens, {share:.1%} of those of unseen text")
        Training(student, examples, settings, work / _CHECKPOINT_FILE, vocabulary).run(progress)
        student.save(settings.output, vocabulary if settings.draft_vocab_size else None)
        report = _measured(settings, _beginnings(examples), student.num_parameters, progress)
        report = replace(report, vocabulary_share=share)
        text = _as_json(report)
        write_whole(settings.output / REPORT_FILE, lambda path: _write_text(path, text))
    return report


def _vocabulary(settings: DistillationSettings, examples: Examples) -> Tensor:
    """(C,): the tokens that a draft model is taught to tell apart, the end of a text among them."""
    if not settings.draft_vocab_size:
        return examples.most_frequent(settings.num_candidates)
    _, spec = read_spec(settings.target)
    ends = declared_eos_token_ids(
        settings.target, load_tokenizer(settings.target).eos_token_ids, spec.vocab_size
    )
    return examples.most_frequent(settings.draft_vocab_size, ends)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """While no other process works in the folder.

    Raises:
        ConfigError: one does.
    """
    with (work / SETTINGS_FILE).open("rb") as file:
        try:
            # It ends with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{work} is worked in by another headrace draft: wait for it, or name another folder"
            ) from error
        yield


def _claim(work: Path, settings: DistillationSettings) -> None:
    """Take the folder, unless it holds something else."""
    described = json.loads(json.dumps({**settings.described(), "text_digests": _digests(settings.text)}))
    file, output = work / SETTINGS_FILE, settings.output
    if file.is_file():
        found = _read_settings(file)
        others = [name for name in described if found.get(name) != described[name]]
        if others:
            name = others[0]
            raise ConfigError(
                f"{work} holds work that was begun with {name}={found.get(name)!r}, not {described[name]!r}: "
                "go on with the same settings, name another folder, or delete this one"
            )
        return
    if any(work.glob("*.safetensors")):
        raise ConfigError(f"{work} holds work without {SETTINGS_FILE}: delete it, or name another folder")
    # One that was made here may be made anew, though its work is gone.
    if (output / CONFIG_FILE).is_file() and not (output / REPORT_FILE).is_file():
        raise ConfigError(f"{output} holds a model that is no draft model made here: name another folder")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output} can't be made a folder: {error.strerror}") from error
    write_whole(file, lambda path: _write_text(path, json.dumps(described, indent=2) + "\n"))


def _read_settings(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}: delete {file.parent}") from error
    return found if isinstance(found, dict) else {}


def _digests(paths: Sequence[Path]) -> list[str]:
    """Of what the files hold: work that was begun with other text is not gone on with."""
    digests = []
    for path in paths:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    return digests


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _fill_corpus(corpus: Corpus, settings: DistillationSettings, progress: DistillationProgress) -> None:
    num_there = corpus.num_tokens
    if num_there < settings.num_corpus_tokens:
        make = _read_texts if settings.text else _written_texts
        with closing(make(settings, corpus)) as source:
            num_there = _add_pieces(corpus, source, settings, progress)
    if num_there == 0:
        raise ConfigError("there is no text to learn from: the files given are empty")
    if num_there < settings.num_corpus_tokens:
        of = f"{num_there} of {settings.num_corpus_tokens} tokens"
        progress.note(f"the text ends after {of}: that is what is learnt from")


def _add_pieces(
    corpus: Corpus,
    source: Iterator[tuple[int, ...]],
    settings: DistillationSettings,
    progress: DistillationProgress,
) -> int:
    """Add pieces until there is enough or the source ends; gives how many tokens there are."""
    num_wanted, num_there = settings.num_corpus_tokens, corpus.num_tokens
    teacher: Teacher | None = None
    while num_there < num_wanted:
        sequences = _taken(source, min(PIECE_TOKENS, num_wanted - num_there), num_there, settings, progress)
        if not sequences:
            break
        teacher = teacher or Teacher(settings.target)
        lengths = tuple(len(sequence) for sequence in sequences)
        token_ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
        corpus.add(Piece(token_ids, teacher.hidden(sequences), lengths))
        num_there += sum(lengths)
    return num_there


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


def _written_texts(settings: DistillationSettings, corpus: Corpus) -> Generator[tuple[int, ...]]:
    """What the target makes up, by weights of few bits where that is faster.

    Nothing wrong is learnt from such text: what follows each of its tokens is told by the whole weights.
    """
    config = _engine_config(settings.target, _BATCH_ROWS, "int4" if _suits_quantised() else "same")
    model = load(config)
    try:
        # What is there was drawn from other seeds.
        writer = Writer(model, config, settings.seed + 1000 * corpus.num_pieces)
        yield from writer.texts(settings.max_sequence_len)
    finally:
        model.runner.close()


def _read_texts(settings: DistillationSettings, corpus: Corpus) -> Generator[tuple[int, ...]]:
    """The given files, cut to pieces of the greatest length, behind those that the corpus has."""
    num_there = corpus.num_tokens
    tokenizer = load_tokenizer(settings.target)
    _, spec = read_spec(settings.target)
    max_len = min(settings.max_sequence_len, spec.default_len)
    for path in settings.text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read as UTF-8 text: {error}") from error
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(token_ids), max_len):
            sequence = tuple(token_ids[start : start + max_len])
            if len(sequence) < 2:
                continue
            if num_there > 0:
                num_there -= len(sequence)
            else:
                yield sequence


def _suits_quantised() -> bool:
    kit = native_kit()
    return kit is not None and kit.linears.suits_quantised()


def _engine_config(target: Path, num_rows: int, weight_dtype: str = "same") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target, weight_dtype=weight_dtype),
        cache=CacheConfig(block_size=16, memory_bytes=2**30),
        scheduler=SchedulerConfig(max_num_seqs=num_rows, max_num_waiting=4096),
    )


def _measured(
    settings: DistillationSettings,
    prompts: Sequence[tuple[int, ...]],
    num_parameters: int,
    progress: DistillationProgress,
) -> DraftReport:
    """Let the target answer, one prompt at a time, with the draft model and without."""
    plain = _engine_config(settings.target, 1)
    narrow = "int8" if _suits_quantised() else "same"
    drafting = SpeculationConfig(Speculation.DRAFT_MODEL, settings.output, draft_weight_dtype=narrow)
    fixed = replace(drafting, num_speculative_tokens=_JUDGED_DRAFTS)
    progress(_JUDGING, 0, 3)
    plain_rate, _ = _rate_of(plain, prompts)
    progress(_JUDGING, 1, 3)
    _, totals = _rate_of(replace(plain, speculation=fixed), prompts)
    progress(_JUDGING, 2, 3)
    drafted_rate, _ = _rate_of(replace(plain, speculation=drafting), prompts)
    progress(_JUDGING, 3, 3)
    # No draft was ever kept at the places that are missing from the first.
    places = zip_longest(totals.accepted_by_place, totals.drafted_by_place, fillvalue=0)
    return DraftReport(
        num_parameters=num_parameters,
        accepted_by_place=tuple(kept / made if made else 0.0 for kept, made in places)[:_JUDGED_DRAFTS],
        mean_accepted_length=totals.mean_accepted_length,
        plain_tokens_per_s=plain_rate,
        drafted_tokens_per_s=drafted_rate,
        draft_weight_dtype=narrow,
    )


def _rate_of(config: EngineConfig, prompts: Sequence[tuple[int, ...]]) -> tuple[float, SpeculationTotals]:
    """Tokens per second, and what came of the drafts."""
    model = load(config)
    try:
        writer = Writer(model, config, seed=0)
        writer.greedy_answers(prompts[:1], 16)
        num_tokens, began_s = 0, time.perf_counter()
        for prompt in prompts:
            (answer,) = writer.greedy_answers([prompt], _JUDGED_TOKENS)
            num_tokens += len(answer) - len(prompt)
        return num_tokens / (time.perf_counter() - began_s), writer.core.load.totals.speculation
    finally:
        model.runner.close()


def _beginnings(examples: Examples) -> list[tuple[int, ...]]:
    """Prompts from text that was not learnt from."""
    texts = [tuple(example.token_ids.tolist()) for example in examples.held_back]
    return [text[: max(1, len(text) // 2)] for text in texts[:_JUDGED_PROMPTS]]


def _as_json(report: DraftReport) -> str:
    fields = {
        "num_parameters": report.num_parameters,
        "accepted_by_place": [round(share, 4) for share in report.accepted_by_place],
        "mean_accepted_length": round(report.mean_accepted_length, 3),
        "plain_tokens_per_s": round(report.plain_tokens_per_s, 1),
        "drafted_tokens_per_s": round(report.drafted_tokens_per_s, 1),
        "speed_up": round(report.speed_up, 3),
        "draft_weight_dtype": report.draft_weight_dtype,
        "vocabulary_share": round(report.vocabulary_share, 4),
    }
    return json.dumps(fields, indent=2) + "\n"
