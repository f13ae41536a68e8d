"""Memory that a model's worth of values took goes back to the system as soon as it is free.

The C library learns from the first large block that is freed to keep blocks of that size for later, up to 32 MiB and in
a heap for each thread. A message comes in pieces of 5 MiB, pulled by two threads: so a node would hold the pieces of
its last message for good, some of them twice. With the threshold fixed, blocks above it are the system's own pages, and
go back when they are freed.
"""

from __future__ import annotations

import ctypes
import platform

_LARGE_BYTES = 1 << 20
_HEAPS = 2
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's malloc.h


def give_back_large_blocks() -> None:
    """For this process, from now on; where the C library is not glibc nothing is changed."""
    if platform.libc_ver()[0] == "glibc":
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        allocator.mallopt(_ARENA_MAX, _HEAPS)


def environment_of_large_blocks() -> dict[str, str]:
    """The same for a process that is yet to be started, as variables of its environment."""
    return {"MALLOC_MMAP_THRESHOLD_": str(_LARGE_BYTES), "MALLOC_ARENA_MAX": str(_HEAPS)}
