"""The naive twins of the kernels: plain Python over integers, written to be obviously right.

Same names, same arguments, same results; only tests run them. A reader in another language can be compared with them.
"""

from tests.naive.changes import (
    find_changes,
    gather,
    gather_rows,
    scatter,
    scatter_rows,
    union,
)
from tests.naive.digests import digest_at, digest_delta, digest_range, digest_rows, mix, positions
from tests.naive.gaps import gap_decode, gap_encode
from tests.naive.tiles import split

__all__ = [
    "digest_at",
    "digest_delta",
    "digest_range",
    "digest_rows",
    "find_changes",
    "gap_decode",
    "gap_encode",
    "gather",
    "gather_rows",
    "mix",
    "positions",
    "scatter",
    "scatter_rows",
    "split",
    "union",
]
