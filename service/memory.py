"""Freed memory goes back to the system while the service runs: what a bad minute took is not kept for ever.

A call's buffers are made in one thread of gRPC's core and freed in another. Under many short or broken
connections each thread's heap grows to the size of its own worst moment, and what lies free in it between
pieces that are in use stays there.
"""

from __future__ import annotations

import asyncio

from headrace.engine import give_back_memory

NUM_HEAPS = 2
"""For all threads: by its own rule the C library would have eight for each core."""
_GIVE_BACK_EVERY_S = 30.0


async def give_back_freed() -> None:
    """Let the system have what is free, again and again until cancelled: it takes some milliseconds."""
    while True:
        await asyncio.sleep(_GIVE_BACK_EVERY_S)
        await asyncio.to_thread(give_back_memory)
