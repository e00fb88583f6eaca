"""All bits of the weights, tile by tile: for a receiver that does not hold the base, and to compare every bit.

A sender reads its own pieces and fills buckets. A receiver without the base collects them in a mapped temporary file,
so that nothing is written to its weights before all of it is there and proved; one that compares keeps a tile.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import numpy as np

from pulse_rl.disk import map_open_file
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.group.collectives import Bytes
from pulse_rl.patch.live import Copies
from pulse_rl.patch.targets import Target, targets
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.boxes import Box, tiles
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import Piece, pieces_of, place_view, with_bits


def tiles_of(plan: SharePlan, owner: int) -> Iterator[tuple[str, Box]]:
    """The tiles of what a sender owns, each with its tensor's name, in the order of sending."""
    for name, parts in plan.parts.items():
        for part in parts:
            for tile in tiles(plan.tensors[name].shape, part.box) if part.owner == owner else ():
                yield name, tile.box


def owned_nbytes(plan: SharePlan, owner: int) -> int:
    """Bytes of all bits that a sender owns."""
    return sum(
        part.box.size * ITEMSIZES[plan.tensors[name].dtype]
        for name, parts in plan.parts.items()
        for part in parts
        if part.owner == owner
    )


def read_tiles(plan: SharePlan, owner: int, own: Layout) -> Iterator[Bytes]:
    """All bits that a sender owns."""
    for name, box in tiles_of(plan, owner):
        bits = place_view(own[name], box)
        yield np.ascontiguousarray(bits.read(0, bits.size)).view(np.uint8)


class TileFeed:
    """Puts a stream of bytes of one sender together into tiles again.

    use: takes what live weights hold of a tile, and its bits, by tensor.
    """

    def __init__(
        self,
        plan: SharePlan,
        owner: int,
        live: Mapping[str, Copies],
        use: Callable[[str, Target, UIntArray], None],
    ) -> None:
        self._plan, self._tiles, self._live, self._use = plan, tiles_of(plan, owner), live, use
        self._data: Bytes = np.empty(0, np.uint8)  # of the tile at hand
        self._filled = 0

    def feed(self, data: Bytes) -> None:
        """Take the next bytes."""
        at = 0
        while at < len(data):
            if self._filled == len(self._data):
                self._name, self._box = next(self._tiles)
                self._dtype = UINTS[ITEMSIZES[self._plan.tensors[self._name].dtype]]
                self._data, self._filled = np.empty(self._box.size * self._dtype.itemsize, np.uint8), 0
            n = min(len(data) - at, len(self._data) - self._filled)
            self._data[self._filled : self._filled + n] = data[at : at + n]
            self._filled += n
            at += n
            if self._filled == len(self._data):
                self._spread(self._data.view(self._dtype))

    def _spread(self, bits: UIntArray) -> None:
        for copy in self._live.get(self._name, ()):
            for target in targets(copy, self._box):
                part = bits if target.cut is None else bits.reshape(self._box.sizes)[target.cut].reshape(-1)
                self._use(self._name, target, part)


def spool(live: Mapping[str, Copies]) -> Layout:
    """Room for a whole version in a temporary file, in the pieces of the live weights that are to hold it.

    Raises OSError where there is none.
    """
    sizes = [piece.box.size * copies[0].itemsize for copies in live.values() for piece in pieces_of(copies[0])]
    padded = [n + -n % 8 for n in sizes]
    nbytes = sum(padded)
    with tempfile.TemporaryFile(prefix="pulse-rl-") as file:
        os.ftruncate(file.fileno(), nbytes)
        if nbytes and hasattr(os, "posix_fallocate"):  # not on macOS
            # A full disk that is found by a write to mapped memory would end the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = np.frombuffer(map_open_file(file, writable=True), np.uint8)
    begins = accumulate(padded, initial=0)

    def room(piece: Piece) -> Bits:
        dtype = piece.bits.dtype
        return HostBits(dtype, np.ndarray(piece.box.sizes, UINTS[ITEMSIZES[dtype]], memory, next(begins)))

    return Layout((name, with_bits(copies[0], room)) for name, copies in live.items())
