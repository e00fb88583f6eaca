"""Changes of many segments in the order of memory, so that a write meets each page of it once.

Segments are tiles: their rows alternate in memory. What lies in one stretch of memory is sorted by distribution to
buckets of like size, which keeps it nearly in order, and then by insertion.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import kernel
from pulse_rl.kernels.cpu.spots import Spots

IN_BUCKET = 4  # changes that a bucket gets if they are spread evenly
MOVES = 32  # by insertion, for each change: a stretch that takes more is sorted otherwise


class Stretches(NamedTuple):
    """Stretches of memory, and the segments that lie in each."""

    members: NDArray[np.int64]  # (k,) the numbers of the segments, those of one stretch after those of another
    edges: NDArray[np.int64]  # (stretches + 1,) where the members of each begin
    addresses: NDArray[np.int64]  # (stretches,) of the first byte
    sizes: NDArray[np.int64]  # (stretches,) elements, below 2^32


@kernel
def _in_order(spots, stretches, counts, firsts, indices, values, itemsize, places, ends, found, new):
    k = np.int64(0)
    for t in range(stretches.addresses.shape[0]):
        begun = k
        for member in range(stretches.edges[t], stretches.edges[t + 1]):
            s = stretches.members[member]
            apart, run = spots.apart[s], np.uint32(spots.runs[s])
            start = (np.int64(spots.addresses[s]) - stretches.addresses[t]) // itemsize
            for j in range(firsts[s], firsts[s] + counts[s]):
                at = start + np.int64(indices[j])
                if apart != run:
                    at += np.int64(np.uint32(indices[j] // run)) * (apart - np.int64(run))
                places[k] = at
                k += 1
        shift = np.uint32(0)
        while (stretches.sizes[t] >> shift) * IN_BUCKET > k - begun:
            shift += np.uint32(1)
        buckets = (stretches.sizes[t] >> shift) + 1  # at most a fourth of the changes, and one
        ends[:buckets] = 0
        for j in range(begun, k):
            ends[places[j] >> shift] += 1
        before = begun
        for bucket in range(buckets):
            before += ends[bucket]
            ends[bucket] = before - ends[bucket]
        i = begun
        for member in range(stretches.edges[t], stretches.edges[t + 1]):
            s = stretches.members[member]
            for j in range(firsts[s], firsts[s] + counts[s]):
                bucket = places[i] >> shift
                found[ends[bucket]], new[ends[bucket]] = places[i], values[j]
                ends[bucket] += 1
                i += 1
        left = MOVES * (k - begun) + 1
        for j in range(begun + 1, k):
            at, value = found[j], new[j]
            i = np.int64(j)
            while i > begun and found[i - 1] > at and left:
                found[i], new[i] = found[i - 1], new[i - 1]
                i -= 1
                left -= 1
            found[i], new[i] = at, value
        if not left:
            return t
    return -1


def in_order(
    spots: Spots,
    stretches: Stretches,
    counts: NDArray[np.int64],
    indices: NDArray[np.uint32],
    values: UIntArray,
) -> tuple[NDArray[np.uint32], UIntArray] | None:
    """Sort the changes of segments by where they lie, stretch by stretch.

    counts: (segments,) changes of each. indices, values: (k,) of all. Returns indices that count from the first element
    of each stretch, ascending, and the values, (k,) each; None where they are too far from even to be sorted this way.
    """
    found, new = np.empty(len(indices), np.uint32), np.empty_like(values)
    # Not kept by the thread: they are as long as a patch.
    places, ends = np.empty(len(indices), np.uint32), np.empty(len(indices) // IN_BUCKET + 1, np.uint32)
    firsts, plain, bits = np.cumsum(counts) - counts, read_only(indices), read_only(values)
    late = _in_order(spots, stretches, counts, firsts, plain, bits, values.itemsize, places, ends, found, new)
    return None if late >= 0 else (found, new)
