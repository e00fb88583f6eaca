"""What a process does with memory that it has freed: return it to the system, or keep it for the next allocation.

glibc does neither by itself. It keeps what is small, in each thread's heap up to 64 MB of it, and returns what is over
32 MB at once.
"""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def return_freed() -> None:
    """Return what glibc keeps: for work that is done once in many versions. Does nothing on another C library."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_freed() -> None:
    """Keep what is freed from now on, of whatever size: for a process that allocates as much again in every step.

    Each fresh page costs a fault: a seventh of the processor time of a training step of SmolLM2. `return_freed` still
    returns all of it. Does nothing on another C library.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
