"""Files that are written whole or not at all, so that what was broken off leaves nothing half done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from headrace.engine.errors import DraftingFailed


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place, then put it there.

    Args:
        path: its place; what was there before stays until the new one is complete.
        write: writes to the path that it is given.

    Raises:
        DraftingFailed: it can't be written; nothing of it is left.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    # torch tells of a full disk as a RuntimeError, safetensors as an error of its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise DraftingFailed(
            f"{path} can't be written: {error}. What was written before is kept: make room, then go on with "
            "the same command"
        ) from error
