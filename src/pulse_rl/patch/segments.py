"""The segments of a patch: how its tensors are cut, and in which order they are coded.

Tensors of one kind (the same name but for numbers, dtype, shape and boxes) are a group. A group is coded tile by tile,
and each tile tensor by tensor. So what one rank of an engine holds, half of every tensor or half of the experts, is a
few runs of segments, and a few ranges of a patch's bytes.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import Specs, joined_specs
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import PatchFormatError
from pulse_rl.weights.boxes import Box, Shape, count_at_most, tiles
from pulse_rl.weights.layout import Derives, derived

MAX_SEGMENTS = 1 << 23  # a model of 10^12 elements has 4.5 million; what is kept of them takes 200 MB
MAX_PLACES = 1 << 18  # tiles of all groups, which take 0.1 GB: a model has few shapes, and most have 64 tiles or fewer
KEPT_BOXES = 1 << 15  # of all tensors of a table whose groups are kept for the next patch
CACHED_PLACES = 1 << 12  # of a group whose tiles are kept for the next patch
NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})")  # in a name; in a pattern of names, a * in its place


def numbers_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, and the numbers that it has in place of each *; none of a name that has a * itself."""
    if "*" in name:
        return name, ()
    parts = NUMBER.split(name)
    return "*".join(parts[::2]), tuple(map(int, parts[1::2]))


def names_of(pattern: str, numbers: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """The inverse, of several names. Raises PatchFormatError for too many numbers or too few."""
    parts = pattern.split("*")
    for some in numbers:
        if len(some) not in (0, len(parts) - 1):
            raise PatchFormatError(f"table: expected {len(parts) - 1} numbers of {pattern!r}, found {len(some)}")
        words = (f"{number}{part}" for number, part in zip(some, parts[1:], strict=False))
        yield parts[0] + "".join(words) if some else pattern


class Entry(NamedTuple):
    """One tensor of a patch's table."""

    name: str
    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]  # what the patch covers of it, disjoint; all of it: one box


class Table(Derives, tuple[Entry, ...]):
    """The tensors of a patch, in canonical order. A run's patches share one while their tensors stay the same."""


class CutGroup(NamedTuple):
    """Tensors that are cut alike, and coded together."""

    tensors: tuple[int, ...]  # positions in the table, in the order of coding
    places: Sequence[Box]
    quadrants: Sequence[object]  # of each place: blocks end where it changes
    dtype: str  # of the tensors
    sizes: NDArray[np.int64]  # (places,) elements of each
    strides: NDArray[np.int64]  # (places,) as `Specs.strides`

    def boundary(self, place: int) -> int:
        """How much of an end comes before a place: 2 between groups and quadrants, 1 between tiles."""
        return 2 if place == 0 or self.quadrants[place] != self.quadrants[place - 1] else 1


def _tiled(shape: Shape, boxes: tuple[Box, ...]) -> tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]]:
    """The tiles of some boxes of a tensor, and the quadrant of each."""
    found = sorted((tile.quadrant, tile.box) for box in boxes for tile in tiles(shape, box))
    return tuple(box for _, box in found), tuple(quadrant for quadrant, _ in found)


_tiled_and_kept = lru_cache(maxsize=512)(_tiled)  # a model has few different shapes


def groups_of(table: Sequence[Entry]) -> Sequence[CutGroup]:
    """The groups of a table, in the order of coding. Raises PatchFormatError for more segments than any model has."""
    return derived(table, _groups_of)


def _groups_of(table: Sequence[Entry]) -> Sequence[CutGroup]:
    boxes = sum(len(entry.boxes) for entry in table)
    return (_grouped_and_kept if boxes <= KEPT_BOXES else _grouped)(tuple(table))


def _grouped(table: tuple[Entry, ...]) -> tuple[CutGroup, ...]:
    kinds: dict[tuple[str, str, Shape, tuple[Box, ...]], list[tuple[tuple[int, ...], int]]] = {}
    for number, (name, dtype, shape, boxes) in enumerate(table):
        pattern, numbers = numbers_of(name)
        # Experts of one number in all layers are next to each other: ranks hold ranges of experts.
        kinds.setdefault((pattern, dtype, shape, boxes), []).append((numbers[::-1], number))
    found = []
    left, places_left = MAX_SEGMENTS, MAX_PLACES
    for (_, dtype, shape, boxes), members in sorted(kinds.items()):
        count = sum(count_at_most(shape, box) for box in boxes)
        left -= count * len(members)
        places_left -= count
        if left < 0 or places_left < 0:
            raise PatchFormatError(
                f"table: expected tensors of at most {MAX_SEGMENTS} tiles, {MAX_PLACES} of them different, found more"
            )
        places, quadrants = (_tiled_and_kept if count <= CACHED_PLACES else _tiled)(shape, boxes)
        columns = [(place.size, place.sizes[-1] if shape else 1) for place in places]
        sizes, strides = np.array(columns, np.int64).reshape(-1, 2).T.copy()
        found.append(CutGroup(tuple(number for _, number in sorted(members)), places, quadrants, dtype, sizes, strides))
    return tuple(found)


