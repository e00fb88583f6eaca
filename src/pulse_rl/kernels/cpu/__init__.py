"""The hot loops on the CPU, compiled by Numba at first use; they release the GIL, so that threads run them at once.

`changes` finds, reads, writes and merges changed elements; `digests` sums a digest's terms; `gaps` codes the words of
the `gap` codec; `moves`, `rangecoder` and `context` code the `context` codec; `loco` and `study` serve those rooms.
`arrays` holds what they share. Kernels bring no memory of their own, and those that decode untrusted bytes check
every position before they use it and return a status instead of raising.

Numba's cache notices changes of the file that a function stands in, not of functions in other files that it calls:
after such a change delete `__pycache__` here.
"""

from pulse_rl.kernels.cpu.arrays import buffer
from pulse_rl.kernels.cpu.changes import SLACK, find_changes, gather, scatter, union
from pulse_rl.kernels.cpu.digests import digest_delta, digest_range
from pulse_rl.kernels.cpu.gaps import gap_decode, gap_encode

__all__ = [
    "SLACK",
    "buffer",
    "digest_delta",
    "digest_range",
    "find_changes",
    "gap_decode",
    "gap_encode",
    "gather",
    "scatter",
    "union",
]
