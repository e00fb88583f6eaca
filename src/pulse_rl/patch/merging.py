"""The changes of patches as one write for each piece of live memory: what is left to do when a version is applied.

The write of a segment costs some microseconds beside its changes, and a small model has a thousand segments. Of several
patches that change an element the last one counts.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.parallel import sliced, spread
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.host_bits import count_writes, counted_in
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


class Ordered(NamedTuple):
    """Changes of plain memory of one device and width, piece after piece, in the order of memory."""

    memory: list[HostBits | TorchBits]  # (pieces,)
    names: list[str]  # of their tensors
    addresses: NDArray[np.int64]  # (pieces,) that the indices count from
    edges: NDArray[np.int64]  # (pieces + 1,) where the changes of each begin, and the last one's end
    changes: Changes

    def batches(self) -> Iterator["Batch"]:
        """In host memory of about BATCH changes, on a device all."""
        counts, device = np.diff(self.edges), self.memory[0].device
        most = PART if device is HOST else REACH
        parts = -(-counts // most)
        piece = np.repeat(np.arange(len(counts)), parts)
        starts = self.edges[piece] + most * (np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts))
        sizes = np.minimum(most, self.edges[piece + 1] - starts)
        assert device is not None
        for some in sliced(sizes, BATCH) if device is HOST else [slice(None)]:
            begin, end = starts[some][0], starts[some][-1] + sizes[some][-1]
            changes = Changes(self.changes.indices[begin:end], self.changes.values[begin:end])
            here = piece[some]
            spots = _rows_at(self.addresses[here])
            names, memory = [self.names[at] for at in here], [self.memory[at] for at in dict.fromkeys(here.tolist())]
            yield Batch(names, changes, memory, device, device.prepare(spots, sizes[some], *changes))


class Batch:
    """Some writes that one thread does. Those to plain memory, of elements of one width, are one call.

    names: of the tensors, for each of the writes. memory: plain memory, whose writes are to be counted. device: whose
    kernels write; None for other memory. write: writes, and returns the number of one that reads back as other bits.
    """

    def __init__(
        self,
        names: list[str],
        changes: Changes,
        memory: list[HostBits | TorchBits],
        device: Device | None,
        write: Callable[[], int | None],
    ) -> None:
        self._names, self._write, self.memory = names, write, memory
        self.nbytes = changes.indices.nbytes + changes.values.nbytes  # memory of the changes
        self.on_device = device is not None and device is not HOST

    @classmethod
    def of(cls, writes: list[Write]) -> "Batch":
        """writes: all to one device, of one width; or one write to other memory."""
        several, device = [write.changes for write in writes], _device_at(writes[0])
        changes = several[0] if len(several) == 1 else Changes(*map(np.concatenate, zip(*several, strict=True)))
        if device is None:
            return cls([writes[0].name], changes, [], None, partial(_overwrite, writes[0]))
        memory = [write.bits for write in writes if isinstance(write.bits, HostBits | TorchBits)]
        addresses = [bits.address + write.start * bits.itemsize for bits, write in zip(memory, writes, strict=True)]
        counts = np.array([len(one.indices) for one in several], np.int64)
        # What can be done now is not done in the pause.
        write = device.prepare(_rows_at(np.array(addresses, np.int64)), counts, *changes)
        return cls([write.name for write in writes], changes, memory, device, write)

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


def _rows_at(addresses: NDArray[np.int64]) -> cpu.Spots:
    """Where writes to plain memory lie. Each is one row."""
    every = np.ones(len(addresses), np.int64)
    long = REACH * every
    return cpu.Spots(addresses.view(np.uint64), long, 0 * every, long, long, every.view(np.uint64), every)


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
                yield Batch.of([write._replace(changes=Changes(indices[at:end], values[at:end]))])
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
                yield Batch.of(batch)
                batch.clear()
                counts[key] = 0
    yield from (Batch.of(batch) for batch in collected.values() if batch)


class Writes:
    """All writes of a version. What can be done now is not done in the pause."""

    def __init__(self, batched: Iterable[Batch] = ()) -> None:
        found = list(batched)
        self._on_device = [batch for batch in found if batch.on_device]
        self._here = [batch for batch in found if not batch.on_device]
        self._counted = counted_in(dict.fromkeys(chain.from_iterable(batch.memory for batch in found)))
        self.nbytes = sum(batch.nbytes for batch in found)  # memory of the changes

    def write(self) -> None:
        """Write everything. May be repeated. Raises as `Batch.write`."""
        try:
            # A device's come first, and on the caller's thread, which knows the caller's stream.
            for batch in self._on_device:
                batch.write()
            spread(Batch.write, self._here)
        finally:  # once for each: in the threads, which hold Python's lock for it in turns, it took a millisecond
            count_writes(self._counted)
