"""Exponents of old bits, and hot elements, on the device: what `cpu.moves` finds."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.dtypes import Field
from pulse_rl.kernels.cpu.arrays import LANES
from pulse_rl.kernels.gpu.bits import PLACERS, Marks, below, placer
from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    device,
    download,
    empty,
    example,
    high_word,
    itemsize_of,
    kernel,
    launch,
    low_word,
    upload,
)
from pulse_rl.kernels.gpu.regions import TILE, UNITS, DeviceRegions, Regions, element, unit_at

MOST_EXPONENTS = 2048  # F64's


# Exponents


@kernel
def _count(like, layout, sizes, mask, shift, every, exponents, counts):
    """A block counts a region's sample, in its shared memory."""
    shared = cuda.shared.array(MOST_EXPONENTS, np.int32)
    r, thread = cuda.blockIdx.x, cuda.threadIdx.x
    for e in range(thread, exponents, THREADS):
        shared[e] = 0
    cuda.syncthreads()
    times, size = every[r], sizes[r]
    j = np.int64(thread)
    while True:
        i = j // LANES * LANES * times + j % LANES
        if j // LANES * LANES * times >= size:
            break
        if i < size:
            e = (np.uint64(element(like, layout, r, i)) & mask) >> shift
            cuda.atomic.add(shared, np.int64(e), np.int32(times))
        j += THREADS
    cuda.syncthreads()
    for e in range(thread, exponents, THREADS):
        counts[r, e] = shared[e]


def count_exponents(regions: Regions, field: Field, every: NDArray[np.int64]) -> NDArray[np.int32]:
    """As `cpu.coding.count_exponents` of regions. Waits."""
    counts = empty(len(regions) * field.exponents, np.int32).reshape(-1, field.exponents)
    like = example(regions.itemsize)
    known = regions.tiles.sizes, *_field(field), upload(every), field.exponents
    launch(_count, len(regions), THREADS, like, regions.layout, *known, counts)
    return download(counts)


def _field(field: Field) -> tuple[np.uint64, np.uint64]:
    return np.uint64(field.mask), np.uint64(field.shift)


# Hot elements


@device
def _mask_of(like, layout, r, i, size, mask, bound):
    """The mask of the unit that begins at element i of a region."""
    itemsize = itemsize_of(like)
    p = unit_at(layout.addresses[r], layout.runs[r], layout.apart[r], itemsize, i, size)
    if p != np.uint64(1):
        return below(low_word(p), high_word(p), 8 * itemsize, mask, bound)
    found = 0
    for k in range(min(16 // itemsize, size - i)):
        found |= int((np.uint64(element(like, layout, r, i + k)) & mask) < bound) << k
    return found


@kernel
def _compare(like, layout, tiles, mask, bounds, masks, counts):
    shared = cuda.shared.array(1, np.int32)
    tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
    each = 16 // itemsize_of(like)
    if thread == 0:
        shared[0] = 0
    cuda.syncthreads()
    r = tiles.owners[tile]
    size, bound = tiles.sizes[r], bounds[r]
    count = 0
    for u in range(UNITS):
        i = ((tile - tiles.firsts[r]) * TILE + u * THREADS + thread) * each
        m = _mask_of(like, layout, r, i, size, mask, bound) if i < size else 0
        masks[tile * TILE + u * THREADS + thread] = m
        count += cuda.popc(m)
    if count:
        cuda.atomic.add(shared, 0, count)
    cuda.syncthreads()
    if thread == 0:
        counts[tile] = shared[0]


class _Searched(NamedTuple):
    """What is searched, on the device."""

    layout: DeviceRegions
    mask: np.uint64
    shift: np.uint64


@device
def _put(like, searched, r, i, k, out):
    out.exponents[k] = (np.uint64(element(like, searched.layout, r, i)) & searched.mask) >> searched.shift


_place = placer(_put)


class HotElements(NamedTuple):
    """The hot elements of regions, on the device."""

    edges: DeviceArray  # (regions + 1,) int64
    indices: DeviceArray  # (h,) uint32, ascending in each region
    exponents: DeviceArray  # (h,) uint16


def _mark(regions: Regions, field: Field, thresholds: NDArray[np.int64]) -> Marks:
    """Queue the marking of hot elements."""
    mask, shift = _field(field)
    marks, bounds = Marks(regions), upload(thresholds.astype(np.uint64) << shift)
    known = example(regions.itemsize), regions.layout, regions.tiles, mask, bounds
    launch(_compare, regions.count, THREADS, *known, marks.masks, marks.counts)
    return marks


def count_hot(regions: Regions, field: Field, thresholds: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many elements of each region have an exponent below its threshold, (regions,). Waits."""
    _, edges = _mark(regions, field, thresholds).add_up()
    return np.diff(download(edges))


def find_hot(regions: Regions, field: Field, thresholds: NDArray[np.int64]) -> HotElements:
    """The elements of each region whose exponent is below its threshold, (regions,). Waits for their number."""
    marks = _mark(regions, field, thresholds)
    offsets, edges = marks.add_up()
    count = int(download(edges[-1:])[0])
    found = HotElements(edges, empty(count, np.uint32), empty(count, np.uint16))
    if count:
        like, searched = example(regions.itemsize), _Searched(regions.layout, *_field(field))
        launch(_place, regions.count, PLACERS, like, searched, regions.tiles, marks.address, offsets, found)
    return found
