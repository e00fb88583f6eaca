"""The sums of a digest's terms over elements on the device, with the formula of `cpu.digests`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.digests import C1, C2, M1, M2
from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    add_together,
    bits_of,
    device,
    example,
    high_word,
    itemsize_of,
    kernel,
    launch,
    low_word,
    upload,
    zeros,
)
from pulse_rl.kernels.gpu.regions import (
    CHANGES,
    TILE,
    Regions,
    changes_of_thread,
    element,
    place_in,
    region_after,
    rows_of_step,
    stepping,
    unit_at,
)

BLOCKS = 1 << 14  # at most: more than a device runs at once, and so few that each sums many tiles of a model
_U0, _32 = np.uint64(0), np.uint64(32)


class Flat(NamedTuple):
    """Where regions lie in their tensors, (regions,) each."""

    seeds: NDArray[np.uint64]  # of the tensors' digests
    starts: NDArray[np.int64]  # the flat position of the first element
    strides: NDArray[np.int64]  # elements from row to row in the tensor


# The mixing of a digest, on halves of 32 bits: the compiler makes fewer instructions of it than of words of 64.


@device
def _spread(word, high):
    """The low half of a word after x ^= x >> 33, which leaves its high half as it is."""
    return np.uint32(np.uint32(word) ^ np.uint32(high >> np.uint32(1)))


@device
def _times(low, high, factor):
    """The halves of a word times a factor, after x ^= x >> 33."""
    word = np.uint64(low) * factor
    high = np.uint32(np.uint32(word >> _32) + np.uint32(high * np.uint32(factor)))
    return _spread(word, high), high


@device
def mixed(x):
    """As `cpu.digests.mixed`."""
    high = np.uint32(x >> _32)
    low, high = _times(_spread(x, high), high, M1)
    low, high = _times(low, high, M2)
    return np.uint64(low) | (np.uint64(high) << _32)


@device
def place_term(flat, r, run, i):
    """The part of a term that depends on the place of element i of region r."""
    row, column = place_in(run, i)
    return flat.seeds[r] + np.uint64(flat.starts[r] + row * flat.strides[r] + column) * C1


@device
def _words(word, itemsize, position):
    """The terms of the elements of 8 bytes."""
    width = np.uint64(8 * itemsize)
    every = ~_U0 >> (np.uint64(64) - width)
    total = _U0
    for k in range(8 // itemsize):
        bits = (word >> (width * np.uint64(k))) & every
        total += mixed(position + np.uint64(k) * C1 + bits * C2)
    return total


@device
def _unit(like, layout, flat, r, i, size):
    """The terms of the unit that begins at element i of a region."""
    itemsize, run = itemsize_of(like), layout.runs[r]
    p = unit_at(layout.addresses[r], run, layout.apart[r], itemsize, i, size)
    if p != np.uint64(1):
        position = place_term(flat, r, run, i)
        more = position + np.uint64(8 // itemsize) * C1
        return _words(low_word(p), itemsize, position) + _words(high_word(p), itemsize, more)
    total = _U0
    for j in range(i, min(i + 16 // itemsize, size)):
        total += mixed(place_term(flat, r, run, j) + np.uint64(element(like, layout, r, j)) * C2)
    return total


@device
def _units(like, layout, flat, r, size, unit, end):
    """The terms of a region's units from `unit` to `end` that are this thread's: every THREADS-th."""
    itemsize, run = itemsize_of(like), layout.runs[r]
    each = 16 // itemsize
    unit += cuda.threadIdx.x
    total = _U0
    p, step = stepping(layout.addresses[r], run, layout.apart[r], itemsize, each, unit * each, size)
    if step != _U0:
        rows = rows_of_step(run, each, size)
        jump = np.uint64(rows * flat.strides[r] if rows else THREADS * each) * C1
        position = place_term(flat, r, run, unit * each)
        further = np.uint64(8 // itemsize) * C1
        last = min(end, size // each) - THREADS  # of the units that have another one after them
        while unit < last:  # two loads are under way before the first is used
            after = p + step
            low, high, low_after, high_after = low_word(p), high_word(p), low_word(after), high_word(after)
            total += _words(low, itemsize, position) + _words(high, itemsize, position + further)
            position += jump
            total += _words(low_after, itemsize, position) + _words(high_after, itemsize, position + further)
            position += jump
            p = after + step
            unit += 2 * THREADS
    while unit < end and unit * each < size:
        total += _unit(like, layout, flat, r, unit * each, size)
        unit += THREADS
    return total


@kernel
def _digest(like, layout, tiles, flat, total):
    """A block sums tiles that follow one another: what it knows of their region, and its sum, it finds once."""
    shared = cuda.shared.array(THREADS, np.uint64)
    count, blocks = tiles.owners.shape[0], cuda.gridDim.x
    tile, end = count * cuda.blockIdx.x // blocks, count * (cuda.blockIdx.x + 1) // blocks
    mine = _U0
    while tile < end:
        r = tiles.owners[tile]
        first, until = tiles.firsts[r], min(end, tiles.firsts[r + 1])
        mine += _units(like, layout, flat, r, tiles.sizes[r], (tile - first) * TILE, (until - first) * TILE)
        tile = until
    add_together(shared, total, mine)


def digest(regions: Regions, flat: Flat) -> DeviceArray:
    """Queue the sum of the digest's terms of all elements, (1,) uint64."""
    total = zeros(1, np.uint64)
    known = example(regions.itemsize), regions.layout, regions.tiles, on_device(flat)
    launch(_digest, min(regions.count, BLOCKS), THREADS, *known, total)
    return total


@kernel
def _delta(runs, flat, edges, indices, before, after, total):
    shared = cuda.shared.array(THREADS, np.uint64)
    gained, r = _U0, np.int64(0)
    for j in changes_of_thread(indices.shape[0]):
        r = region_after(edges, r, j)
        place = place_term(flat, r, runs[r], np.int64(indices[j]))
        new, old = mixed(place + np.uint64(after[j]) * C2), mixed(place + np.uint64(before[j]) * C2)
        gained += new - old
    add_together(shared, total, gained)


def delta(
    regions: Regions, flat: Flat, edges: DeviceArray, indices: DeviceArray, before: DeviceArray, after: DeviceArray
) -> DeviceArray:
    """Queue the change of the digest, (1,) uint64, if elements at indices (k,) change from before to after."""
    total = zeros(1, np.uint64)
    changed = edges, indices, bits_of(before), bits_of(after)
    launch(_delta, -(-len(indices) // CHANGES), THREADS, regions.layout.runs, on_device(flat), *changed, total)
    return total


def on_device(flat: Flat) -> Flat:
    """A copy on the device."""
    return Flat(*map(upload, flat))
