"""``python -m headrace.service serve …`` and ``… pull NAME``: what the light `headrace` command runs."""

from __future__ import annotations

import sys

from headrace.service.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED
from headrace.service.token_drawing import token

_USAGE = """usage: headrace serve --model MODEL [options]   serve a model over gRPC; all options: serve --help
       headrace pull MODEL [--cache PATH]      fetch a model into the cache folder, print where it is
       headrace models                         list known models and those in the cache folder
       headrace draft MODEL --out DIR          make a draft model for MODEL, for speculation
       headrace token NAME [--role ROLE]       draw a bearer token, and its line for the token file"""
_EXTRA = "pip install 'headrace[server]'"


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command and its arguments; None takes the process's own.

    Returns:
        Exit code: 0 all went well, 1 the engine died, 2 what was asked can't be done, 130 Ctrl-C ended it
        before a server listened to that.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["token"]:
        # Needs no server, which need not be installed.
        return token(arguments[1:])
    try:
        # Here, so that a missing extra is said in a sentence and not by a traceback; and gRPC reads how much
        # it may say when it is imported.
        from headrace.service.config import let_threads_sleep, quiet_grpc  # noqa: PLC0415

        quiet_grpc()
        from headrace.service.commands import draft, models, pull, serve  # noqa: PLC0415
    except ModuleNotFoundError as error:
        print(f"headrace: the server needs {error.name}, which is not installed: {_EXTRA}", file=sys.stderr)
        return EXIT_REFUSED
    commands = {"serve": serve, "pull": pull, "models": models, "draft": draft}
    match arguments:
        case [name, *flags] if name in commands:
            if name == "serve":
                let_threads_sleep()
            return commands[name](flags)
        case ["-h" | "--help"]:
            print(_USAGE)
            return EXIT_OK
        case _:
            print(_USAGE, file=sys.stderr)
            return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
