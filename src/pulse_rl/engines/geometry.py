"""A copy from a part of a published tensor into live memory, as boxes of the tensor with strided views of the memory.

A loader reads a tensor through views: narrowed, transposed, reshaped into heads and back. What it copies is an index
space; along each of its dimensions the position in the published tensor moves by one stride, and the position in live
memory by another. Where a dimension crosses several of the tensor's own, it is split; where several lie in one of the
tensor's own, the copy is cut into boxes. Strides are of elements, and positions of the tensor are row-major.
"""

import itertools
import math
from typing import Any, NamedTuple

from pulse_rl.weights.box_sets import MAX_BOXES
from pulse_rl.weights.boxes import Box, Shape


class NotBoxes(Exception):
    """A copy is not made of boxes of the published tensor; the text says what it is instead."""


class Strided(NamedTuple):
    """Some elements of a storage, as torch describes a view."""

    offset: int
    sizes: Shape
    strides: Shape

    @classmethod
    def of(cls, tensor: Any) -> "Strided":
        """Where a torch tensor lies in its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class CopiedAxis(NamedTuple):
    """One dimension of what is copied."""

    size: int
    source: int  # stride in the published tensor
    target: int  # stride in the storage that it was copied to


class Copied(NamedTuple):
    """Where the elements of a storage come from in one published tensor. Every axis lies in one of its dimensions."""

    source: int  # position of the first element in the published tensor
    target: int  # and in the storage
    axes: tuple[CopiedAxis, ...]

    def view(self, part: Strided, target: Strided) -> "Copied":
        """Copy a part of this storage on to another one.

        part: what is read of this storage; nothing, if a size is 0. target: where it is written, of the same sizes.
        Raises NotBoxes.
        """
        if 0 in part.sizes:
            return Copied(0, 0, ())
        digits = sorted(self.axes, key=lambda axis: -axis.target)
        used, source, left = [], self.source, part.offset - self.target
        if left < 0:
            raise NotBoxes("elements that were not copied")
        for digit in digits:
            place, left = divmod(left, digit.target)
            used.append(place)
            source += place * digit.source
        if left or any(place >= digit.size for place, digit in zip(used, digits, strict=True)):
            raise NotBoxes("elements that were not copied")
        axes: list[CopiedAxis] = []
        along = zip(part.sizes, part.strides, target.strides, strict=True)
        for size, stride, step in sorted((one for one in along if one[0] != 1), key=lambda one: one[1]):
            axes += _split(size, stride, step, digits, used)
        return Copied(source, target.offset, tuple(axes))


def identity(shape: Shape) -> Copied:
    """A contiguous tensor as it is."""
    strides = zip(shape, row_major(shape), strict=True)
    return Copied(0, 0, tuple(CopiedAxis(n, stride, stride) for n, stride in strides if n != 1))


def row_major(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _split(size: int, stride: int, step: int, digits: list[CopiedAxis], used: list[int]) -> list[CopiedAxis]:
    """Divide one dimension of a view among the axes of a storage that it runs through, the smallest first.

    stride, step: of the dimension in that storage, and in the one that it is copied to. digits: the storage's axes by
    falling stride. used: the last place that is read of each of them so far; moved on.
    """
    found: list[CopiedAxis] = []
    while size > 1:
        at = next((d for d, digit in enumerate(digits) if digit.target <= stride), None)
        if at is None:
            raise NotBoxes("one element for several" if stride == 0 else "elements that were not copied")
        digit = digits[at]
        places, rest = divmod(stride, digit.target)
        if not rest and used[at] + places * (size - 1) < digit.size:  # it ends within this axis
            used[at] += places * (size - 1)
            return [*found, CopiedAxis(size, places * digit.source, step)]
        here, uneven = divmod(digit.size, places)
        further = at and digits[at - 1].target == digit.target * digit.size
        if rest or uneven or size % here or used[at] >= places or not further:
            raise NotBoxes("a range that crosses rows")
        used[at] += places * (here - 1)
        found.append(CopiedAxis(here, places * digit.source, step))
        size, stride, step = size // here, digit.target * digit.size, step * here
    return found


class Cell(NamedTuple):
    """A box of the published tensor, and where in a storage it lies."""

    box: Box
    memory: Strided  # of the box's sizes


def cells(shape: Shape, copied: Copied) -> list[Cell]:
    """Cut a copy into boxes of the published tensor, which has this shape. Raises NotBoxes."""
    dimensions = [(d, stride) for d, stride in enumerate(row_major(shape)) if shape[d] != 1]
    first, left = [0] * len(shape), copied.source
    for d, stride in dimensions:
        first[d], left = divmod(left, stride)
    sizes, strides = [1] * len(shape), [1] * len(shape)
    moves: list[CopiedAxis] = []  # from box to box
    for d, stride in dimensions:
        behind = stride * shape[d]
        merged = _merge([axis for axis in copied.axes if stride <= axis.source < behind])
        if merged and merged[0].source == stride:
            sizes[d], _, strides[d] = merged.pop(0)
        moves += merged
    if math.prod(axis.size for axis in moves) > MAX_BOXES:
        raise NotBoxes(f"more than {MAX_BOXES} boxes")
    found = []
    for places in itertools.product(*(range(axis.size) for axis in moves)):
        offset, memory = list(first), copied.target
        for place, axis in zip(places, moves, strict=True):
            memory += place * axis.target
            for d, stride in dimensions:
                if stride <= axis.source < stride * shape[d]:
                    offset[d] += place * (axis.source // stride)
        found.append(Cell(Box(tuple(offset), tuple(sizes)), Strided(memory, tuple(sizes), tuple(strides))))
    return found


def _merge(axes: list[CopiedAxis]) -> list[CopiedAxis]:
    """The axes of one dimension by rising stride; those that continue each other on both sides are one."""
    found: list[CopiedAxis] = []
    for axis in sorted(axes, key=lambda axis: axis.source):
        last = found[-1] if found else None
        if last and axis.source == last.source * last.size and axis.target == last.target * last.size:
            found[-1] = last._replace(size=last.size * axis.size)
        else:
            found.append(axis)
    return found
