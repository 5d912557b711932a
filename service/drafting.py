"""``headrace draft``: a draft model for a target, made by distillation on the machine at hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.engine import DistillationSettings, DraftReport, EngineError, make_draft_model, resolve_model
from headrace.service.config import cache_dir
from headrace.service.lifecycle import EXIT_OK
from headrace.service.progress import ShownProgress
from headrace.service.telemetry import configure_logging, log

_EXIT_INTERRUPTED = 130


class _DraftProgress(ShownProgress):
    """Bars, and lines between them."""

    def note(self, text: str) -> None:
        """See `headrace.engine.DistillationProgress`."""
        log.info(text)


def make_draft(flags: Sequence[str], refused: Callable[[str], int]) -> int:
    """Read the arguments and do it.

    Args:
        flags: without the command's name.
        refused: tells what can't be done, and gives the exit code for it.

    Returns:
        Exit code.
    """
    arguments = _parser().parse_args(flags)
    configure_logging("info", "auto")
    try:
        with _DraftProgress() as progress:
            report = make_draft_model(_settings(arguments, progress), progress)
    except EngineError as error:
        return refused(str(error))
    except ModuleNotFoundError as error:
        return refused(f"{error.name} is not installed: pip install 'headrace[server]'")
    except KeyboardInterrupt:
        log.info("broken off: the same command goes on from here", folder=str(arguments.out))
        return _EXIT_INTERRUPTED
    for line in _lines(report, arguments.out):
        print(line)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "headrace draft",
        description="Make a draft model: the target's first layers, taught on text that the target writes "
        "itself. What was broken off is gone on with by the same command.",
    )
    parser.add_argument("model", help="the target, as for `headrace serve --model`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft model")
    parser.add_argument(
        "--layers", type=int, default=2, help="of the target's first layers (default: %(default)s)"
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
        default=400_000,
        help="how much text it learns from (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=25.0,
        help="how long it learns, text not counted (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_dir(),
        help="folder of fetched models (default: %(default)s)",
    )
    return parser


def _settings(arguments: argparse.Namespace, progress: _DraftProgress) -> DistillationSettings:
    return DistillationSettings(
        target=resolve_model(arguments.model, arguments.cache, progress),
        output=arguments.out,
        num_layers=arguments.layers,
        text=tuple(arguments.text),
        num_corpus_tokens=arguments.corpus_tokens,
        training_s=60 * arguments.minutes,
        seed=arguments.seed,
    )


def _lines(report: DraftReport, folder: Path) -> list[str]:
    places = ", ".join(f"{share:.0%}" for share in report.accepted_by_place)
    rates = f"{report.drafted_tokens_per_s:.0f} tokens/s, without it {report.plain_tokens_per_s:.0f}"
    return [
        f"{folder}: {report.num_parameters / 1e6:.1f} million parameters, embedding and head included",
        f"drafts kept, by place: {places}; {report.mean_accepted_length:.2f} tokens per step of the target",
        f"one stream: {rates}: {report.speed_up:.2f} x",
        f"use it: headrace serve --model … --draft-model {folder} --draft-weight-dtype int8",
    ]
