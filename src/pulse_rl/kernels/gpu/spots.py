"""Changes of many segments in a device's memory: found, or given to be checked and written. As `cpu.spots`.

Segments are described in host memory, as `Spots`, and copied to the device for the kernels that read them.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels.cpu.coding import MemoryRows, memory_from
from pulse_rl.kernels.cpu.digests import C2
from pulse_rl.kernels.cpu.spots import Elements, Spots
from pulse_rl.kernels.cpu.states import Differences
from pulse_rl.kernels.gpu import digests
from pulse_rl.kernels.gpu.changes import find, find_wrong, gather_all, scatter_all
from pulse_rl.kernels.gpu.device import (
    THREADS,
    add_together,
    bits_of,
    download,
    empty,
    example,
    itemsize_of,
    kernel,
    launch,
    upload,
    zeros,
)
from pulse_rl.kernels.gpu.digests import Flat, mixed, place_term
from pulse_rl.kernels.gpu.regions import (
    CHANGES,
    TILE,
    DeviceRegions,
    Lines,
    Regions,
    changes_of_thread,
    element,
    region_after,
)

ALIGNED = 256  # bytes


# Two states


def _regions(spots: Spots, sizes: NDArray[np.int64], itemsize: int) -> Regions:
    rows = sizes // np.maximum(spots.runs, 1)
    return Regions(MemoryRows(spots.addresses, rows, spots.runs, itemsize * spots.apart, None), itemsize)


def _flat(spots: Spots) -> Flat:
    return Flat(spots.seeds, spots.starts, spots.strides)


def find_in_spots(
    old: Spots, new: Spots, sizes: NDArray[np.int64], itemsize: int, most: int, *, cast: bool = False
) -> Differences:
    """Find what differs between segments of two states. Waits.

    old, new: where they lie. sizes: (segments,) elements. itemsize: of the old state. most: changes to make room for;
    where there are more, they are searched again. cast: as in `changes.find`.
    """
    before, after = _regions(old, sizes, itemsize), _regions(new, sizes, 2 * itemsize if cast else itemsize)
    while True:
        indices, values, replaced = (empty(most, kind) for kind in (np.uint32, UINTS[itemsize], UINTS[itemsize]))
        edges = find(before, after, indices, values, replaced, cast=cast)
        at = download(edges)
        count = int(at[-1])
        if count <= most:
            break
        most = count
    indices, values, replaced = indices[:count], values[:count], replaced[:count]
    delta = digests.delta(before, _flat(old), edges, indices, replaced, values)
    return Differences(at, download(indices), download(values), download(replaced), int(download(delta)[0]))


def digest_spots(spots: Spots, sizes: NDArray[np.int64], itemsize: int) -> int:
    """The sum of the digest's terms of all elements of segments, mod 2^64; each counts once. Waits."""
    return int(download(digests.digest(_regions(spots, sizes, itemsize), _flat(spots)))[0])


# Given changes


@kernel
def _delta(like, layout, flat, times, edges, indices, values, total):
    shared = cuda.shared.array(THREADS, np.uint64)
    gained, r = np.uint64(0), np.int64(0)
    for j in changes_of_thread(indices.shape[0]):
        r, i = region_after(edges, r, j), np.int64(indices[j])
        place = place_term(flat, r, layout.runs[r], i)
        old = mixed(place + np.uint64(element(like, layout, r, i)) * C2)
        gained += np.uint64(times[r]) * (mixed(place + np.uint64(values[j]) * C2) - old)
    add_together(shared, total, gained)


class Overwrites:
    """Changes of many segments, on the device: to be checked, and written in one launch.

    Arguments as of `cpu.spots_delta`, in host memory. Making it waits until they are copied.
    """

    def __init__(self, spots: Spots, counts: NDArray[np.int64], indices: NDArray[np.uint32], values: UIntArray) -> None:
        itemsize = values.itemsize
        columns = [spots.addresses, spots.runs, itemsize * spots.apart, *spots[2:4], spots.seeds, spots.times]
        table = upload(np.stack([each.view(np.int64) for each in columns]))
        addresses, runs, apart, starts, strides, seeds, self._times = table
        self._lines = Lines(itemsize, DeviceRegions(bits_of(addresses), runs, apart))
        self._flat = Flat(bits_of(seeds), starts, strides)
        edges = upload(np.concatenate([[0], np.cumsum(counts)]))
        self._changes = edges, upload(indices), bits_of(upload(values))

    def delta(self) -> int:
        """The change of the digest, mod 2^64, if they are written. Waits."""
        total = zeros(1, np.uint64)
        known = example(self._lines.itemsize), self._lines.layout, self._flat, self._times
        launch(_delta, -(-len(self._changes[1]) // CHANGES), THREADS, *known, *self._changes, total)
        return int(download(total)[0])

    def held(self) -> UIntArray:
        """The bits that memory holds of them. Waits."""
        found = empty(len(self._changes[1]), UINTS[self._lines.itemsize])
        gather_all(self._lines, *self._changes[:2], found)
        return download(found)

    def write(self) -> int | None:
        """Give elements their new values, and read them back. Waits, for that is a proof.

        Returns the number of a segment that does not hold them; None where all do.
        """
        scatter_all(self._lines, *self._changes)
        wrong = int(download(find_wrong(self._lines, *self._changes))[0])
        return wrong - 1 if wrong else None


# Copies


@kernel
def _copy(like, layout, tiles, begins, copies):
    tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
    r = tiles.owners[tile]
    size, elements = tiles.sizes[r], TILE * (16 // itemsize_of(like))
    first = (tile - tiles.firsts[r]) * elements
    for i in range(first + thread, min(first + elements, size), THREADS):
        copies[begins[r] + i] = element(like, layout, r, np.int64(i))


def copy_spots(spots: Spots, sizes: NDArray[np.int64], laid: Elements) -> MemoryRows:
    """A copy of segments on the device, as if they held the elements that are laid over them. Waits for no kernel.

    Each begins at an address that 256 divides.
    """
    itemsize = laid.values.itemsize
    regions = _regions(spots, sizes, itemsize)
    rounded = -(-sizes * itemsize // ALIGNED) * ALIGNED // itemsize
    begins = np.cumsum(rounded) - rounded
    copies = empty(int(rounded.sum()), UINTS[itemsize])
    launch(_copy, regions.count, THREADS, example(itemsize), regions.layout, regions.tiles, upload(begins), copies)
    memory = memory_from(copies.data_ptr(), begins, sizes, itemsize, copies)
    if len(laid.indices):
        edges = upload(np.concatenate([[0], np.cumsum(laid.counts)]))
        scatter_all(Regions(memory, itemsize), edges, upload(laid.indices), upload(laid.values))
    return memory
