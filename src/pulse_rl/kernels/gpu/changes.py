"""Find, read and write changed elements on the device: of many tensors in a launch.

Results of regions lie one after another: those of region r from `edges[r]` to `edges[r + 1]`. Indices count in it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numba import cuda

from pulse_rl.dtypes import UINTS
from pulse_rl.kernels.gpu.bits import PLACERS, Marks, differing, placer
from pulse_rl.kernels.gpu.casts import four, rounded
from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    bits_of,
    device,
    empty,
    example,
    high_word,
    itemsize_of,
    kernel,
    launch,
    load,
    low_word,
    store,
    zeros,
)
from pulse_rl.kernels.gpu.regions import (
    CHANGES,
    TILE,
    UNITS,
    DeviceRegions,
    Lines,
    Regions,
    address_in,
    changes_of_thread,
    element,
    region_after,
    stepping,
    unit_at,
)

# In these, `news` has the width of the new state's elements: twice that of `like` where they are float32 that are
# compared, and kept, as bfloat16. Both widths are known when a kernel is compiled.


@device
def _both(like, news, p, q):
    """What differs between 16 bytes of the old state and as many elements of the new one, as two words."""
    if itemsize_of(news) == itemsize_of(like):
        return low_word(p) ^ low_word(q), high_word(p) ^ high_word(q)
    more = q + np.uint64(16)
    return low_word(p) ^ four(low_word(q), high_word(q)), high_word(p) ^ four(low_word(more), high_word(more))


@device
def _new_element(like, news, new, r, i):
    bits = element(news, new, r, i)
    if itemsize_of(news) == itemsize_of(like):
        return np.uint64(bits)
    return np.uint64(rounded(np.uint32(bits)))


@device
def _compared(like, news, old, new, r, i, size):
    """The mask of the unit that begins at element i of a region."""
    itemsize, wide = itemsize_of(like), itemsize_of(news)
    p = unit_at(old.addresses[r], old.runs[r], old.apart[r], itemsize, i, size)
    q = unit_at(new.addresses[r], new.runs[r], new.apart[r], wide, i, size)
    together = ((p | q) & np.uint64(1)) == np.uint64(0)
    if together and wide != itemsize:  # 32 bytes
        more = unit_at(new.addresses[r], new.runs[r], new.apart[r], wide, i + 16 // wide, size)
        together = more == q + np.uint64(16)
    if together:
        low, high = _both(like, news, p, q)
        return differing(low, high, 8 * itemsize)
    found = 0
    for k in range(min(16 // itemsize, size - i)):
        before, after = np.uint64(element(like, old, r, i + k)), _new_element(like, news, new, r, i + k)
        found |= int(before != after) << k
    return found


@kernel
def _compare(like, news, old, new, tiles, masks, counts):
    shared = cuda.shared.array(1, np.int32)
    tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
    itemsize, times = itemsize_of(like), itemsize_of(news) // itemsize_of(like)
    width, each = 8 * itemsize, 16 // itemsize
    r = tiles.owners[tile]
    size = tiles.sizes[r]
    unit = (tile - tiles.firsts[r]) * TILE  # the tile's first one in the region
    first = (unit + thread) * each
    p, step = stepping(old.addresses[r], old.runs[r], old.apart[r], itemsize, each, first, size)
    q, far = stepping(new.addresses[r], new.runs[r], new.apart[r], itemsize * times, each, first, size)
    mask = tile * TILE + thread
    if thread == 0:
        shared[0] = 0
    cuda.syncthreads()
    count = 0
    if step != np.uint64(0) and far != np.uint64(0) and (unit + TILE) * each <= size:
        for _ in range(UNITS // 4):  # eight loads are under way before the first is used
            low0, high0 = _both(like, news, p, q)
            low1, high1 = _both(like, news, p + step, q + far)
            low2, high2 = _both(like, news, p + np.uint64(2) * step, q + np.uint64(2) * far)
            low3, high3 = _both(like, news, p + np.uint64(3) * step, q + np.uint64(3) * far)
            m0, m1 = differing(low0, high0, width), differing(low1, high1, width)
            m2, m3 = differing(low2, high2, width), differing(low3, high3, width)
            masks[mask], masks[mask + THREADS] = m0, m1
            masks[mask + 2 * THREADS], masks[mask + 3 * THREADS] = m2, m3
            count += cuda.popc(m0) + cuda.popc(m1) + cuda.popc(m2) + cuda.popc(m3)
            p, q, mask = p + np.uint64(4) * step, q + np.uint64(4) * far, mask + 4 * THREADS
    else:
        for u in range(UNITS):
            i = (unit + u * THREADS + thread) * each
            m = _compared(like, news, old, new, r, i, size) if i < size else 0
            masks[mask + u * THREADS] = m
            count += cuda.popc(m)
    if count:
        cuda.atomic.add(shared, 0, count)
    cuda.syncthreads()
    if thread == 0:
        counts[tile] = shared[0]


class _States(NamedTuple):
    """Two states, on the device."""

    news: DeviceArray
    old: DeviceRegions
    new: DeviceRegions


class _Found(NamedTuple):
    """The memory for what differs."""

    indices: DeviceArray
    values: DeviceArray
    keeps: int  # whether replaced bits are kept
    replaced: DeviceArray


@device
def _put(like, states, r, i, k, out):
    value = _new_element(like, states.news, states.new, r, i)
    if out.keeps:
        out.replaced[k] = element(like, states.old, r, i)
    out.values[k] = value


_place = placer(_put)


def find(
    old: Regions,
    new: Regions,
    indices: DeviceArray,
    values: DeviceArray,
    replaced: DeviceArray | None = None,
    *,
    cast: bool = False,
) -> DeviceArray:
    """Queue the search of what differs between two states, and return its edges (regions + 1,) int64.

    indices uint32, values and, if given, replaced: the memory for indices, new and old bits. Of more changes than it
    has place for, the first are written; the last of the edges says how many there are. Nothing waits.
    cast: the old state is bfloat16 and the new one float32, which is compared and kept as `casts.cast` casts it.
    Raises ValueError if the regions of the two have other sizes or widths.
    """
    widths = (2, 4) if cast else (old.itemsize, old.itemsize)
    if (old.itemsize, new.itemsize) != widths or old.sizes.tolist() != new.sizes.tolist():
        raise ValueError(
            f"expected regions of {' and '.join(map(str, widths))} bytes an element and of the same sizes, found "
            f"{len(old)} of {old.itemsize} bytes with {old.sizes.sum()} elements, and {len(new)} of {new.itemsize} "
            f"with {new.sizes.sum()}"
        )
    marks, values = Marks(old), bits_of(values)
    like, states = example(old.itemsize), _States(example(new.itemsize), old.layout, new.layout)
    launch(_compare, old.count, THREADS, like, *states, old.tiles, marks.masks, marks.counts)
    offsets, edges = marks.add_up()
    kept = empty(1, UINTS[old.itemsize]) if replaced is None else bits_of(replaced)
    found = _Found(indices, values, int(replaced is not None), kept)
    launch(_place, old.count, PLACERS, like, states, old.tiles, marks.address, offsets, found)
    return edges


@kernel
def _gather(like, layout, edges, indices, values):
    r = np.int64(0)
    for j in changes_of_thread(indices.shape[0]):
        r = region_after(edges, r, j)
        values[j] = element(like, layout, r, np.int64(indices[j]))


def gather_all(source: Lines | Regions, edges: DeviceArray, indices: DeviceArray, values: DeviceArray) -> None:
    """Queue that values (k,) become the elements of regions at indices (k,), which are in range."""
    blocks = -(-len(indices) // CHANGES)
    launch(_gather, blocks, THREADS, *_reached(source), edges, indices, bits_of(values))


@kernel
def _scatter(like, layout, edges, indices, values):
    r = np.int64(0)
    for j in changes_of_thread(indices.shape[0]):
        r = region_after(edges, r, j)
        at = address_in(layout.addresses[r], layout.runs[r], layout.apart[r], itemsize_of(like), np.int64(indices[j]))
        # What is read first is in the cache, whole, when a part of it is written: the memory moves 32 bytes at once.
        if load(like, at) != values[j]:
            store(like, at, values[j])


def scatter_all(target: Lines | Regions, edges: DeviceArray, indices: DeviceArray, values: DeviceArray) -> None:
    """Queue that elements of regions at indices (k,), which are in range, become values (k,): one launch."""
    blocks = -(-len(indices) // CHANGES)
    launch(_scatter, blocks, THREADS, *_reached(target), edges, indices, bits_of(values))


@kernel
def _find_wrong(like, layout, edges, indices, values, wrong):
    r = np.int64(0)
    for j in changes_of_thread(indices.shape[0]):
        r = region_after(edges, r, j)
        if element(like, layout, r, np.int64(indices[j])) != values[j]:
            cuda.atomic.max(wrong, 0, np.int64(r + 1))


def find_wrong(target: Lines | Regions, edges: DeviceArray, indices: DeviceArray, values: DeviceArray) -> DeviceArray:
    """Queue the reading back of what `scatter_all` wrote.

    Returns the number of a region that does not hold it, and 1, as (1,) int64; 0 where all do.
    """
    wrong = zeros(1, np.int64)
    blocks = -(-len(indices) // CHANGES)
    launch(_find_wrong, blocks, THREADS, *_reached(target), edges, indices, bits_of(values), wrong)
    return wrong


def _reached(regions: Lines | Regions) -> tuple[DeviceArray, object]:
    return example(regions.itemsize), regions.layout
