"""``headrace draft``: a draft model for a target, made by distillation on the machine at hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from headrace.engine import DistillationSettings, DraftReport, EngineError, make_draft_model, resolve_model
from headrace.service.command_parser import CommandParser
from headrace.service.config import cache_dir
from headrace.service.exit_codes import EXIT_INTERRUPTED, EXIT_OK
from headrace.service.progress import ShownProgress
from headrace.service.telemetry import configure_logging, log

_USUAL = DistillationSettings(target=Path(), output=Path())
"""Where the defaults are."""


def make_draft(flags: Sequence[str], refused: Callable[[str], int]) -> int:
    """Read the arguments and do it.

    Args:
        flags: without the command's name.
        refused: tells what can't be done, and gives the exit code for it.

    Returns:
        Exit code.
    """
    configure_logging("info", "auto")
    arguments = _parser().parse_args(flags)
    try:
        # What is wrong with the settings is told before anything is fetched.
        settings = _settings(arguments)
        with ShownProgress() as progress:
            target = resolve_model(arguments.model, arguments.cache, progress)
            report = make_draft_model(replace(settings, target=target), progress)
    except EngineError as error:
        return refused(str(error))
    except ModuleNotFoundError as error:
        return refused(f"{error.name} is not installed: pip install 'headrace[server]'")
    except KeyboardInterrupt:
        log.info("broken off: the same command goes on from here", folder=str(arguments.out))
        return EXIT_INTERRUPTED
    for line in _lines(report, arguments.model, arguments.out):
        print(line)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "headrace draft",
        description="Make a draft model: the target's first layers, taught on text that the target writes "
        "itself. What was broken off is gone on with by the same command; more --corpus-tokens "
        "and --minutes may be given to it. "
        "The folder `distillation` within the draft model's is only for that: delete it when you are done.",
    )
    parser.add_argument("model", help="the target, as for `headrace serve --model`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft model")
    parser.add_argument(
        "--layers",
        type=int,
        default=_USUAL.num_layers,
        help="of the target's first layers (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=_USUAL.draft_vocab_size,
        help="it proposes so many of the text's most frequent tokens and no others, which makes it "
        "much faster; 0 is all tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        help="UTF-8 file to learn from instead; may be repeated",
    )
    parser.add_argument(
        "--corpus-tokens",
        type=int,
        default=_USUAL.num_corpus_tokens,
        help="how much text it learns from (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=_USUAL.training_s / 60,
        help="how long it learns, text not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=_USUAL.learning_rate,
        help="greatest one, less if it goes astray (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=_USUAL.seed, help="of all that is drawn (default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_dir(),
        help="folder of fetched models (default: %(default)s)",
    )
    return parser


def _settings(arguments: argparse.Namespace) -> DistillationSettings:
    return DistillationSettings(
        target=Path(arguments.model),
        output=arguments.out,
        num_layers=arguments.layers,
        draft_vocab_size=arguments.draft_vocab_size,
        text=tuple(arguments.text),
        num_corpus_tokens=arguments.corpus_tokens,
        training_s=60 * arguments.minutes,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )


def _lines(report: DraftReport, model: str, folder: Path) -> list[str]:
    places = ", ".join(f"{share:.0%}" for share in report.accepted_by_place)
    rates = f"{report.drafted_tokens_per_s:.0f} tokens/s, without it {report.plain_tokens_per_s:.0f}"
    flags = f"--draft-model {folder}"
    if report.draft_weight_dtype != "same":
        flags += f" --draft-weight-dtype {report.draft_weight_dtype}"
    return [
        f"{folder}: {report.num_parameters / 1e6:.1f} million parameters, embedding and head included",
        f"drafts kept, by place: {places}; {report.mean_accepted_length:.2f} tokens per step of the target",
        f"one stream: {rates}: {report.speed_up:.2f} x",
        f"use it: headrace serve --model {model} {flags}",
        f"{folder / 'distillation'} is only for going on with it: delete it when you are done",
    ]
