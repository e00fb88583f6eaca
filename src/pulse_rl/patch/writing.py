"""What is left to do when a version is applied: the changes of a patch, prepared to be written in a moment.

Its segments are tiles, whose rows alternate in memory: written one after the other they take half as long again, as
each page is met several times. Where all of them are rows in plain memory, one call sorts them by where they lie.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.errors import IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.ordering import Stretches, in_order
from pulse_rl.parallel import sliced, spread
from pulse_rl.patch.live import Copies, PlainPieces, plain_pieces
from pulse_rl.patch.work import Lying
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST
from pulse_rl.weights.host_bits import Counter, count_writes, counted_by
from pulse_rl.weights.layout import derived

BATCH = 1 << 15  # fewest changes worth a separate task: about 0.3 ms to write and to read back
PART = 1 << 11  # changes of one part of a batch: those are read back before the next ones are written
REACH = 1 << 31  # elements that the indices of one part span


class Ordered(NamedTuple):
    """Changes of plain memory of one width, piece after piece, in the order of memory."""

    pieces: PlainPieces
    numbers: NDArray[np.int64]  # (k,) of the pieces that change
    addresses: NDArray[np.int64]  # (k,) that the indices count from
    edges: NDArray[np.int64]  # (k + 1,) where the changes of each begin, and the last one's end
    changes: Changes

    def batches(self) -> Iterator["Batch"]:
        """In host memory of about BATCH changes, on a device all. What can be done now is not done in the pause."""
        device, (indices, values) = self.pieces.device, self.changes
        most = PART if device is HOST else REACH
        parts = -(-np.diff(self.edges) // most)
        piece = np.repeat(np.arange(len(parts)), parts)
        starts = self.edges[piece] + most * (np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts))
        sizes = np.minimum(most, self.edges[piece + 1] - starts)
        for some in sliced(sizes, BATCH) if device is HOST else [slice(None)]:
            here = slice(starts[some][0], starts[some][-1] + sizes[some][-1])
            spots = _rows_at(self.addresses[piece[some]])
            overwrite = device.prepare(spots, sizes[some], indices[here], values[here])
            yield Batch(self, piece[some], overwrite)

    def counted(self) -> list[Counter]:
        """Who counts the writes to these pieces."""
        found = self.pieces.counters[np.unique(self.pieces.counted[self.numbers])].tolist()
        return [counter for counter in found if counter is not None]


class Batch(NamedTuple):
    """Some of these changes, which one thread writes in one call."""

    ordered: Ordered
    at: NDArray[np.int64]  # (parts,) in which of the pieces that change each part of the batch lies
    overwrite: Callable[[], int | None]  # returns the number of a part that reads back as other bits

    def write(self) -> None:
        """Overwrite elements and read every one of them back. Raises IntegrityError if one has other bits."""
        wrong = self.overwrite()
        if wrong is not None:
            raise not_written(self.ordered.pieces.names[self.ordered.numbers[self.at[wrong]]])


class Write(NamedTuple):
    """Changes of any live memory."""

    bits: Bits
    name: str  # of the tensor
    changes: Changes

    def write(self) -> None:
        """As `Batch.write`."""
        indices, values = self.changes
        self.bits.scatter(0, indices, values)
        if (self.bits.gather(0, indices) != values).any():
            raise not_written(self.name)


def not_written(name: str) -> IntegrityError:
    """The error for a tensor in which an element has other bits than were written."""
    return IntegrityError(f"tensor {name!r} does not hold the bits that were just written", name=name)


class Writes:
    """All writes of a patch: in the order of memory, or to any memory, of which no two share an element."""

    def __init__(self, ordered: Sequence[Ordered], others: Sequence[Write] = ()) -> None:
        changes = [*(one.changes for one in ordered), *(one.changes for one in others)]
        self.nbytes = sum(indices.nbytes + values.nbytes for indices, values in changes)
        on_device, here = [list[Batch | Write](), list[Batch | Write](others)]
        for one in ordered:
            (here if one.pieces.device is HOST else on_device).extend(one.batches())
        self._on_device, self._here = on_device, here
        self._counted = counted_by(chain.from_iterable(one.counted() for one in ordered))

    def write(self) -> None:
        """Write everything. May be repeated. Raises as `Batch.write`."""
        try:
            # A device's come first, and on the caller's thread, which knows the caller's stream.
            for batch in self._on_device:
                batch.write()
            spread(lambda one: one.write(), self._here)
        finally:  # once for each: in the threads, which hold Python's lock for it in turns, it took a millisecond
            count_writes(self._counted)


def _rows_at(addresses: NDArray[np.int64]) -> cpu.Spots:
    """Where parts lie in plain memory. Each is one row."""
    every = np.ones(len(addresses), np.int64)
    long = REACH * every
    return cpu.Spots(addresses.view(np.uint64), long, 0 * every, long, long, every.view(np.uint64), every)


def in_memory_order(
    several: Sequence[tuple[Lying, NDArray[np.int64]]], live: Mapping[str, Copies]
) -> list[Ordered] | None:
    """The changes in order, of each width; with those, the elements of each segment.

    live: the tensors, of which no two share memory.

    None where that is not known to be faster: tensors alternate in memory, or changes lie too unevenly.
    """
    pieces = derived(live, plain_pieces)
    if pieces is None:
        return None
    found: list[Ordered] = []
    for lying, sizes in several:
        if len(lying.indices):
            ordered = _of_width(lying, sizes, pieces)
            if ordered is None:
                return None
            found.append(ordered)
    return found


def _of_width(lying: Lying, segment_sizes: NDArray[np.int64], pieces: PlainPieces) -> Ordered | None:
    """The same for elements of one width, of which some change. segment_sizes: elements of each segment."""
    spots, counts, indices, values = lying
    used, itemsize = np.flatnonzero(counts), values.itemsize
    rows = segment_sizes[used] // spots.runs[used]
    start = spots.addresses[used].view(np.int64)
    end = start + itemsize * ((rows - 1) * spots.apart[used] + spots.runs[used])
    order = np.argsort(start, kind="stable")
    members, start, end = used[order], start[order], np.maximum.accumulate(end[order])
    owners = np.searchsorted(pieces.addresses, start, "right") - 1
    edges = np.flatnonzero(np.append(True, start[1:] >= end[:-1]))  # where memory begins that nothing before reaches
    ends = end[np.append(edges[1:], len(end)) - 1]
    if (owners < 0).any() or (ends > pieces.ends[owners[edges]]).any():
        return None  # a stretch that is no piece's alone
    edges = np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))
    here, ends = owners[edges], end[np.append(edges[1:], len(end)) - 1]
    sizes = (ends - start[edges]) // itemsize
    if (sizes >= REACH).any():
        return None
    stretches = Stretches(members, np.append(edges, len(members)), start[edges], sizes)
    sorted_changes = in_order(spots, stretches, counts, indices, values)
    if sorted_changes is None:
        return None
    stops = np.cumsum(np.add.reduceat(counts[members], edges))
    return Ordered(pieces, here, start[edges], np.append(0, stops), Changes(*sorted_changes))
