"""All bits of the weights, tile by tile: for a receiver that does not hold the base, and to compare every bit.

A sender reads its own pieces and fills buckets. A receiver without the base collects them in a mapped temporary file,
so that nothing is written to its weights before all of it is there and proved; one that compares keeps a tile.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pulse_rl.disk import map_open_file
from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.group.collectives import Bytes
from pulse_rl.patch.apply import finish_despite_interrupt
from pulse_rl.patch.live import Copies, overlapping, shared_memory
from pulse_rl.patch.segments import Entry
from pulse_rl.patch.table import entries_of
from pulse_rl.patch.targets import targets
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box, Shape, tiles
from pulse_rl.weights.layout import Layout, TensorSpec
from pulse_rl.weights.pieces import Pieces, pieces_of, place_view
from pulse_rl.weights.segments import segments


class SenderTable(msgspec.Struct, frozen=True):
    """What one sender owns, as it is told to receivers."""

    tensors: list[tuple[str, str, Shape, list[tuple[Shape, Shape]]]]  # name, dtype, shape, boxes
    tied: dict[str, str]

    @classmethod
    def of(cls, own: Layout) -> "SenderTable":
        return cls([(*row, [(b.offset, b.sizes) for b in boxes]) for *row, boxes in entries_of(own)], own.tied)  # type: ignore[misc]

    @classmethod
    def decode(cls, data: bytes) -> "SenderTable":
        return decode_json(data, cls, "a sender's table")

    @property
    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def entries(self) -> list[Entry]:
        return [
            Entry(name, dtype, shape, tuple(Box(*box) for box in boxes)) for name, dtype, shape, boxes in self.tensors
        ]

    @property
    def nbytes(self) -> int:
        """Of the bits of all that it owns."""
        return sum(box.size * ITEMSIZES[entry.dtype] for entry in self.entries for box in entry.boxes)

    @property
    def elements(self) -> int:
        """Of all that it owns."""
        return sum(box.size for entry in self.entries for box in entry.boxes)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name."""
        return {name: TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in self.tensors}


class SentTile(NamedTuple):
    """A part of one tensor, which is sent at once."""

    entry: Entry
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.size * ITEMSIZES[self.entry.dtype]


def tiles_of(entries: Sequence[Entry]) -> Iterator[SentTile]:
    """The tiles of what a sender owns, in the order of sending."""
    for entry in entries:
        for box in entry.boxes:
            for tile in tiles(entry.shape, box):
                yield SentTile(entry, tile.box)


class Reader:
    """Reads all bits of some weights as one stream of bytes."""

    def __init__(self, own: Layout) -> None:
        self._own, self._tiles = own, tiles_of(entries_of(own))
        self._rest: Bytes = np.empty(0, np.uint8)  # of the tile that was read last

    def take(self, size: int) -> Bytes:
        """The next bytes."""
        found = np.empty(size, np.uint8)
        at = 0
        while at < size:
            if not len(self._rest):
                tile = next(self._tiles)
                bits = place_view(self._own[tile.entry.name], tile.box)
                self._rest = np.ascontiguousarray(bits.read(0, bits.size)).view(np.uint8)
            n = min(size - at, len(self._rest))
            found[at : at + n] = self._rest[:n]
            self._rest = self._rest[n:]
            at += n
        return found


class Tiles:
    """Puts a stream of bytes together into tiles again, of one sender. use: takes each tile and its bits."""

    def __init__(self, entries: Sequence[Entry], use: Callable[[SentTile, UIntArray], None]) -> None:
        self._tiles, self._use = tiles_of(entries), use
        self._open: SentTile | None = None
        self._data: Bytes = np.empty(0, np.uint8)
        self._filled = 0

    def feed(self, data: Bytes) -> None:
        """Take the next bytes."""
        at = 0
        while at < len(data):
            if self._open is None:
                self._open = next(self._tiles)
                self._data, self._filled = np.empty(self._open.nbytes, np.uint8), 0
            n = min(len(data) - at, len(self._data) - self._filled)
            self._data[self._filled : self._filled + n] = data[at : at + n]
            self._filled += n
            at += n
            if self._filled == len(self._data):
                tile, self._open = self._open, None
                self._use(tile, self._data.view(UINTS[ITEMSIZES[tile.entry.dtype]]))


