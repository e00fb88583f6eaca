"""Boxes: which part of a tensor something is, as offsets and sizes along each dimension.

A piece of a sharded tensor is a box, or a run of flat positions, which is a few boxes. A tile is the box that a patch
codes on its own. Two boxes of one tensor intersect in a box or not at all, so any two ways to shard it fit together.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.weights.segments import SEGMENT, segments

Shape = tuple[int, ...]


class Positions(NamedTuple):
    """Where the elements of a box lie in its tensor: rows of consecutive flat positions, all of one length."""

    starts: NDArray[np.int64]  # (rows,), the flat row-major position of each row's first element
    run: int  # elements in a row


class Box(NamedTuple):
    """The elements whose index along each dimension d is in [offset[d], offset[d] + sizes[d])."""

    offset: Shape
    sizes: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def slices(self, outer: "Box") -> tuple[slice, ...]:
        """This box in an array that holds a box around it."""
        return tuple([slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.sizes, strict=True)])

    def inside(self, outer: "Box") -> bool:
        """Whether the other box has all elements of this one."""
        return all(
            o <= a and a + n <= o + m
            for a, n, o, m in zip(self.offset, self.sizes, outer.offset, outer.sizes, strict=True)
        )

    def intersect(self, other: "Box") -> "Box | None":
        """The elements that both have; None without any."""
        first = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.sizes, other.offset, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(first, ends, strict=True))
        return Box(first, sizes) if all(n > 0 for n in sizes) else None

    def without(self, other: "Box") -> list["Box"]:
        """The elements that the other box does not have, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.size else []
        found, offset, sizes = [], list(self.offset), list(self.sizes)
        for d in range(len(offset)):
            before = common.offset[d] - offset[d]
            after = offset[d] + sizes[d] - (common.offset[d] + common.sizes[d])
            if before:
                found.append(Box(tuple(offset), (*sizes[:d], before, *sizes[d + 1 :])))
            if after:
                start = common.offset[d] + common.sizes[d]
                found.append(Box((*offset[:d], start, *offset[d + 1 :]), (*sizes[:d], after, *sizes[d + 1 :])))
            offset[d], sizes[d] = common.offset[d], common.sizes[d]
        return found

    def positions(self, shape: Shape) -> Positions:
        """Where its elements lie in a tensor of this shape. The array is shared, and not to be modified."""
        return _positions(self, shape)


class FlatRun(NamedTuple):
    """The elements at flat row-major positions [start, stop)."""

    start: int
    stop: int

    def boxes(self, shape: Shape) -> list[Box]:
        """The same elements in a tensor of this shape as boxes, in the same order."""
        return list(_run_boxes(shape, self.start, self.stop))


class Rows(NamedTuple):
    """Where the elements of a part of a tensor lie, if they are rows of one length and distance."""

    start: int  # the flat position of the first element
    apart: int  # elements from row to row
    run: int  # elements in a row


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return _whole(tuple(shape))


@lru_cache(maxsize=1 << 12)  # asked for at each step of each patch, and a model has few shapes
def _whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def _run_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    width = math.prod(inner)
    first, last = start // width, (stop - 1) // width
    if first == last and stop - start < width:  # within one row: the same one level down
        for box in _run_boxes(inner, start - first * width, stop - first * width):
            yield Box((first, *box.offset), (1, *box.sizes))
        return
    if start % width:
        yield from _run_boxes(shape, start, (first + 1) * width)
        first += 1
    rows = stop // width - first
    if rows:
        yield Box((first, *(0 for _ in inner)), (rows, *inner))
    if stop % width:
        yield from _run_boxes(shape, stop - stop % width, stop)


@lru_cache(maxsize=16)  # the segments of one tile come one after another; an entry takes up to 4 MB
def _positions(box: Box, shape: Shape) -> Positions:
    """`Box.positions`."""
    cut = _cut(box, shape)
    run = math.prod(box.sizes[cut:])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.zeros(1, np.int64)
    for d in range(cut):
        along = np.arange(box.offset[d], box.offset[d] + box.sizes[d], dtype=np.int64) * strides[d]
        starts = (starts[:, None] + along).reshape(-1)
    starts += sum(box.offset[d] * strides[d] for d in range(cut, len(shape)))
    starts.flags.writeable = False  # others have the same array
    return Positions(starts, run)


