"""Counts of changes for the study, compiled. The naive twins are in `tests/naive/study.py`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu import coding
from pulse_rl.kernels.cpu.arrays import LANES, changed_lanes, popcount, read_only
from pulse_rl.kernels.cpu.compiled import kernel
from pulse_rl.kernels.cpu.moves import Moves

NEAR = 32  # distances up to this are counted in a table; longer ones, which are few, are listed
BITS = 52  # of a distance in a key
FARTHEST = (1 << BITS) - 1  # the longest distance; longer ones count as this, so that a key fits 64 bits

_1, _52 = np.uint64(1), np.uint64(BITS)
_FARTHEST = np.uint64(FARTHEST)


@kernel
def _count_differing(old, new):
    n = old.shape[0]
    whole = n - n % LANES
    count = np.uint64(0)
    for start in range(0, whole, LANES):
        count += popcount(changed_lanes(old, new, start))
    for i in range(whole, n):
        count += np.uint64(old[i] != new[i])
    return count


def count_differing(old: UIntArray, new: UIntArray) -> int:
    """Count the elements of old and new (n,) that have different bits."""
    return int(_count_differing(read_only(old), read_only(new)))


def count_exponents(old: UIntArray, field: Field) -> NDArray[np.int64]:
    """Count the elements of old (n,) that have each exponent, (E,)."""
    counts = coding.count_exponents(coding.memory_of([old]), field, old.itemsize, np.ones(1, np.int64))
    found: NDArray[np.int64] = counts[0].astype(np.int64)
    return found


@kernel
def _recurring(former, old, indices, values):
    again, back = 0, 0
    for j in range(indices.shape[0]):
        i = indices[j]
        again += former[i] != old[i]
        back += former[i] == values[j]
    return again, back


def recurring(former: UIntArray, old: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> tuple[int, int]:
    """Count, of the elements at indices (k,), those that differ between former and old (n,), and those whose new bits,
    values (k,), are those of former."""
    again, back = _recurring(read_only(former), read_only(old), read_only(indices), read_only(values))
    return int(again), int(back)


@kernel
def _histogram(exponents, ups, sizes, near, far):
    k = 0
    for j in range(exponents.shape[0]):
        size = sizes[j]
        if size <= np.uint64(NEAR):
            near[exponents[j], 2 * np.int64(size) - 2 + np.int64(ups[j])] += 1
        else:
            far[k] = ((np.uint64(exponents[j]) << _52) | min(size, _FARTHEST)) << _1 | np.uint64(ups[j])
            k += 1
    return k


def histogram(moved: Moves, exponents: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Count each move that occurs: keys (u,), ascending, and counts (u,).

    exponents: the dtype's number of them. A key is (exponent · 2^52 + distance) · 2 + (1 for a move towards +∞).
    """
    near = np.zeros((exponents, 2 * NEAR), np.int64)
    far = np.empty(len(moved.sizes), np.uint64)
    count = _histogram(read_only(moved.exponents), read_only(moved.ups), read_only(moved.sizes), near, far)
    rows, columns = np.nonzero(near)
    distances = columns // 2 + 1
    close = (rows.astype(np.uint64) << _52 | distances.astype(np.uint64)) << _1 | (columns % 2).astype(np.uint64)
    keys, counts = np.unique(far[:count], return_counts=True)
    keys, counts = np.concatenate([close, keys]), np.concatenate([near[rows, columns], counts])
    order = np.argsort(keys)
    return keys[order], counts[order]
