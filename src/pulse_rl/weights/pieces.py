"""Pieces: the parts of a tensor that one process holds, and what of a tensor they are.

A whole tensor is the piece that is all of it. A sharded one is `Pieces`: boxes of the global tensor, each with the live
memory that holds it. `place_view` gives the part of either that a patch codes on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.errors import BaseMismatchError
from pulse_rl.weights.bits import Bits, HostBits, as_bits
from pulse_rl.weights.box_sets import BoxSet, cut_apart
from pulse_rl.weights.boxes import Box, FlatRun, Shape, whole
from pulse_rl.weights.host_bits import Counter

Place: TypeAlias = Box | FlatRun


class Shard:
    """A tensor that is a part of a larger one, to be published or synced as that part.

    Args:
        tensor: A torch tensor or NumPy array: the live memory of the part, of any strides and dtype.
        shape: The shape of the whole tensor.
        offset: Where the part begins along each dimension; its sizes are the tensor's own shape.
        flat_offset: Instead of `offset`, for a 1-D tensor: it holds the whole tensor's elements from this flat
            row-major position on.

    Raises:
        ValueError: Both or none of the offsets are given, or the part does not lie within the whole.
    """

    def __init__(
        self,
        tensor: Any,
        *,
        shape: Sequence[int],
        offset: Sequence[int] | None = None,
        flat_offset: int | None = None,
    ) -> None:
        self.tensor = tensor
        self.shape: Shape = tuple(int(n) for n in shape)
        sizes = tuple(int(n) for n in tensor.shape)
        if (offset is None) == (flat_offset is None):
            raise ValueError("Shard: expected offset=… or flat_offset=…, one of them")
        if offset is not None:
            box = Box(tuple(int(n) for n in offset), sizes)
            if len(box.offset) != len(self.shape) or len(sizes) != len(self.shape) or not _fits(box, self.shape):
                raise ValueError(
                    f"Shard: expected a part of a tensor of shape {list(self.shape)}, found one of shape "
                    f"{list(sizes)} at offset {list(box.offset)}"
                )
            self.place: Place = box
        elif flat_offset is not None:
            run, elements = FlatRun(int(flat_offset), int(flat_offset) + sum(sizes)), whole(self.shape).size
            if len(sizes) != 1 or not 0 <= run.start <= run.stop <= elements:
                raise ValueError(
                    f"Shard: expected a 1-D tensor within the {elements} elements of shape {list(self.shape)}, found "
                    f"shape {list(sizes)} at flat offset {flat_offset}"
                )
            self.place = run

    def boxes(self) -> list[tuple[Box, Any]]:
        """Cut what it holds into boxes.

        Returns:
            Each box of the whole tensor that it holds, with the view of its memory that holds it.
        """
        if not whole(self.shape).size:
            return [(whole(self.shape), self.tensor.reshape(self.shape))]  # without elements, yet of the model
        if isinstance(self.place, Box):
            return [(self.place, self.tensor)] if self.place.size else []
        found, at = [], 0
        for box in self.place.boxes(self.shape):
            found.append((box, self.tensor[at : at + box.size].reshape(box.sizes)))
            at += box.size
        return found

    def __repr__(self) -> str:
        return f"Shard({self.place} of {list(self.shape)})"


def _fits(box: Box, shape: Shape) -> bool:
    return all(a >= 0 and a + n <= size for a, n, size in zip(box.offset, box.sizes, shape, strict=True))


class Piece(NamedTuple):
    """One part of a tensor, in the memory of this process.

    Of elements that lie in memory k times, over all processes, the digest counts one copy k times and each other copy
    −1 times. So the sum over all is the digest of the weights only where all copies hold the same bits.
    """

    box: Box
    bits: Bits  # of the box's sizes
    times: int = 1  # that the digest counts it; 0 for what only helps to decode

    @property
    def owned(self) -> bool:
        """Whether this process publishes it; of replicas one does."""
        return self.times > 0


class Pieces:
    """What this process holds of one tensor, as `Bits` of the whole.

    Elements that are not in its memory cannot be read or written: that raises BaseMismatchError. Pieces may overlap
    where a process holds a part twice; then all of them are written.

    memory: what is equal for tied tensors alone, where this process holds nothing of them; None if nothing tells.
    """

    def __init__(self, dtype: str, shape: Shape, pieces: Sequence[Piece], memory: object = None) -> None:
        self.dtype, self.itemsize, self.shape = dtype, ITEMSIZES[dtype], shape
        self.size = whole(shape).size
        self._memory = object() if memory is None and not pieces else memory  # equal to nothing else
        self.pieces = tuple(sorted(pieces, key=lambda piece: (piece.box, -piece.times)))

    def of(self, pieces: Sequence[Piece]) -> Pieces:
        """The same tensor in other pieces."""
        return Pieces(self.dtype, self.shape, pieces, self._memory)

    def read(self, start: int, stop: int) -> UIntArray:
        views = [place_view(self, box) for box in FlatRun(start, stop).boxes(self.shape)]
        parts = [view.read(0, view.size) for view in views]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, UINTS[self.itemsize])

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        found, values = np.zeros(len(indices), bool), np.empty(len(indices), UINTS[self.itemsize])
        for bits, local, chosen in self._here(start, indices):
            values[chosen] = bits.gather(0, local)
            found |= chosen
        if not found.all():
            raise self._elsewhere(int(start + indices[~found][0]))
        return values

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        found = np.zeros(len(indices), bool)
        here = list(self._here(start, indices))
        for _, _, chosen in here:
            found |= chosen
        if not found.all():
            raise self._elsewhere(int(start + indices[~found][0]))
        for bits, local, chosen in here:
            bits.scatter(0, local, values[chosen])

    def write(self, start: int, values: UIntArray) -> None:
        self.scatter(start, np.arange(len(values), dtype=np.uint32), values)

    def _here(
        self, start: int, indices: NDArray[np.uint32]
    ) -> Iterator[tuple[Bits, NDArray[np.uint32], NDArray[np.bool_]]]:
        """For each piece: its memory, the flat indices in it, and which of the indices they are."""
        flat = start + indices.astype(np.int64)
        for piece in self.pieces:
            local, chosen = within(flat, self.shape, piece.box.slices(whole(self.shape)))
            if len(local):
                yield piece.bits, local, chosen

    def _elsewhere(self, flat: int) -> BaseMismatchError:
        return BaseMismatchError(
            f"element {flat} of a tensor of shape {list(self.shape)} is not in the memory of this process"
        )

    def view(self, slices: tuple[slice, ...]) -> Bits:
        starts = tuple(along.start for along in slices)
        return place_view(self, Box(starts, tuple(along.stop - along.start for along in slices)))

    @property
    def contiguous(self) -> bool:
        return False

    @property
    def writable(self) -> bool:
        return all(piece.bits.writable for piece in self.pieces)

    @cached_property
    def _set(self) -> BoxSet:
        return BoxSet([piece.box for piece in self.pieces])

    def touching(self, box: Box) -> list[Piece]:
        """The pieces that hold an element of a box."""
        return [self.pieces[number] for number in self._set.touching(box)]

    @property
    def held(self) -> int:
        """Number of elements in memory here."""
        return sum(piece.box.size for piece in self.pieces)

    @property
    def storage(self) -> object:
        return (self._memory, *((piece.box, piece.bits.storage) for piece in self.pieces))

    @property
    def extent(self) -> tuple[object, int, int]:
        if not self.pieces:
            return "nowhere", 0, 0
        device, first, last = zip(*(piece.bits.extent for piece in self.pieces), strict=True)
        return device[0], min(first), max(last)


def pieces_of(tensor: Bits) -> tuple[Piece, ...]:
    """The pieces of a tensor; of a whole one, one."""
    return tensor.pieces if isinstance(tensor, Pieces) else (Piece(whole(tensor.shape), tensor),)


def with_bits(tensor: Bits, bits: Callable[[Piece], Bits]) -> Bits:
    """The same tensor in the same pieces, each with other bits."""
    if not isinstance(tensor, Pieces):
        return bits(*pieces_of(tensor))
    return tensor.of([piece._replace(bits=bits(piece)) for piece in tensor.pieces])


def touching(tensor: Bits, box: Box) -> Sequence[Piece]:
    """The pieces of a tensor that hold an element of a box."""
    return tensor.touching(box) if isinstance(tensor, Pieces) else pieces_of(tensor)


def join(parts: Iterable[Any], cast: str | None = None) -> Pieces:
    """View shards of one tensor as Pieces.

    parts: at least one Shard, all of one shape. cast: as for `as_bits`. Raises TypeError or ValueError.
    """
    pieces: list[Piece] = []
    kinds: dict[tuple[str, Shape], None] = {}
    for shard in parts:
        if not isinstance(shard, Shard):
            raise TypeError(
                f"expected a tensor, an array or a list of pulse.Shard, found {type(shard).__name__} in a list"
            )
        bits = as_bits(shard.tensor, cast)  # of an empty shard too: its dtype counts
        kinds[(bits.dtype, shard.shape)] = None
        for box, view in shard.boxes():
            pieces.append(Piece(box, bits if view is shard.tensor else counted(as_bits(view, cast), shard.tensor)))
    if len(kinds) != 1:
        found = ", ".join(f"{dtype} of {list(shape)}" for dtype, shape in kinds) or "none"
        raise ValueError(f"expected shards of one tensor, found {found}")
    ((dtype, shape),) = kinds
    return Pieces(dtype, shape, pieces)


def counted(bits: Bits, tensor: Any) -> Bits:
    """The same bits, whose writes torch counts for this tensor, which they are a part of."""
    if not isinstance(bits, HostBits) or bits.counter is None:
        return bits
    return HostBits(bits.dtype, bits.array, Counter(tensor))


def place_view(tensor: Bits, place: Box) -> Bits:
    """One part of a tensor as Bits of its own, flat positions counted within it. The same memory, no copy.

    Raises BaseMismatchError for a part that is not in the memory of this process.
    """
    if not isinstance(tensor, Pieces):
        return tensor if place.sizes == tensor.shape else tensor.view(place.slices(whole(tensor.shape)))
    for piece in tensor.touching(place):
        if place == piece.box:
            return piece.bits
        if place.inside(piece.box):
            return piece.bits.view(place.slices(piece.box))
    mosaic = Mosaic(tensor, place)
    mosaic.find()
    return mosaic


class Mosaic:
    """A box that several pieces hold together, as Bits. Its pieces are found when it is read, and not for its views."""

    def __init__(self, tensor: Bits, box: Box) -> None:
        self.dtype, self.itemsize, self.shape, self.size = tensor.dtype, tensor.itemsize, box.sizes, box.size
        self.contiguous = False
        self._tensor, self._box = tensor, box

    def find(self) -> None:
        """Find the pieces. Raises BaseMismatchError unless they are all of the box."""
        assert self._parts is not None

    @cached_property
    def _parts(self) -> list[tuple[tuple[slice, ...], Bits]]:
        """Where in the box each piece lies, and its memory there."""
        found, held = [], []
        for piece in touching(self._tensor, self._box):
            common = piece.box if piece.box.inside(self._box) else piece.box.intersect(self._box)
            if common is not None:
                held.append(common)
                bits = piece.bits if common is piece.box else piece.bits.view(common.slices(piece.box))
                found.append((common.slices(self._box), bits))
        if missing := self.size - sum(part.size for part, _ in cut_apart(held)):
            raise BaseMismatchError(
                f"{missing} of the elements {list(self.shape)} at {list(self._box.offset)} of a tensor of shape "
                f"{list(self._tensor.shape)} are not in the memory of this process"
            )
        return found

    @property
    def writable(self) -> bool:
        return all(bits.writable for _, bits in self._parts)

    def read(self, start: int, stop: int) -> UIntArray:
        if stop - start < self.size:
            boxes = FlatRun(start, stop).boxes(self.shape)
            views = [self.view(box.slices(whole(self.shape))) for box in boxes]
            return np.concatenate([np.empty(0, UINTS[self.itemsize]), *(view.read(0, view.size) for view in views)])
        found = np.empty(self.shape, UINTS[self.itemsize])
        for where, bits in self._parts:
            part = found[where]
            part[...] = bits.read(0, bits.size).reshape(part.shape)
        return found.reshape(-1)

    def gather(self, start: int, indices: NDArray[np.uint32]) -> UIntArray:
        values: UIntArray = self.read(0, self.size)[start + indices.astype(np.int64)]
        return values

    def scatter(self, start: int, indices: NDArray[np.uint32], values: UIntArray) -> None:
        for where, bits in self._parts:
            local, chosen = within(start + indices.astype(np.int64), self.shape, where)
            bits.scatter(0, local, values[chosen])

    def write(self, start: int, values: UIntArray) -> None:
        self.scatter(start, np.arange(len(values), dtype=np.uint32), values)

    def view(self, slices: tuple[slice, ...]) -> Bits:
        offset = tuple(a + along.start for a, along in zip(self._box.offset, slices, strict=True))
        return place_view(self._tensor, Box(offset, tuple(along.stop - along.start for along in slices)))

    @property
    def storage(self) -> object:
        return tuple(bits.storage for _, bits in self._parts)

    @property
    def extent(self) -> tuple[object, int, int]:
        device, first, last = zip(*(bits.extent for _, bits in self._parts), strict=True)
        return device[0], min(first), max(last)


def within(
    indices: NDArray[np.int64], sizes: Shape, part: tuple[slice, ...]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Which flat indices of a box lie in a part of it, and their flat indices there.

    indices: (k,). Returns the indices in the part (m,) and which of the k they are, (k,).
    """
    chosen = np.ones(len(indices), bool)
    local = np.zeros(len(indices), np.int64)
    for at, along in zip(np.unravel_index(indices, sizes), part, strict=True):
        chosen &= (along.start <= at) & (at < along.stop)
        local = local * (along.stop - along.start) + (at - along.start)
    return local[chosen].astype(np.uint32), chosen
