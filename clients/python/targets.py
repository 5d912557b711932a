"""Where a server listens unless told otherwise: host and port, as the server's own defaults say."""

from __future__ import annotations

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_CONTROL_TARGET = "127.0.0.1:50052"
