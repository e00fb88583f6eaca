"""The changes of patches as one write for each piece of live memory: what is left to do when a version is applied.

The write of a segment costs some microseconds beside its changes, and a small model has a thousand segments. Of several
patches that change an element the last one counts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.errors import IntegrityError
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.pieces import Piece, Place, pieces_of, within

BATCH = 1 << 15  # fewest changes worth a separate task: about 0.3 ms to write and to read back
REACH = 1 << 31  # elements that the indices of one write span


class Write(NamedTuple):
    """Changes of some live memory."""

    bits: Bits
    name: str  # of the tensor
    start: int  # that the indices count from
    changes: Changes

    @property
    def nbytes(self) -> int:
        """Memory of the changes."""
        return self.changes.indices.nbytes + self.changes.values.nbytes


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

    def add(self, name: str, tensor: Bits, place: Place, changes: Changes) -> None:
        """Collect the changes of a segment. tensor: the live one."""
        for piece in pieces_of(tensor):
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


def _own(piece: Piece, place: Place, changes: Changes) -> tuple[NDArray[np.int64], UIntArray] | None:
    """The changes of a segment that lie in a piece: flat positions in it, and values. None without any."""
    indices, values = changes
    if isinstance(place, Box) and not place.inside(piece.box):
        common = place.intersect(piece.box)
        if common is None:
            return None
        indices, chosen = within(indices.astype(np.int64), place.sizes, common.slices(place))
        if not len(indices):
            return None
        place, values = common, values[chosen]
    if isinstance(place, Box):
        place = Box(tuple(a - b for a, b in zip(place.offset, piece.box.offset, strict=True)), place.sizes)
    at = place.positions(piece.box.sizes)
    positions = np.empty(len(indices), np.int64)
    cpu.positions(at.starts, at.run, indices, positions)
    return positions, values


def write_all(writes: Sequence[Write]) -> None:
    """Overwrite elements and read every one of them back. May be repeated.

    Raises IntegrityError if an element does not read back as written.
    """
    deque(ordered_map(_write_batch, _batches(writes)), maxlen=0)


def _batches(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Runs of writes of about BATCH changes each."""
    batch, size = list[Write](), 0
    for bits, name, start, (indices, values) in writes:
        for at in range(0, len(indices), BATCH):
            part = Changes(indices[at : at + BATCH], values[at : at + BATCH])
            batch.append(Write(bits, name, start, part))
            size += len(part.indices)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def _write_batch(batch: list[Write]) -> None:
    for bits, name, start, (indices, values) in batch:
        bits.scatter(start, indices, values)
        if (bits.gather(start, indices) != values).any():
            raise IntegrityError(f"tensor {name!r} does not hold the bits that were just written", name=name)
