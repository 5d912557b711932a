"""What the compiled kernels offer to a model on the CPU, or nothing where they are not built."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from headrace.engine.native.library import NativeLibrary, NativeUnavailable, load_default
from headrace.engine.native.linear import NativeLinears
from headrace.engine.native.token_ops import NativeTokenOps

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeKit:
    """Layers and operations over one library."""

    library: NativeLibrary
    linears: NativeLinears
    token_ops: NativeTokenOps


@cache
def native_kit() -> NativeKit | None:
    """The kit over the library in its usual place, made once; None, and a line in the log, where none is."""
    try:
        library = load_default()
    except NativeUnavailable as error:
        _log.info("models compute with torch alone: %s", error)
        return None
    return NativeKit(library, NativeLinears(library), NativeTokenOps(library))
