"""An older version of weights, read as the newest bits with the overwritten elements laid over them.

A publisher holds the newest bits only, and keeps what each publish overwrites in an overlay. Of an element that is
overwritten several times the oldest value stays, so an older version can be read segment by segment and a patch be made
from it. An overlay is an unlinked temporary file, mapped: the system can take its memory back when it runs short.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.disk import map_open_file
from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, Run, Shape, whole
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import Pieces, Place, within


class Replaced(NamedTuple):
    """Elements of one part of a tensor that were overwritten, with the bits that they held before."""

    name: str  # of the tensor
    place: Place  # the part, which the indices count in
    old: Changes


class Overlay:
    """The bits that elements held at some older version, for all that changed since.

    Takes 4 bytes for each element's index, and the element. replaced: each part of a tensor at most once. Raises
    OSError if there is no room for the file.
    """

    def __init__(self, replaced: Iterable[Replaced]) -> None:
        self._held: dict[tuple[str, Place], Changes] = {}  # by tensor and part
        places, self.nbytes = [], 0
        with tempfile.TemporaryFile(prefix="pulse-rl-") as file:
            for name, part, (indices, values) in replaced:
                places.append(((name, part), self.nbytes, values.dtype, len(values)))
                padding = -values.nbytes % 4
                file.write(values.tobytes() + bytes(padding) + indices.tobytes())
                self.nbytes += values.nbytes + padding + indices.nbytes
            file.flush()
            data = map_open_file(file)
        for key, place, dtype, count in places:
            values = np.frombuffer(data, dtype, count, place)
            indices = np.frombuffer(data, np.uint32, count, place + values.nbytes + -values.nbytes % 4)
            self._held[key] = Changes(indices, values)

    def and_later(self, later: "Overlay") -> "Overlay":
        """This overlay and a later one as one: where both hold an element, the older bits of this one stay."""
        keys = {**self._held, **later._held}
        return Overlay(Replaced(*key, _union(self._held.get(key), later._held.get(key))) for key in keys)

    def replaced(self) -> Iterator[Replaced]:
        """All elements that it holds."""
        for (name, place), old in self._held.items():
            yield Replaced(name, place, old)

    def over(self, newest: Layout) -> dict[str, Bits]:
        """The older version, as a view of the newest one, which must not change while the view is in use."""
        by_name: dict[str, dict[Place, Changes]] = {}
        for (name, place), old in self._held.items():
            by_name.setdefault(name, {})[place] = old
        return {name: laid_over(tensor, by_name.get(name, {})) for name, tensor in newest.items()}


def _union(first: Changes | None, second: Changes | None) -> Changes:
    if first is None or second is None:
        only = first or second
        assert only is not None  # one of them holds the key
        return only
    size = len(first.indices) + len(second.indices)
    indices, values = np.empty(size, np.uint32), np.empty(size, first.values.dtype)
    count = cpu.union(first.indices, first.values, second.indices, second.values, indices, values)
    return Changes(indices[:count], values[:count])


def laid_over(tensor: Bits, changes: Mapping[Place, Changes]) -> Bits:
    """A tensor with other bits laid over some of its elements, to be read only. changes: by part of the tensor."""
    if not changes:
        return tensor
    if isinstance(tensor, Pieces):
        pieces = [
            piece._replace(bits=LaidOver(piece.bits, tensor.shape, piece.box, changes)) for piece in tensor.pieces
        ]
        return Pieces(tensor.dtype, tensor.itemsize, tensor.shape, pieces)
    return LaidOver(tensor, tensor.shape, whole(tensor.shape), changes)


class LaidOver:
    """A part of a tensor with other bits laid over some elements, as `Bits` that can only be read."""

    def __init__(self, bits: Bits, shape: Shape, box: Box, changes: Mapping[Place, Changes]) -> None:
        self._bits, self._whole, self._box = bits, shape, box
        self._changes = changes  # those of other parts of the tensor too
        self.dtype, self.itemsize, self.size, self.shape = bits.dtype, bits.itemsize, bits.size, bits.shape
        self.contiguous = self.writable = False

    def view(self, slices: tuple[slice, ...]) -> Bits:
        offset = tuple(a + along.start for a, along in zip(self._box.offset, slices, strict=True))
        box = Box(offset, tuple(along.stop - along.start for along in slices))
        if box in self._changes:  # the ordinary case: cut as the patches were
            return LaidOver(self._bits.view(slices), self._whole, box, {box: self._changes[box]})
        touching = {place: found for place, found in self._changes.items() if _meets(place, box, self._whole)}
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


def _meets(place: Place, box: Box, shape: Shape) -> bool:
    boxes = place.boxes(shape) if isinstance(place, Run) else [place]
    return any(one.intersect(box) is not None for one in boxes)


def _moved(
    indices: NDArray[np.uint32], place: Place, box: Box, shape: Shape
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
