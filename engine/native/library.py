"""The compiled kernels, found and loaded, or why they are not there.

Importing torch comes first: the library then shares the OpenMP threads that torch brings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from headrace.engine.native.build import default_folders, library_stem

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The element types that the kernels know, as they call them."""

# Result type, argument types. Tensors are passed as addresses, strides as counts of elements.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "variant": (c_char_p, (c_int32,)),
    "kernels": (c_void_p, (c_int32,)),
    "attention_new": (
        c_void_p,
        (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int64, c_int32),
    ),
    "attention_free": (None, (c_void_p,)),
    "attention_begin": (None, (c_void_p, c_int32, c_int64, c_void_p, c_int32, c_void_p, c_void_p, c_void_p)),
    "attention_write": (None, (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64)),
    "attention_attend": (
        None,
        (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_float, c_int32, c_float),
    ),
    "rms_norm": (
        None,
        (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int32),
    ),
    "gated_silu": (None, (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32)),
    "rotate": (
        None,
        (c_void_p, c_int32, *(c_void_p, c_int64) * 3, c_int64, c_int64, c_int64, c_int32),
    ),
    "can_multiply": (c_int32, (c_void_p, c_int32)),
    "packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "pack": (None, (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32)),
    "find_numbers": (c_int32, (c_int32, *(c_void_p,) * 3, c_int32, c_int64, *(c_void_p,) * 2, c_int32)),
    "packed_quantised_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "pack_quantised": (None, (c_int32, *(c_void_p,) * 3, c_int64, c_int64, c_void_p, c_int32)),
    "multiply": (
        None,
        (
            *(c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
            *(c_void_p, c_int64, c_int64, c_int64, c_int32),
        ),
    ),
    "stack_run": (None, (*(c_void_p,) * 6, c_int64, c_void_p, c_int64, c_void_p)),
    "argmax": (None, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32)),
    "greedy": (None, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32)),
}


class NativeUnavailable(Exception):
    """There is no library to load; the message says why and what would help."""


class NativeLibrary:
    """The loaded library, the kernels of one instruction set chosen. Its calls let other threads run."""

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """Load a library.

        Args:
            variant: instruction set to use; None takes the best that the processor has.

        Raises:
            NativeUnavailable: it can't be loaded, or has no such variant for this processor.
        """
        try:
            functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(functions, f"headrace_{name}")
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path} can't be loaded: {error}") from error
        self.path = path
        self.functions = functions
        self.variants = _variants(functions)
        self.variant = self.variants[0] if variant is None else variant
        if self.variant not in self.variants:
            raise NativeUnavailable(
                f"this processor runs no kernels for {variant!r}: use one of {', '.join(self.variants)}"
            )
        self.kernels: int = functions.headrace_kernels(self.variants.index(self.variant))


def find_library(folders: Sequence[Path] | None = None) -> Path:
    """The library that was built from the sources beside this file.

    Raises:
        NativeUnavailable: there is none in any of the folders.
    """
    places = default_folders() if folders is None else tuple(folders)
    stem = library_stem()
    others = []
    for place in places:
        found = sorted(place.glob(f"{stem}-*.so"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1]
        others += list(place.glob("headrace-native-*.so"))
    state = "was built from other sources or for another machine" if others else "is not built"
    raise NativeUnavailable(f"the native library {state}: run python -m headrace.engine.native.build")


@cache
def load_default() -> NativeLibrary:
    """The library in its usual place, loaded once.

    Raises:
        NativeUnavailable: it isn't there.
    """
    return NativeLibrary(find_library())


def _variants(functions: ctypes.CDLL) -> tuple[str, ...]:
    names: list[str] = []
    while (name := functions.headrace_variant(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)
