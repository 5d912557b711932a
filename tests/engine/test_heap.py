from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import psutil
import pytest

from headrace.engine.heap import give_back_memory
from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="this C library is not glibc"
)

THREADS_THAT_ALLOCATE = """
import ctypes, sys, threading
from headrace.engine.heap import share_heaps

share_heaps(int(sys.argv[1]))
library = ctypes.CDLL(None)
library.malloc.restype = library.fdopen.restype = ctypes.c_void_p
everybody = threading.Barrier(12)

def allocate():
    library.malloc(1000)
    everybody.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.malloc_info(0, ctypes.c_void_p(library.fdopen(1, b"w")))
library.fflush(None)
"""
CHUNK_BYTES, NUM_CHUNKS = 2**16, 2000


@pytest.mark.parametrize("num_heaps", [2, 12])
def test_threads_share_so_many_heaps(num_heaps: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", THREADS_THAT_ALLOCATE, str(num_heaps)],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    assert told.stdout.count(b"<heap nr=") == num_heaps


def test_what_is_free_between_pieces_in_use_goes_back_to_the_system() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    chunks = [ctypes.c_void_p(library.malloc(CHUNK_BYTES)) for _ in range(NUM_CHUNKS)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK_BYTES)
    for chunk in chunks[::2]:
        library.free(chunk)
    try:
        kept = rss_bytes()
        give_back_memory()
        assert kept - rss_bytes() > NUM_CHUNKS * CHUNK_BYTES // 4
    finally:
        for chunk in chunks[1::2]:
            library.free(chunk)


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
