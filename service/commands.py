"""The commands of ``python -m headrace.service``, from arguments to exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from headrace.engine import EngineError, check_model, resolve_model
from headrace.service.config import InvalidConfig, cache_dir, environment_doubts, in_flags, load_config
from headrace.service.drafting import make_draft
from headrace.service.file_watch import UnusableFile
from headrace.service.identity import Role, is_valid_name
from headrace.service.lifecycle import EXIT_OK, EXIT_REFUSED, ModelSource, model_from_files
from headrace.service.lifecycle import serve as serve_until_stopped
from headrace.service.progress import ShownProgress
from headrace.service.server import BindError
from headrace.service.telemetry import configure_logging, log
from headrace.service.tokens import append_line, entry_line, new_token, roles_from


def serve(flags: Sequence[str], source: ModelSource = model_from_files) -> int:
    """``headrace serve``.

    Args:
        flags: without the command's name.
        source: loads the model.

    Returns:
        Exit code.
    """
    try:
        config = load_config(flags)
    except InvalidConfig as error:
        return _refused(*error.problems)
    configure_logging(config.log_level, config.log_format)
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
    parser = argparse.ArgumentParser("headrace pull", description="Fetch a model into the cache folder.")
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


def draft(flags: Sequence[str]) -> int:
    """``headrace draft``."""
    return make_draft(flags, _refused)


def token(flags: Sequence[str]) -> int:
    """``headrace token``."""
    parser = argparse.ArgumentParser(
        "headrace token",
        description="Draw a token for a client. The token goes to standard output, once: it is kept nowhere. "
        "The line that lets it in goes to the file, or else to standard error.",
    )
    parser.add_argument("name", help="the client's name, as logs and quotas know it")
    parser.add_argument(
        "--role",
        action="append",
        choices=[str(role) for role in Role],
        help="may be repeated (default: generate)",
    )
    parser.add_argument("--file", type=Path, help="token file that the line is added to")
    arguments = parser.parse_args(flags)
    if not is_valid_name(arguments.name) or ":" in arguments.name:
        return _refused("the name must be 1 to 256 printable ASCII characters without a colon")
    drawn = new_token()
    line = entry_line(arguments.name, drawn, roles_from(arguments.role or [Role.GENERATE]))
    if arguments.file is None:
        print(line, file=sys.stderr)
    else:
        try:
            append_line(arguments.file, line)
        except OSError as error:
            return _refused(f"{arguments.file}: can't be written: {error.strerror}")
    print(drawn)
    return EXIT_OK


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
