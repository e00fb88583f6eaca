"""Many boxes of one tensor: which of them a box meets, whether any two meet, and how those that do are cut apart.

Each takes about n log n steps for n boxes. Two boxes on different sides of a cut through the tensor cannot meet. So
boxes are divided by cuts that few of them cross, until a few are left, which are compared pair by pair. Those that come
from sharding have cuts that none crosses. `BoxSet` sorts the boxes along the dimension that tells most of them apart.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.weights.boxes import Box

MAX_BOXES = 1 << 16  # of one tensor in one process, and in one part of a patch
FEW = 8  # boxes that are compared one by one
UNJOINED = 1 << 10  # boxes of a tensor that are published as they are: each costs about 0.5 ms in every version
PAIRWISE = 64  # boxes that are compared pair by pair: 64² bits of each dimension stay in a processor's cache

Edges = NDArray[np.int64]  # (boxes, dimensions, 2): where each box begins along each dimension, and where it ends


class BoxSet:
    """Some boxes of one tensor, any of which may overlap, found by a box that they have elements in common with."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        if len(boxes) <= FEW:
            return
        edges = _edges(boxes)
        filled = np.flatnonzero((edges[:, :, 0] < edges[:, :, 1]).all(1))
        several = [len(np.unique(edges[filled, d, 0])) for d in range(edges.shape[1])]
        self._along = along = int(np.argmax(several)) if several else 0
        self._order = filled[np.argsort(edges[filled, along, 0], kind="stable")] if several else filled
        self._sorted = edges[self._order]
        if several:
            self._starts = np.ascontiguousarray(self._sorted[:, along, 0])
            self._reach = np.maximum.accumulate(self._sorted[:, along, 1])  # of each box and all before it

    def touching(self, box: Box) -> list[int]:
        """The numbers of the boxes that have an element of this one, in ascending order."""
        if len(self._boxes) <= FEW:
            return [number for number, one in enumerate(self._boxes) if one.intersect(box) is not None]
        if not box.size:
            return []
        if not box.offset:
            return [int(number) for number in self._order]
        start = box.offset[self._along]
        first = int(self._reach.searchsorted(start, "right"))
        last = int(self._starts.searchsorted(start + box.sizes[self._along], "left"))
        near = self._sorted[first:last]
        offset = np.array(box.offset, np.int64)
        meets = ((near[:, :, 0] < offset + np.array(box.sizes, np.int64)) & (offset < near[:, :, 1])).all(1)
        found: list[int] = np.sort(self._order[first:last][meets]).tolist()
        return found


def disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no element is in two of the boxes. Takes 3 µs for each box of a hundred thousand."""
    filled = [box for box in boxes if box.size]
    if len(filled) < 2 or not filled[0].offset:
        return len(filled) < 2
    return _disjoint(_edges(filled))


def joined(boxes: Sequence[Box]) -> Sequence[Box]:
    """Fewer boxes with the same elements, where there are very many and some of them lie side by side.

    boxes: disjoint. They are joined along one dimension after another, which makes a grid one box.
    """
    edges = _edges(boxes) if len(boxes) > UNJOINED else None
    before = len(boxes) + 1
    while edges is not None and len(edges) < before:
        before = len(edges)
        for d in reversed(range(edges.shape[1])):
            others = [edges[:, e, side] for e in range(edges.shape[1]) if e != d for side in (0, 1)]
            edges = edges[np.lexsort([edges[:, d, 0], *others])]
            alike = np.delete(edges, d, 1)
            follows = (alike[1:] == alike[:-1]).all((1, 2)) & (edges[1:, d, 0] == edges[:-1, d, 1])
            first, last = np.append(True, ~follows), np.append(~follows, True)
            stops = edges[last, d, 1]
            edges = edges[first]
            edges[:, d, 1] = stops
    return boxes if edges is None else [_box(one) for one in edges]


def cut_apart(boxes: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Cut boxes where they overlap. Returns disjoint boxes, each with the numbers of those that have its elements."""
    numbers: dict[Box, list[int]] = {}
    for number, box in enumerate(boxes):
        if box.size:
            numbers.setdefault(box, []).append(number)
    if disjoint(list(numbers)):
        return list(numbers.items())
    alike = list(numbers.values())
    found = []
    waiting = [(_edges(list(numbers)), np.arange(len(numbers)))]
    while waiting:
        edges, which = waiting.pop()
        if len(edges) <= FEW:
            found += _few_apart([(_box(one), alike[number]) for one, number in zip(edges, which.tolist(), strict=True)])
            continue
        if (edges == edges[0]).all():
            found.append((_box(edges[0]), sorted(number for one in which.tolist() for number in alike[one])))
            continue
        cut = _best_cut(edges)
        if cut.crossing and _disjoint(edges):
            found += [(_box(one), alike[number]) for one, number in zip(edges, which.tolist(), strict=True)]
            continue
        waiting += [(edges[side], which[side]) for edges, side in _sides(edges, cut)]
    return found


