"""The sums of a digest's terms over elements on the device, with the formula of `cpu.digests`."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.digests import C1, C2, mixed
from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    add_together,
    bits_of,
    device,
    download,
    example,
    high_word,
    itemsize_of,
    launch,
    low_word,
    twin,
    upload,
    zeros,
)
from pulse_rl.kernels.gpu.regions import (
    TILE,
    UNITS,
    Regions,
    element,
    place_in,
    region_of,
    regions_of,
    rows_of_step,
    stepping,
    unit_at,
)

_mixed = twin(mixed)
_U0 = np.uint64(0)


class Flat(NamedTuple):
    """Where regions lie in their tensors, (regions,) each."""

    seeds: NDArray[np.uint64]  # of the tensors' digests
    starts: NDArray[np.int64]  # the flat position of the first element
    strides: NDArray[np.int64]  # elements from row to row in the tensor


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
        total += _mixed(position + np.uint64(k) * C1 + bits * C2)
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
        total += _mixed(place_term(flat, r, run, j) + np.uint64(element(like, layout, r, j)) * C2)
    return total


@cuda.jit
def _digest(like, layout, tiles, flat, total):
    shared = cuda.shared.array(THREADS, np.uint64)
    tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
    r = tiles.owners[tile]
    size = tiles.sizes[r]
    mine = _U0
    itemsize = itemsize_of(like)
    each = 16 // itemsize
    unit = (tile - tiles.firsts[r]) * TILE + thread  # the thread's first one in the region
    run = layout.runs[r]
    p, step = stepping(layout.addresses[r], run, layout.apart[r], itemsize, each, unit * each, size)
    if step != _U0 and (unit - thread + TILE) * each <= size:
        rows = rows_of_step(run, each, size)
        jump = np.uint64(rows * flat.strides[r] if rows else THREADS * each) * C1
        position = place_term(flat, r, run, unit * each)
        further = np.uint64(8 // itemsize) * C1
        for _ in range(UNITS // 2):  # two loads are under way before the first is used
            after = p + step
            low, high, low_after, high_after = low_word(p), high_word(p), low_word(after), high_word(after)
            for first, second in ((low, high), (low_after, high_after)):
                mine += _words(first, itemsize, position) + _words(second, itemsize, position + further)
                position += jump
            p = after + step
    else:
        for u in range(UNITS):
            i = (unit + u * THREADS) * each
            if i < size:
                mine += _unit(like, layout, flat, r, i, size)
    add_together(shared, total, mine)


def digest(regions: Regions, flat: Flat) -> DeviceArray:
    """Queue the sum of the digest's terms of all elements, (1,) uint64."""
    total = zeros(1, np.uint64)
    like = example(regions.itemsize)
    launch(_digest, regions.count, THREADS, like, regions.layout, regions.tiles, on_device(flat), total)
    return total


@cuda.jit
def _delta(runs, flat, edges, indices, before, after, total):
    shared = cuda.shared.array(THREADS, np.uint64)
    gained = np.uint64(0)
    j = cuda.grid(1)
    if j < indices.shape[0]:
        r = region_of(edges, j)
        place = place_term(flat, r, runs[r], np.int64(indices[j]))
        new, old = _mixed(place + np.uint64(after[j]) * C2), _mixed(place + np.uint64(before[j]) * C2)
        gained = new - old
    add_together(shared, total, gained)


def delta(
    regions: Regions, flat: Flat, edges: DeviceArray, indices: DeviceArray, before: DeviceArray, after: DeviceArray
) -> DeviceArray:
    """Queue the change of the digest, (1,) uint64, if elements at indices (k,) change from before to after."""
    total = zeros(1, np.uint64)
    changed = edges, indices, bits_of(before), bits_of(after)
    blocks = -(-len(indices) // THREADS)
    launch(_delta, blocks, THREADS, regions.layout.runs, on_device(flat), *changed, total)
    return total


def on_device(flat: Flat) -> Flat:
    """A copy on the device."""
    return Flat(*map(upload, flat))


# One array, as on the CPU


def _one(seed: int, start: int) -> Flat:
    return Flat(np.array([seed], np.uint64), np.array([start], np.int64), np.zeros(1, np.int64))


def digest_range(seed: int, start: int, bits: DeviceArray) -> int:
    """As `cpu.digest_range` of a device array. Waits."""
    return int(download(digest(regions_of([bits]), _one(seed, start)))[0])


def digest_delta(seed: int, start: int, indices: DeviceArray, before: DeviceArray, after: DeviceArray) -> int:
    """As `cpu.digest_delta` of device arrays; indices uint32. Waits."""
    total = zeros(1, np.uint64)
    runs, edges = upload(np.array([1 << 32], np.int64)), upload(np.array([0, len(indices)], np.int64))
    changed = edges, indices, bits_of(before), bits_of(after)
    launch(_delta, -(-len(indices) // THREADS), THREADS, runs, on_device(_one(seed, start)), *changed, total)
    return int(download(total)[0])