_grouped_and_kept = lru_cache(maxsize=16)(_grouped)  # the tables of a run's patches are equal, part by part


def _columns(table: Sequence[Entry]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each segment: its elements, its tensor, and the memory of one decoded change."""
    found = np.concatenate([np.empty((3, 0), np.int64), *map(_columns_of, groups_of(table))], axis=1)
    found.flags.writeable = False
    sizes, tensors, nbytes = found
    return sizes, tensors, nbytes


def _columns_of(group: CutGroup) -> NDArray[np.int64]:
    places, tensors = len(group.places), len(group.tensors)
    found = np.empty((3, places, tensors), np.int64)
    found[0], found[1], found[2] = group.sizes[:, None], group.tensors, 4 + ITEMSIZES[group.dtype]
    return found.reshape(3, -1)


class Segments:
    """Consecutive segments of a patch, in columns: a model may have millions.

    Attributes:
        table: The tensors.
        groups: How they are cut, and in which order.
        numbers: Which of the patch's segments they are.
        counts: The changes of each segment of the patch.
    """

    def __init__(self, table: Sequence[Entry], counts: NDArray[np.uint32] | None = None) -> None:
        self.table, self.groups = table, groups_of(table)
        sizes = [len(group.tensors) * len(group.places) for group in self.groups]
        self._firsts = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]  # of each group, then of all
        self.counts = counts if counts is not None else np.zeros(self._firsts[-1], np.uint32)  # changes of each
        self.numbers = range(self._firsts[-1])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: slice) -> "Segments":
        if place.step not in (None, 1):
            raise ValueError(f"expected consecutive segments, found every {place.step}th")
        part = object.__new__(Segments)
        part.table, part.groups, part._firsts = self.table, self.groups, self._firsts
        part.counts, part.numbers = self.counts, self.numbers[place]
        return part

    def specs(self) -> list[Specs]:
        """What a decoder knows of these segments, in columns."""
        found = list[Specs]()
        start, stop = self.numbers.start, self.numbers.stop
        while start < stop:
            at = bisect_right(self._firsts, start) - 1
            group, end = self.groups[at], min(stop, self._firsts[at + 1])
            place = np.arange(start - self._firsts[at], end - self._firsts[at]) // len(group.tensors)
            changed = self.counts[start:end].astype(np.int64)
            found.append(Specs(group.dtype, group.sizes[place], changed, group.strides[place], 0 * place))
            start = end
        return [joined_specs(list(alike)) for _, alike in groupby(found, lambda specs: specs.dtype)]

    def place(self, number: int) -> tuple[int, Box]:
        """The tensor and the place of a segment of the patch."""
        at = bisect_right(self._firsts, number) - 1  # the last that starts here: those before it are empty
        group = self.groups[at]
        tile, member = divmod(number - self._firsts[at], len(group.tensors))
        return group.tensors[member], group.places[tile]

    def changing(self) -> Iterator[tuple[int, Box]]:
        """The tensor and the place of each segment that changes."""
        start = self.numbers.start
        return map(self.place, (start + np.flatnonzero(self.counts[start : self.numbers.stop])).tolist())

    def sizes(self) -> NDArray[np.int64]:
        """Elements of each segment of the patch."""
        return derived(self.table, _columns)[0]

    def tensors(self) -> NDArray[np.int64]:
        """The tensor of each segment of the patch."""
        return derived(self.table, _columns)[1]

    def change_nbytes(self) -> NDArray[np.int64]:
        """Memory of one decoded change of each segment of the patch, bytes: an index and a value."""
        return derived(self.table, _columns)[2]

    def each_group(self) -> Iterator[tuple[int, CutGroup]]:
        """The groups that have segments, each with the number of its first one."""
        for first, group in zip(self._firsts, self.groups, strict=False):
            if len(group.places) and group.tensors:
                yield first, group

    def per_tensor(self) -> NDArray[np.int64]:
        """The sum of the changes of each tensor, (tensors,)."""
        sums = np.zeros(len(self.table), np.int64)
        for group, first in zip(self.groups, self._firsts, strict=False):
            if len(group.places):
                held = self.counts[first : first + len(group.places) * len(group.tensors)]
                sums[list(group.tensors)] = held.reshape(len(group.places), -1).sum(0, dtype=np.int64)
        return sums