def _cut(box: Box, shape: Shape) -> int:
    """Along which dimension a box is cut into rows: a row is a range along it, of all that comes after it."""
    whole_from = len(shape)
    while whole_from and box.sizes[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    return max(0, whole_from - 1)


@lru_cache(maxsize=1 << 12)  # asked for of each tensor at each digest, and a model has few shapes
def rows_in(box: Box, shape: Shape, held: Box) -> tuple[Rows, Rows] | None:
    """Where the elements of a box lie in a tensor of this shape, and where in memory that holds a box around it.

    None if they are not rows of one length and distance.
    """
    sizes = box.sizes
    cut = _cut(box, shape)
    outer = [d for d in range(cut) if sizes[d] != 1]
    if outer and any(sizes[d] != shape[d] for d in range(outer[0] + 1, outer[-1] + 1)):
        return None
    run = math.prod(sizes[cut:])

    def along(offset: Sequence[int], extents: Sequence[int]) -> Rows:
        apart = math.prod(extents[outer[-1] + 1 :]) if outer else run
        start = 0
        for position, extent in zip(offset, extents, strict=True):
            start = start * extent + position
        return Rows(start, apart, run)

    local = tuple(a - b for a, b in zip(box.offset, held.offset, strict=True))
    return along(box.offset, shape), along(local, held.sizes)


def runs(box: Box, shape: Shape) -> Iterator[tuple[int, int, Positions]]:
    """Cut the elements of a box, in their order, into runs of at most SEGMENT.

    Yields where each begins and ends in the box, and where its elements lie in a tensor of this shape.
    """
    starts, run = box.positions(shape)
    if len(starts) == 1 or run >= SEGMENT:
        for number in range(len(starts)):
            for a, b in segments(run):
                yield number * run + a, number * run + b, Positions(starts[number : number + 1] + a, b - a)
        return
    step = SEGMENT // max(1, run)
    for first in range(0, len(starts) if run else 0, step):
        some = starts[first : first + step]
        yield first * run, (first + len(some)) * run, Positions(some, run)


# Tiles

EIGHTHS = 8  # ranges that a dimension is cut into: the shares of 2, 4 and 8 ranks are made of whole tiles
MIN_TILE = 1 << 16  # elements: with smaller tiles patches grow (by 0.8 % at 2^14) and take longer to code
FINE_TILE = 1 << 18  # elements, where a dimension is cut into more than halves: with smaller ones patches grow by 0.5 %
TALL = 8  # how many times as high as wide a tile may be before fewer columns are cut: rows are coded better whole
MAX_TILE = 1 << 20  # elements: 2 MB of BF16, so that both sides of a comparison stay in the L2 and L3 caches


class Tile(NamedTuple):
    """A box that is compared, coded and applied on its own."""

    box: Box
    quadrant: tuple[int, ...]  # for each dimension, which half it lies in


def cuts(shape: Shape) -> tuple[int, ...]:
    """Into how many ranges each dimension of a tensor is cut.

    A power of two, at most 8. Fewer where tiles would be too tall, or too small: the last dimension's ranges are halved
    first, and all dimensions keep halves as long as tiles have MIN_TILE elements. The rows of a tile have to lie at one
    distance in memory: where two dimensions are cut, those before them are cut into single indices. So the experts that
    one tensor holds are cut as if each were a tensor.
    """
    found = [EIGHTHS if n >= 2 * EIGHTHS else 1 for n in shape]
    while len(found) > 1 and found[-1] > 1 and shape[-2] * found[-1] > TALL * shape[-1] * found[-2]:
        found[-1] //= 2

    while True:
        cut = [d for d, n in enumerate(found) if n > 1][-2:]
        first = cut[0] if len(cut) > 1 else 0  # of those that are not cut into single indices
        elements, cells = math.prod(shape[first:]), math.prod(found[first:])
        fine = [d for d in cut if found[d] > 2]
        if fine and elements < FINE_TILE * cells:
            found[fine[-1]] //= 2
        elif cut and elements < MIN_TILE * cells:
            found[cut[-1]] //= 2
        else:
            return (*shape[:first], *found[first:])


def count_at_most(shape: Shape, box: Box) -> int:
    """A bound of the number of tiles of a box, found without making them."""
    if box.size == 0:
        return 0
    cells = math.prod(
        ((a + k) * m - 1) // n - ((a + 1) * m - 1) // n + 1  # the range of the last index, of the first one
        for n, m, a, k in zip(shape, cuts(shape), box.offset, box.sizes, strict=True)
    )
    return cells + 3 * box.size // MAX_TILE  # cut further, a tile has more than a third of MAX_TILE on average


def tiles(shape: Shape, box: Box) -> tuple[Tile, ...]:
    """Cut a box of a tensor into tiles of at most MAX_TILE elements, at the tensor's eighths.

    Sorted so that halves and quarters of the tensor along any dimension are few runs of tiles.
    """
    if box.size == 0:
        return ()
    ranges = []
    for n, m, a, k in zip(shape, cuts(shape), box.offset, box.sizes, strict=True):
        edges = [i * n // m for i in range(m + 1)]
        along = []
        for i, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            low, high = max(start, a), min(stop, a + k)
            if low < high:
                along.append((low, high - low, 2 * i // m))
        ranges.append(along)
    found = []
    for cell in product(*ranges):
        offset, sizes = tuple(a for a, _, _ in cell), tuple(n for _, n, _ in cell)
        quadrant = tuple(half for _, _, half in cell)
        found += [Tile(small, quadrant) for small in _split(Box(offset, sizes))]
    return tuple(sorted(found, key=lambda tile: (tile.quadrant, tile.box.offset)))


def _split(box: Box) -> Iterator[Box]:
    """Cut a box into ones of at most MAX_TILE elements, along the first dimensions."""
    if box.size <= MAX_TILE:
        yield box
        return
    inner = math.prod(box.sizes[1:])
    step = max(1, MAX_TILE // inner)
    for at in range(0, box.sizes[0], step):
        n = min(step, box.sizes[0] - at)
        part = Box((box.offset[0] + at, *box.offset[1:]), (n, *box.sizes[1:]))
        if part.size <= MAX_TILE:
            yield part
            continue
        for rest in _split(Box(part.offset[1:], part.sizes[1:])):
            yield Box((part.offset[0], *rest.offset), (1, *rest.sizes))
