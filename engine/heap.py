"""The C library's heaps, where it is glibc: what a program frees stays in them, for it to use again.

Threads are spread over several heaps, so that they wait for one another less; what was freed in one of them
is of no use to a thread of another. Elsewhere than on glibc nothing is done here.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 2**30


def keep_freed_memory() -> None:
    """Keep what is freed for the next step: else the large temporaries of every layer are mapped anew."""
    library = _c_library()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def share_heaps(num_heaps: int) -> None:
    """Have so many heaps at most for all threads. Heaps that there are already stay."""
    library = _c_library()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, num_heaps)


def give_back_memory() -> None:
    """Let the system have what is free now. What is freed later is kept as before."""
    library = _c_library()
    if library is not None:
        library.malloc_trim(0)


def _c_library() -> ctypes.CDLL | None:
    """The process's own C library, if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    is_glibc = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if is_glibc else None
