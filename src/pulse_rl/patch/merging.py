"""The changes of patches as one write for each piece of live memory: what is left to do when a version is applied.

The write of a segment costs some microseconds beside its changes, and a small model has a thousand segments. Of several
patches that change an element the last one counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.parallel import spread
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.pieces import Piece, touching, within

BATCH = 1 << 15  # fewest changes worth a separate task: about 0.3 ms to write and to read back
PART = 1 << 11  # changes of one part of a batch: those are read back before the next ones are written
REACH = 1 << 31  # elements that the indices of one write span


class Write(NamedTuple):
    """Changes of some live memory."""

    bits: Bits
    name: str  # of the tensor
    start: int  # that the indices count from
    changes: Changes


class _Collected(NamedTuple):
    """What goes to one piece of live memory."""

    bits: Bits
    name: str
    positions: list[NDArray[np.int64]]  # flat, in the piece
    values: list[UIntArray]


class Merged:
    """Changes, collected by the memory that they go to, from the first patch to the last."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Collected] = {}  # by the identity of the memory's Bits

    def add(self, name: str, tensor: Bits, place: Box, changes: Changes) -> None:
        """Collect the changes of a segment. tensor: the live one."""
        for piece in touching(tensor, place):
            own = _own(piece, place, changes)
            if own is not None:
                found = self._pieces.setdefault(id(piece.bits), _Collected(piece.bits, name, [], []))
                found.positions.append(own[0])
                found.values.append(own[1])

    def writes(self) -> list[Write]:
        """All that was collected; of each element the last value."""
        found = []
        for bits, name, several, values in self._pieces.values():
            positions, new = np.concatenate(several), np.concatenate(values)
            order = np.argsort(positions, kind="stable")
            last = np.append(positions[order][1:] != positions[order][:-1], True)
            order = order[last]
            positions, new = positions[order], new[order]
            edges = np.searchsorted(positions, np.arange(0, bits.size + REACH, REACH))
            for number, (a, b) in enumerate(zip(edges, edges[1:], strict=False)):
                if a < b:
                    start = number * REACH
                    found.append(
                        Write(bits, name, start, Changes((positions[a:b] - start).astype(np.uint32), new[a:b]))
                    )
        return found


def _own(piece: Piece, place: Box, changes: Changes) -> tuple[NDArray[np.int64], UIntArray] | None:
    """The changes of a segment that lie in a piece: flat positions in it, and values. None without any."""
    indices, values = changes
    if not place.inside(piece.box):
        common = place.intersect(piece.box)
        if common is None:
            return None
        indices, chosen = within(indices.astype(np.int64), place.sizes, common.slices(place))
        if not len(indices):
            return None
        place, values = common, values[chosen]
    place = Box(tuple(a - b for a, b in zip(place.offset, piece.box.offset, strict=True)), place.sizes)
    at = place.positions(piece.box.sizes)
    positions = np.empty(len(indices), np.int64)
    cpu.positions(at.starts, at.run, indices, positions)
    return positions, values


class Batch:
    """Some writes that one thread does. Those to plain memory, of elements of one width, are one call.

    writes: all to one device, of one width; or one write to other memory.
    """

    def __init__(self, writes: list[Write]) -> None:
        self._names = [write.name for write in writes]
        changes = [write.changes for write in writes]
        joined = changes[0] if len(changes) == 1 else Changes(*map(np.concatenate, zip(*changes, strict=True)))
        self.nbytes = joined.indices.nbytes + joined.values.nbytes  # memory of the changes
        device = _device_at(writes[0])
        self.on_device = device is not None and device is not HOST
        # Plain memory, whose writes `write_all` counts.
        self.memory = [write.bits for write in writes if device and isinstance(write.bits, HostBits | TorchBits)]
        if device is None:
            self._write: Callable[[], int | None] = partial(_overwrite, writes[0])
        else:  # what can be done now is not done in the pause
            counts = np.array([len(one.indices) for one in changes], np.int64)
            self._write = device.prepare(_spots(writes), counts, *joined)

    def write(self) -> None:
        """Overwrite elements and read every one of them back. Raises IntegrityError if one has other bits."""
        wrong = self._write()
        if wrong is not None:
            name = self._names[wrong]
            raise IntegrityError(f"tensor {name!r} does not hold the bits that were just written", name=name)


def _overwrite(write: Write) -> int | None:
    """Write to other than plain memory, and read it back. Returns 0 if an element has other bits."""
    bits, _, start, (indices, values) = write
    bits.scatter(start, indices, values)
    return 0 if (bits.gather(start, indices) != values).any() else None


def _device_at(write: Write) -> Device | None:
    """The device whose kernels reach plain memory that is written; None for other memory."""
    bits = write.bits
    return bits.device if isinstance(bits, HostBits | TorchBits) and bits.contiguous else None


def _spots(writes: Sequence[Write]) -> cpu.Spots:
    """Where writes to plain memory lie. Each is one row."""
    every = np.ones(len(writes), np.int64)
    addresses = [w.bits.address + w.start * w.bits.itemsize for w in writes if isinstance(w.bits, HostBits | TorchBits)]
    long = REACH * every
    return cpu.Spots(np.array(addresses, np.uint64), long, 0 * every, long, long, every.view(np.uint64), every)


def batches(writes: Iterable[Write]) -> Iterator[Batch]:
    """Writes in batches: in host memory of about BATCH changes, on a device all of one width.

    Each part of a write to memory that is not plain is one batch.
    """
    collected: dict[tuple[Device, int], list[Write]] = {}  # by device, and the width of elements
    counts: dict[tuple[Device, int], int] = {}  # of the changes collected
    for write in writes:
        indices, values = write.changes
        device = _device_at(write)
        if device is None:
            for at in range(0, len(indices), BATCH):
                end = at + BATCH
                yield Batch([write._replace(changes=Changes(indices[at:end], values[at:end]))])
            continue
        key = device, write.bits.itemsize
        batch = collected.setdefault(key, [])
        if device is not HOST:
            batch.append(write)
            continue
        for at in range(0, len(indices), PART):
            end = at + PART
            batch.append(write._replace(changes=Changes(indices[at:end], values[at:end])))
            counts[key] = counts.get(key, 0) + len(batch[-1].changes.indices)
            if counts[key] >= BATCH:
                yield Batch(batch)
                batch.clear()
                counts[key] = 0
    yield from (Batch(batch) for batch in collected.values() if batch)


def write_all(batched: Sequence[Batch]) -> None:
    """Write everything. May be repeated. Raises as `Batch.write`."""
    try:
        # A device's come first, and on the caller's thread, which knows the caller's stream.
        for batch in batched:
            if batch.on_device:
                batch.write()
        spread(Batch.write, [batch for batch in batched if not batch.on_device])
    finally:  # here and once for each: in the threads, which hold Python's lock for it in turns, it took a millisecond
        for bits in {id(bits): bits for batch in batched for bits in batch.memory}.values():
            bits.count_write()
