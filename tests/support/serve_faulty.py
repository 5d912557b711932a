"""The real program over a real tiny model, a fault built in: ``python -m tests.support.serve_faulty FAULT``.

FAULT is written as `tests.support.faults` says; flags of ``headrace serve`` follow it. SIGUSR1 releases what
is slow or hangs. It says loudly what it is, and serves this machine alone.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

from headrace.engine import ConfigError, LoadedModel, LoadProgress
from headrace.service.commands import serve
from headrace.service.config import ServiceConfig
from headrace.service.edge_settings import is_loopback
from headrace.service.telemetry import log
from tests.support.faults import Fault, faulty_model


def main(arguments: list[str]) -> int:
    """Serve until a signal; exit code as of ``headrace serve``."""
    fault = Fault.parse(arguments[0])

    def release(signum: int, frame: FrameType | None) -> None:
        fault.released.set()

    signal.signal(signal.SIGUSR1, release)

    def source(config: ServiceConfig, progress: LoadProgress) -> LoadedModel:
        if not (is_loopback(config.host) and is_loopback(config.control_host)):
            raise ConfigError("a server with a fault built in is for this machine alone: leave out --host")
        log.critical("THIS SERVER BREAKS ON PURPOSE: it is for tests", fault=arguments[0])
        return faulty_model(Path(config.model), fault)

    return serve(arguments[1:], source)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
