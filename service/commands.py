"""The commands of ``python -m headrace.service``, from arguments to exit code."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ByteSize

from headrace.engine import EngineError, check_model, list_models, resolve_model, share_heaps
from headrace.service.command_parser import CommandParser
from headrace.service.config import (
    InvalidConfig,
    cache_dir,
    environment_doubts,
    in_flags,
    leaves_heaps_to_us,
    load_config,
)
from headrace.service.drafting import make_draft
from headrace.service.exit_codes import EXIT_OK, EXIT_REFUSED
from headrace.service.file_watch import UnusableFile
from headrace.service.grpc_batches import UNMENDED, mend_batches
from headrace.service.lifecycle import ModelSource
from headrace.service.lifecycle import serve as serve_until_stopped
from headrace.service.memory import NUM_HEAPS
from headrace.service.progress import ShownProgress
from headrace.service.server import BindError
from headrace.service.telemetry import configure_logging, log


def serve(flags: Sequence[str], source: ModelSource | None = None) -> int:
    """``headrace serve``.

    Args:
        flags: without the command's name.
        source: loads the model; None: from files.

    Returns:
        Exit code.
    """
    try:
        config = load_config(flags)
    except InvalidConfig as error:
        return _refused(*error.problems)
    if leaves_heaps_to_us():
        share_heaps(NUM_HEAPS)
    configure_logging(config.log_level, config.log_format)
    if not mend_batches():
        log.warning("memory will grow", problem=UNMENDED)
    for doubt in environment_doubts():
        log.warning("doubtful variable", problem=doubt)
    try:
        code = asyncio.run(serve_until_stopped(config, source))
    except (BindError, EngineError, UnusableFile) as error:
        code = _refused(in_flags(str(error)))
    except ModuleNotFoundError as error:
        code = _refused(f"{error.name} is not installed: pip install 'headrace[server]'")
    return _leave(code)


def pull(flags: Sequence[str]) -> int:
    """``headrace pull``."""
    parser = CommandParser("headrace pull", description="Fetch a model into the cache folder.")
    parser.add_argument("model", help="hf:org/name, or a known name such as smollm2-135m-instruct")
    parser.add_argument("--cache", type=Path, default=cache_dir(), help="folder (default: %(default)s)")
    arguments = parser.parse_args(flags)
    configure_logging("info", "auto")
    try:
        with ShownProgress() as progress:
            path = resolve_model(arguments.model, arguments.cache, progress)
            check_model(path)
            print(path)
    except EngineError as error:
        return _refused(in_flags(str(error)))
    except ModuleNotFoundError as error:
        return _refused(f"{error.name} is not installed: pip install 'headrace[server]'")
    return EXIT_OK


def models(flags: Sequence[str]) -> int:
    """``headrace models``."""
    parser = CommandParser(
        "headrace models", description="List the models that have a name, and those in the cache folder."
    )
    parser.add_argument("--cache", type=Path, default=cache_dir(), help="folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    arguments = parser.parse_args(flags)
    try:
        listed = list_models(arguments.cache)
    except OSError as error:
        return _refused(f"{error.filename}: can't be read: {error.strerror}")
    except ModuleNotFoundError as error:
        return _refused(f"{error.name} is not installed: pip install 'headrace[server]'")
    if arguments.json:
        print(json.dumps([asdict(model) for model in listed]))
        return EXIT_OK
    for model in listed:
        place = f"{_size(model.cached_bytes)} in the cache" if model.cached_bytes else "not here yet"
        if model.download_bytes:
            place += f", {_size(model.download_bytes)} to fetch"
        print(model.spec, f"    {place}", f"    {model.description}", sep="\n")
    return EXIT_OK


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable()


def draft(flags: Sequence[str]) -> int:
    """``headrace draft``."""
    return make_draft(flags, _refused)


def _refused(*problems: str) -> int:
    for problem in problems:
        # One line, though a library's words in it may be many.
        print(f"headrace: {' '.join(problem.split())}", file=sys.stderr)
    return EXIT_REFUSED


def _leave(code: int) -> int:
    """End at once if a thread (a load that was broken off, a step that hangs) would hold the process."""
    others = [
        t for t in threading.enumerate() if t is not threading.main_thread() and t.name.startswith("headrace")
    ]
    if others:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
