"""Memory on the device that one launch reads or writes: many tensors, or parts of them, of one width.

A *region* is rows of one length and distance, as in `cpu.coding.MemoryRows`; its elements count row by row. Kernels cut
regions into *tiles* of UNITS · THREADS units, a block each; a *unit* is 16 bytes of elements, which a thread loads at
once where they lie together at an address that 16 divides.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.kernels.gpu.device import THREADS, DeviceArray, bits_of, device, itemsize_of, load, upload

UNIT_NBYTES = 16
UNITS = 8  # of a thread in a tile
TILE = UNITS * THREADS  # units
CHANGES = 8 * THREADS  # of a block: a thread searches the region of its first one, and most are in the same


class DeviceRegions(NamedTuple):
    """Where regions lie, (regions,) each, on the device."""

    addresses: DeviceArray  # uint64
    runs: DeviceArray  # int64, elements in a row
    apart: DeviceArray  # int64, bytes from row to row


class Lines(NamedTuple):
    """Regions whose elements are read and written one by one, so that it need not be known how many they have."""

    itemsize: int
    layout: DeviceRegions


class RegionTiles(NamedTuple):
    """How regions are cut, on the device."""

    sizes: DeviceArray  # (regions,) int64, elements
    firsts: DeviceArray  # (regions + 1,) int64, the number of each one's first tile
    owners: DeviceArray  # (tiles,) uint32, the region of each tile


class Regions:
    """Regions of one width, in the order in which results list them."""

    def __init__(self, memory: MemoryRows, itemsize: int) -> None:
        self.memory, self.itemsize = memory, itemsize
        self.sizes: NDArray[np.int64] = memory.rows * memory.runs
        units = -(-self.sizes * itemsize // UNIT_NBYTES)
        tiles = -(-units // TILE)
        self.firsts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(tiles)])
        self.count = int(self.firsts[-1])  # tiles
        if self.sizes.max(initial=0) >= 1 << 32:
            raise ValueError(f"expected regions of fewer than 2^32 elements, found one of {self.sizes.max()}")

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def layout(self) -> DeviceRegions:
        """It is copied to the device once: addresses do not move."""
        return DeviceRegions(upload(self.memory.addresses), upload(self.memory.runs), upload(self.memory.apart))

    @cached_property
    def tiles(self) -> RegionTiles:
        owners = np.repeat(np.arange(len(self), dtype=np.uint32), np.diff(self.firsts))
        return RegionTiles(upload(self.sizes), upload(self.firsts), upload(owners))


def regions_of(arrays: Sequence[DeviceArray]) -> Regions:
    """Contiguous device arrays of one width, each a region."""
    held = [bits_of(array) for array in arrays]
    sizes = np.array([int(np.prod(array.shape)) for array in held], np.int64)
    itemsize = int(held[0].itemsize)
    addresses = np.array([array.data_ptr() for array in held], np.uint64)
    return Regions(MemoryRows(addresses, np.ones_like(sizes), sizes, sizes * itemsize, held), itemsize)


@device
def place_in(run, i):
    """Row and column of element i of rows of this length. Both are below 2^32: a longer division takes longer."""
    if i < run:
        return np.int64(0), i
    row = np.int64(np.uint32(np.uint32(i) // np.uint32(run)))
    return row, i - row * run


@device
def address_in(address, run, apart, itemsize, i):
    """The address of element i of a region."""
    row, column = place_in(run, i)
    return address + np.uint64(row * apart + column * itemsize)


@device
def unit_at(address, run, apart, itemsize, i, size):
    """The address of the unit from element i on if it is 16 bytes of one row, and 16 divides it; 1 otherwise."""
    count = 16 // itemsize
    row, column = place_in(run, i)
    at = address + np.uint64(row * apart + column * itemsize)
    if i + count > size or column + count > run or (at & np.uint64(15)) != np.uint64(0):
        return np.uint64(1)
    return at


@device
def rows_of_step(run, each, size):
    """How many whole rows the elements of THREADS threads are, `each` a thread; 0 if all are in one row, -1 if none."""
    if run == size:
        return np.int64(0)
    count = np.uint32(THREADS * each)
    if run > count or np.uint32(run) % np.uint32(each) != 0 or count % np.uint32(run) != 0:
        return np.int64(-1)
    return np.int64(count // np.uint32(run))


@device
def stepping(address, run, apart, itemsize, each, i, size):
    """Where a thread reads `each` elements from element i on, and how far apart in memory what it reads next lies.

    THREADS threads read what follows one another. The step is 0 where it differs, or where 16 does not divide it all.
    """
    rows = rows_of_step(run, each, size)
    row, column = place_in(run, i)
    at = address + np.uint64(row * apart + column * itemsize)
    step = np.uint64(rows * apart if rows else THREADS * each * itemsize)
    if rows < 0 or ((at | step) & np.uint64(15)) != np.uint64(0):
        return at, np.uint64(0)
    return at, step


@device
def element(like, layout, r, i):
    """Element i of region r."""
    return load(like, address_in(layout.addresses[r], layout.runs[r], layout.apart[r], itemsize_of(like), i))


@device
def region_of(edges, j):
    """The region whose results, from edges[r] to edges[r + 1], include result j."""
    low, high = 0, edges.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if edges[middle] <= j:
            low = middle
        else:
            high = middle
    return low


@device
def region_after(edges, r, j):
    """The region of result j, which comes after one of region r, or after none of region 0."""
    return r if j < edges[r + 1] else region_of(edges, j)


@device
def changes_of_thread(count):
    """The numbers of the changes, of `count`, that are this thread's, in a block of THREADS."""
    first = np.int64(cuda.blockIdx.x) * CHANGES
    return range(first + cuda.threadIdx.x, min(first + CHANGES, count), THREADS)
