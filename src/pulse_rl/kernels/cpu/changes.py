"""Find, read, write and merge changed elements.

Arrays are one-dimensional and contiguous, but for the rows of a part of a tensor; elements are unsigned integers of any
width. The caller brings the memory that results go to. `states` finds changes of many segments where they lie.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import LANES, changed_lanes, popcount, read_only, trailing_zeros
from pulse_rl.kernels.cpu.compiled import inlined, kernel, part

SLACK = 2  # find_changes writes up to this many elements past the last change

_ZERO, _ONE = np.uint64(0), np.uint64(1)


@inlined
def write_indices(indices, k, start, mask):
    """Write the index of each bit of a mask of 64 elements from `start` on, after k others. Returns how many there are.

    Writes up to SLACK further ones.
    """
    count = np.int64(popcount(mask))
    # Two stores without a branch: at 1 % density most masks hold none, one or two changes, and a mispredicted
    # branch costs more than the stores (measured: 0.92 against 0.66 of a copy's speed).
    rest = mask
    for j in range(2):
        indices[k + j] = start + np.int64(trailing_zeros(rest))
        rest &= rest - _ONE
    if count > 2:
        for j in range(2, count):
            indices[k + j] = start + np.int64(trailing_zeros(rest))
            rest &= rest - _ONE
    return k + count


@kernel
def _find_changes(old, new, indices, values):
    n = old.shape[0]
    k = np.int64(0)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        k = write_indices(indices, k, start, changed_lanes(old, new, start))
    for i in range(whole, n):
        indices[k] = i
        k += np.int64(old[i] != new[i])
    for j in range(k):
        values[j] = new[indices[j]]
    return k


def find_changes(old: UIntArray, new: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> int:
    """Write the indices where old and new (n,) differ, ascending, and the new values there. Returns how many.

    indices, values: at least n + SLACK elements; their contents past the count are undefined.
    """
    return int(_find_changes(read_only(old), read_only(new), indices, values))


@kernel
def _scatter(target, indices, values):
    for j in range(indices.shape[0]):
        target[indices[j]] = values[j]


def scatter(target: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> None:
    """Set target[indices] to values (k,). The indices (k,) must be in range: they are not checked here."""
    _scatter(target, read_only(indices), read_only(values))


@kernel
def gather_flat(source, indices, values):
    for j in range(indices.shape[0]):
        values[j] = source[indices[j]]


def gather(source: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> None:
    """Set values (k,) to source[indices]. The indices (k,) must be in range: they are not checked here."""
    gather_flat(read_only(source), read_only(indices), values)


@kernel
def _scatter_rows(target, indices, values):
    run = np.uint32(target.shape[1])
    for j in range(indices.shape[0]):
        row = np.uint32(indices[j] // run)  # a division of 32 bits takes a third of the time of one of 64
        target[row, np.uint32(indices[j] - row * run)] = values[j]


def scatter_rows(target: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> None:
    """Set the elements of target (rows, run), of any strides, at flat row-major indices (k,) to values (k,).

    The indices must be in range: they are not checked here.
    """
    _scatter_rows(target, read_only(indices), read_only(values))


@kernel
def gather_in_rows(source, indices, values):
    run = np.uint32(source.shape[1])
    for j in range(indices.shape[0]):
        row = np.uint32(indices[j] // run)
        values[j] = source[row, np.uint32(indices[j] - row * run)]


def gather_rows(source: UIntArray, indices: NDArray[np.uint32], values: UIntArray) -> None:
    """Set values (k,) to the elements of source (rows, run), of any strides, at flat row-major indices (k,).

    The indices must be in range: they are not checked here.
    """
    gather_in_rows(read_only(source), read_only(indices), values)


@part
def _union(indices, values, more_indices, more_values, all_indices, all_values):
    i, j, k = _ZERO, _ZERO, _ZERO
    m, n = np.uint64(indices.shape[0]), np.uint64(more_indices.shape[0])
    while i < m and j < n:  # without a branch, as which comes next is not foreseen
        one, other, value, more_value = indices[i], more_indices[j], values[i], more_values[j]
        all_indices[k] = min(one, other)
        all_values[k] = value if one <= other else more_value
        i += np.uint64(one <= other)
        j += np.uint64(other <= one)
        k += _ONE
    while i < m:
        all_indices[k], all_values[k] = indices[i], values[i]
        i += _ONE
        k += _ONE
    while j < n:
        all_indices[k], all_values[k] = more_indices[j], more_values[j]
        j += _ONE
        k += _ONE
    return np.int64(k)


@kernel
def _unions(edges, indices, values, more_edges, more_indices, more_values, all_edges, all_indices, all_values):
    k = np.int64(0)
    for s in range(edges.shape[0] - 1):
        a, b, c, d = edges[s], edges[s + 1], more_edges[s], more_edges[s + 1]
        k += _union(indices[a:b], values[a:b], more_indices[c:d], more_values[c:d], all_indices[k:], all_values[k:])
        all_edges[s + 1] = k


def unions(
    edges: NDArray[np.int64],
    indices: NDArray[np.uint32],
    values: UIntArray,
    more_edges: NDArray[np.int64],
    more_indices: NDArray[np.uint32],
    more_values: UIntArray,
) -> tuple[NDArray[np.int64], NDArray[np.uint32], UIntArray]:
    """Merge two lists of ascending indices and their values, of each of several segments: the first wins.

    edges, more_edges: (segments + 1,), where those of each begin, and the last one's end; the other arrays go at least
    to the last edge. Returns edges, indices and values of the merged lists.
    """
    room = int(edges[-1] - edges[0] + more_edges[-1] - more_edges[0])
    all_edges = np.zeros(len(edges), np.int64)
    all_indices, all_values = np.empty(room, np.uint32), np.empty(room, values.dtype)
    lists = (read_only(edges), read_only(indices), read_only(values))
    more = (read_only(more_edges), read_only(more_indices), read_only(more_values))
    _unions(*lists, *more, all_edges, all_indices, all_values)
    count = int(all_edges[-1])
    return all_edges, all_indices[:count], all_values[:count]
