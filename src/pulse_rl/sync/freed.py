"""Freed memory, returned to the system.

glibc keeps much of what is freed for the next allocation: in each thread's heap, up to 64 MB of it. After work that is
done once in many versions, nobody in the process needs that much again.
"""

import ctypes
from contextlib import suppress


def return_freed() -> None:
    """Return what glibc keeps. Does nothing on another C library."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
