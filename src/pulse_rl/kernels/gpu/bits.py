"""A bit for each element, and from these bits where each element's result goes.

Searches on the device have two passes. The first reads memory once and leaves a bit for each element: 1/16 of the bytes
of BF16 elements. The bits of each tile are counted, and the counts added up. The second pass reads the bits, and of
the elements only those that were found. So results are in order, and the order depends on nothing but the memory.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import Any

import numpy as np
from numba import cuda

from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    device,
    empty,
    high_word,
    itemsize_of,
    kernel,
    launch,
    low_word,
    zeros,
)
from pulse_rl.kernels.gpu.regions import TILE, Regions

PLACERS = 64  # threads that place what a tile holds: most masks are empty, so a thread reads many
GROUP = 4 * THREADS  # tiles whose counts a block adds up

_U0 = np.uint64(0)


@device
def differing(low, high, width):
    """A bit for each element of `width` bits that is not zero in 16 bytes."""
    every = ~_U0 >> np.uint64(64 - width)
    lanes = 64 // width
    found = 0
    for k in range(lanes):
        shift = np.uint64(width * k)
        found |= int(((low >> shift) & every) != _U0) << k
        found |= int(((high >> shift) & every) != _U0) << (k + lanes)
    return found


@device
def below(low, high, width, mask, bound):
    """A bit for each element of `width` bits in 16 bytes of which the bits in the mask are below a bound."""
    lanes = 64 // width
    found = 0
    for k in range(lanes):
        shift = np.uint64(width * k)
        found |= int(((low >> shift) & mask) < bound) << k
        found |= int(((high >> shift) & mask) < bound) << (k + lanes)
    return found


@device
def _lowest(word):
    """The number of the lowest bit that is set in a word of 64 bits."""
    return cuda.popc(~word & (word - np.uint64(1)))


@device
def _exclusive(shared, thread, value, threads):
    """The sum of the values of the block's threads before this one. shared: (threads,)."""
    shared[thread] = value
    cuda.syncthreads()
    step = 1
    while step < threads:
        more = shared[thread - step] if thread >= step else np.int64(0)
        cuda.syncthreads()
        shared[thread] += more
        cuda.syncthreads()
        step *= 2
    before = shared[thread] - value
    cuda.syncthreads()
    return before


@device
def _word(masks, number):
    """A word of 64 bits of the masks from an address on."""
    at = masks + np.uint64(16 * (number // 2))
    return low_word(at) if number % 2 == 0 else high_word(at)


def placer(fill: Any) -> Any:
    """The kernel of a second pass, a block of PLACERS threads for each tile, in which `fill` writes what was found.

    fill(like, state, r, i, k, out): element i of region r is result k. `out.indices` says how many have a place.
    masks: the address of the masks of all units.
    """

    def place(like, state, tiles, masks, offsets, out):
        shared = cuda.shared.array(PLACERS, np.int64)
        tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
        begin, end = offsets[tile], offsets[tile + 1]
        if begin == end:
            return
        each = 16 // itemsize_of(like)
        lanes = max(each, 8)  # bits of a mask
        units = TILE // PLACERS  # of a thread
        words = units * lanes // 64
        mine = masks + np.uint64(8 * words * (tile * PLACERS + thread))
        count = 0
        for w in range(words):
            count += cuda.popc(_word(mine, w))
        r = tiles.owners[tile]
        k = begin + _exclusive(shared, thread, np.int64(count), PLACERS)
        i = ((tile - tiles.firsts[r]) * TILE + thread * units) * each
        for w in range(words):
            m = _word(mine, w)
            while m != _U0 and k < out.indices.shape[0]:
                bit = 64 * w + _lowest(m)
                out.indices[k] = i + bit // lanes * each + bit % lanes
                m &= m - np.uint64(1)
                k += 1
        cuda.syncthreads()
        # A thread for each result: loads of neighbours are under way together.
        for at in range(begin + thread, min(end, out.indices.shape[0]), PLACERS):
            fill(like, state, r, np.int64(out.indices[at]), at, out)

    place.__qualname__ += f"_{fill.py_func.__module__}.{fill.py_func.__name__}"  # machine code is kept under it
    return kernel(place)


@kernel
def _sum_groups(counts, sums):
    shared = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    total = np.int64(0)
    for j in range(4):
        at = cuda.blockIdx.x * GROUP + j * THREADS + thread
        if at < counts.shape[0]:
            total += counts[at]
    before = _exclusive(shared, thread, total, THREADS)
    if thread == THREADS - 1:
        sums[cuda.blockIdx.x] = before + total


@kernel
def _sums_before(sums):
    """One block: each group's sum becomes the sum of the groups before it."""
    shared = cuda.shared.array(THREADS, np.int64)
    last = cuda.shared.array(1, np.int64)
    thread = cuda.threadIdx.x
    carried = np.int64(0)
    for start in range(0, sums.shape[0], THREADS):
        at = start + thread
        value = sums[at] if at < sums.shape[0] else np.int64(0)
        before = _exclusive(shared, thread, value, THREADS)
        if at < sums.shape[0]:
            sums[at] = carried + before
        if thread == THREADS - 1:
            last[0] = before + value
        cuda.syncthreads()
        carried += last[0]
        cuda.syncthreads()


@kernel
def _add_up(counts, sums, offsets):
    shared = cuda.shared.array(THREADS, np.int64)
    thread = cuda.threadIdx.x
    first = cuda.blockIdx.x * GROUP + 4 * thread
    total = np.int64(0)
    for at in range(first, min(first + 4, counts.shape[0])):
        total += counts[at]
    place = sums[cuda.blockIdx.x] + _exclusive(shared, thread, total, THREADS)
    if first == 0:
        offsets[0] = 0
    for at in range(first, min(first + 4, counts.shape[0])):
        place += counts[at]
        offsets[at + 1] = place


@kernel
def _pick(offsets, firsts, edges):
    r = cuda.grid(1)
    if r < firsts.shape[0]:
        edges[r] = offsets[firsts[r]]


class Marks:
    """The bits of regions: a mask for each unit. A kernel fills in masks, and the counts of each tile."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.masks: DeviceArray = empty(regions.count * TILE, np.uint16 if regions.itemsize == 1 else np.uint8)
        self.counts: DeviceArray = empty(regions.count, np.int32)

    @property
    def address(self) -> np.uint64:
        """Where the masks lie."""
        return np.uint64(self.masks.data_ptr())

    def add_up(self) -> tuple[DeviceArray, DeviceArray]:
        """Where the results of each tile begin, (tiles + 1,), and those of each region, (regions + 1,)."""
        tiles, regions = self._regions.count, len(self._regions)
        groups = -(-tiles // GROUP)
        offsets, edges, sums = zeros(tiles + 1, np.int64), empty(regions + 1, np.int64), empty(groups, np.int64)
        launch(_sum_groups, groups, THREADS, self.counts, sums)
        launch(_sums_before, min(groups, 1), THREADS, sums)
        launch(_add_up, groups, THREADS, self.counts, sums, offsets)
        launch(_pick, -(-(regions + 1) // THREADS), THREADS, offsets, self._regions.tiles.firsts, edges)
        return offsets, edges
