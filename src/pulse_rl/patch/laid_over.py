"""A tensor with other bits laid over some of its elements, wherever it lies. `overlay` reads plain memory faster."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, Shape, whole
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.pieces import with_bits, within


def laid_over(tensor: Bits, changes: Mapping[Box, Changes]) -> Bits:
    """A tensor with other bits laid over some of its elements, to be read only. changes: by part of the tensor."""
    if not changes:
        return tensor
    return with_bits(tensor, lambda piece: LaidOver(piece.bits, tensor.shape, piece.box, changes))


class LaidOver:
    """A part of a tensor with other bits laid over some elements, as `Bits` that can only be read."""

    def __init__(self, bits: Bits, shape: Shape, box: Box, changes: Mapping[Box, Changes]) -> None:
        self._bits, self._whole, self._box = bits, shape, box
        self._changes = changes  # those of other parts of the tensor too
        self.dtype, self.itemsize, self.size, self.shape = bits.dtype, bits.itemsize, bits.size, bits.shape
        self.contiguous = self.writable = False

    def view(self, slices: tuple[slice, ...]) -> Bits:
        offset = tuple(a + along.start for a, along in zip(self._box.offset, slices, strict=True))
        box = Box(offset, tuple(along.stop - along.start for along in slices))
        if box in self._changes:  # the ordinary case: cut as the patches were
            return LaidOver(self._bits.view(slices), self._whole, box, {box: self._changes[box]})
        touching = {place: found for place, found in self._changes.items() if place.intersect(box) is not None}
        view = self._bits.view(slices)
        return LaidOver(view, self._whole, box, touching) if touching else view

    def read(self, start: int, stop: int) -> UIntArray:
        bits = self._bits.read(start, stop)
        if not self._changes:
            return bits
        bits = bits.copy()
        for place, changes in self._changes.items():
            indices, chosen = _moved(changes.indices, place, self._box, self._whole)
            inside = (start <= indices) & (indices < stop)
            bits[indices[inside] - start] = changes.values[chosen][inside]
        return bits

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        values = self._bits.gather(start, indices)
        wanted = start + indices.astype(np.int64)
        for place, changes in self._changes.items():
            found, chosen = _moved(changes.indices, place, self._box, self._whole)
            if len(found):  # in ascending order, as those that are wanted are
                at = np.minimum(np.searchsorted(found, wanted), len(found) - 1)
                equal = found[at] == wanted
                values[equal] = changes.values[chosen][at[equal]]
        return values

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        raise TypeError("an older version cannot be written")

    def write(self, start: int, values: UIntArray) -> None:
        raise TypeError("an older version cannot be written")

    @property
    def storage(self) -> object:
        return ("laid over", id(self))

    @property
    def extent(self) -> tuple[object, int, int]:
        return self._bits.extent


def _moved(
    indices: NDArray[np.uint32], place: Box, box: Box, shape: Shape
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The flat indices in a box of the elements that lie in it, of those at flat indices (k,) in another part.

    Returns them, (m,), and which of the k they are, (k,).
    """
    if place == box:
        return indices.astype(np.int64), np.ones(len(indices), bool)
    at = place.positions(shape)
    flat = at.starts[indices // np.uint32(at.run)] + indices % np.uint32(at.run)
    local, chosen = within(flat, shape, box.slices(whole(shape)))
    return local.astype(np.int64), chosen