def _few_apart(boxes: list[tuple[Box, list[int]]]) -> list[tuple[Box, list[int]]]:
    """`cut_apart` of a few boxes, each with its numbers, one after another."""
    found: list[tuple[Box, list[int]]] = []
    for box, numbers in boxes:
        left, cut = [box], []
        for known, others in found:
            common = known.intersect(box)
            if common is None:
                cut.append((known, others))
                continue
            cut.append((common, sorted(others + numbers)))
            cut += [(rest, others) for rest in known.without(common)]
            left = [part for piece in left for part in piece.without(common)]
        found = cut + [(part, numbers) for part in left]
    return found


def _edges(boxes: Sequence[Box]) -> Edges:
    offsets = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
    return np.stack([offsets, offsets + np.array([box.sizes for box in boxes], np.int64).reshape(offsets.shape)], 2)


def _box(edges: Edges) -> Box:
    return Box(tuple(edges[:, 0].tolist()), tuple((edges[:, 1] - edges[:, 0]).tolist()))


def _disjoint(edges: Edges) -> bool:
    """`disjoint` of boxes that are not empty, of at least one dimension."""
    waiting = [edges]
    while waiting:
        edges = waiting.pop()
        if len(edges) <= PAIRWISE:
            if _any_meet(edges, edges):
                return False
            continue
        room = np.prod(edges[:, :, 1].max(0) - edges[:, :, 0].min(0), dtype=np.float64)
        if np.prod(edges[:, :, 1] - edges[:, :, 0], 1, dtype=np.float64).sum() > 1.001 * room:
            return False
        cut = _best_cut(edges)
        if cut.larger > 0.95 * len(edges):  # no cut divides them: a few of them with all at a time
            if any(_any_meet(edges[at : at + PAIRWISE], edges[at:]) for at in range(0, len(edges), PAIRWISE)):
                return False
            continue
        waiting += [edges[side] for edges, side in _sides(edges, cut)]
    return True


def _any_meet(some: Edges, others: Edges) -> bool:
    """Whether two different boxes have an element in common. The others begin with `some`."""
    meets = np.ones((len(some), len(others)), bool)
    for d in range(some.shape[1]):
        meets &= some[:, d, :1] < others[:, d, 1]
        meets &= others[:, d, 0] < some[:, d, 1:]
    return int(meets.sum()) > len(some)  # each meets itself


class _Cut(NamedTuple):
    """A cut through a tensor, and how many boxes have elements on its fuller side, and on both."""

    along: int
    at: int
    larger: int
    crossing: int


def _best_cut(edges: Edges) -> _Cut:
    """The cut that leaves the fewest boxes on its fuller side, those that it crosses counted twice.

    edges: of at least two different boxes. Both sides have some.
    """
    found = []
    for d in range(edges.shape[1]):
        starts, stops = np.sort(edges[:, d, 0]), np.sort(edges[:, d, 1])
        at = np.unique(edges[:, d])[1:-1]  # on both sides of each there is something
        if len(at):
            left, right = starts.searchsorted(at, "left"), len(stops) - stops.searchsorted(at, "right")
            larger, crossing = np.maximum(left, right), left + right - len(edges)
            best = int(np.argmin(larger + crossing))
            found.append(_Cut(d, int(at[best]), int(larger[best]), int(crossing[best])))
    return min(found, key=lambda cut: cut.larger + cut.crossing)


def _sides(edges: Edges, cut: _Cut) -> list[tuple[Edges, NDArray[np.int64]]]:
    """The boxes cut in two. Returns for each side all boxes as they are there, and which of them are."""
    before, after = edges.copy(), edges.copy()
    np.minimum(edges[:, cut.along, 1], cut.at, out=before[:, cut.along, 1])
    np.maximum(edges[:, cut.along, 0], cut.at, out=after[:, cut.along, 0])
    return [
        (before, np.flatnonzero(edges[:, cut.along, 0] < cut.at)),
        (after, np.flatnonzero(edges[:, cut.along, 1] > cut.at)),
    ]