class SpooledVersion:
    """A whole version in a temporary file, in the pieces of the live weights that are to hold it.

    live: the live tensors behind each name. Raises OSError if there is no room for the file.
    """

    def __init__(self, live: Mapping[str, Copies]) -> None:
        self._live = live
        sizes = [piece.box.size * c[0].itemsize for c in live.values() for piece in pieces_of(c[0])]
        nbytes = sum(n + -n % 8 for n in sizes)
        with tempfile.TemporaryFile(prefix="pulse-rl-") as file:
            _allocate(file.fileno(), nbytes)
            memory = np.frombuffer(map_open_file(file, writable=True), np.uint8)
        self._at, self._memory = 0, memory
        self._tensors: dict[str, Bits] = {name: self._like(copies[0]) for name, copies in live.items()}

    def _like(self, tensor: Bits) -> Bits:
        pieces = [piece._replace(bits=self._take(tensor, piece.box)) for piece in pieces_of(tensor)]
        if not isinstance(tensor, Pieces):
            return pieces[0].bits
        return Pieces(tensor.dtype, tensor.itemsize, tensor.shape, pieces)

    def _take(self, tensor: Bits, box: Box) -> Bits:
        nbytes = box.size * tensor.itemsize
        part = self._memory[self._at : self._at + nbytes].view(UINTS[tensor.itemsize]).reshape(box.sizes)
        self._at += nbytes + -nbytes % 8
        return HostBits(tensor.dtype, part)

    def put(self, tile: SentTile, bits: UIntArray) -> None:
        """Keep what these weights hold of a tile."""
        if tile.entry.name in self._tensors:
            for target in targets(self._tensors[tile.entry.name], tile.box):
                part = bits if target.cut is None else bits.reshape(tile.box.sizes)[target.cut].reshape(-1)
                target.bits.write(0, part)

    def digest(self) -> int:
        """Of what this process owns; tensors without elements count."""
        return digests.state_digest(self._tensors)

    def check(self) -> None:
        """Raise BaseMismatchError if the live weights share memory for which the version has different bits."""
        for pair in shared_memory(self._live):
            one, other = (self._tensors[name] for name in pair)
            if any((a != b).any() for a, b in zip(_reads(one), _reads(other), strict=True)):
                raise BaseMismatchError(
                    f"tensors {pair[0]!r} and {pair[1]!r} share memory in these weights, but the version "
                    "holds different bits for them: expected weights in which they are not tied"
                )
        if overlapping(self._live):
            raise BaseMismatchError(
                "tensors overlap in the memory of these weights: expected weights that do not overlap, or that hold "
                "the sender's version already; they are as they were"
            )

    def write(self) -> None:
        """Overwrite the live weights, then read every element back. Raises IntegrityError if one differs."""
        finish_despite_interrupt(self._write)
        for name, copies in self._live.items():
            for copy in copies:
                if any((a != b).any() for a, b in zip(_reads(copy), _reads(self._tensors[name]), strict=True)):
                    raise IntegrityError(f"tensor {name!r} does not hold the bits that were just written", name=name)

    def _write(self) -> None:
        for name, copies in self._live.items():
            for copy in copies:
                for piece, source in zip(pieces_of(copy), pieces_of(self._tensors[name]), strict=True):
                    for start, stop in segments(piece.box.size):
                        piece.bits.write(start, source.bits.read(start, stop))


def _reads(tensor: Bits) -> Iterator[UIntArray]:
    for piece in pieces_of(tensor):
        for start, stop in segments(piece.box.size):
            yield piece.bits.read(start, stop)


def _allocate(descriptor: int, nbytes: int) -> None:
    """Make room now: a full disk found by a write to mapped memory would end the process."""
    os.ftruncate(descriptor, nbytes)
    if nbytes and hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(descriptor, 0, nbytes)


class Comparison:
    """Compares every bit of live weights with the senders'."""

    def __init__(self, live: Mapping[str, Copies]) -> None:
        self._live = live
        self.differing: dict[str, int] = {}  # elements that differ, by tensor

    def put(self, tile: SentTile, bits: UIntArray) -> None:
        """Compare a tile with all that these weights hold of it."""
        for copy in self._live.get(tile.entry.name, ()):
            for target in targets(copy, tile.box):
                part = bits if target.cut is None else bits.reshape(tile.box.sizes)[target.cut].reshape(-1)
                count = int((target.bits.read(0, target.bits.size) != part).sum())
                if count:
                    name = tile.entry.name
                    self.differing[name] = self.differing.get(name, 0) + count
