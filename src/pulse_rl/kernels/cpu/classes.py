"""The classes of a segment's elements: what sender and receiver know of each one before anything is sent.

A class is the exponent of θ in the gate's format, and how large the momentum is in the units that are sent. Both say
how likely an element is to be sent, and the momentum's sign says which way.

Elements are coded in the order of their classes, within one by index. An element's *place* is its position in that
order. The order is never stored: `arrange` goes to it and `spread` comes back, both by counting.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import buffer, read_only
from pulse_rl.kernels.cpu.changes import SLACK, find_changes, scatter
from pulse_rl.kernels.cpu.compiled import kernel
from pulse_rl.kernels.cpu.loco import F32, RoundingGrid, bits_of, cell_width, exponent_of, float_of, in_units, width_of

GROUPS = 16  # of exponents: the segment's largest, those below it one by one, and all the rest
LEVELS = 4  # of the momentum: zero, less than a unit, less than 4, more
CLASSES = GROUPS * LEVELS
SIGN = np.uint8(0x80)  # of a class byte: the momentum is negative
CLASS = np.uint8(0x7F)  # the rest of it

# A counter that is read right after it was written takes longer than the rest of a loop: so four quarters of the
# elements are counted beside each other. The last quarters are shorter if there are not four times as many.
QUARTERS = 4


class Classes(NamedTuple):
    """The class of each element of a segment."""

    each: NDArray[np.uint8]  # (n,): its CLASS, and SIGN where its momentum is negative
    starts: NDArray[np.int64]  # (QUARTERS, CLASSES): the place of the first element of each class in each quarter
    edges: NDArray[np.int64]  # (CLASSES + 1,): the first place of each class, and n
    widths: F32  # (256,): of the cells of each class byte, negative with SIGN; 0 where a class has several exponents


class Places(NamedTuple):
    """What is sent of a segment, in the order of classes."""

    places: NDArray[np.uint32]  # (k,) ascending
    moves: NDArray[np.int8]  # (k,): the codes, negative where the sign is not the momentum's (not +, where that is 0)


@kernel
def _classes(shared, momentum, grid, scale, classes):
    largest = np.uint32(0)
    for i in range(shared.shape[0]):
        magnitude = np.uint32(bits_of(shared[i]) & np.uint32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    top = exponent_of(largest, grid)
    for i in range(shared.shape[0]):
        exponent = exponent_of(bits_of(shared[i]), grid)
        group = np.uint32(top - exponent)
        group = np.uint32(GROUPS - 1) if group > np.uint32(GROUPS - 1) else group
        units = in_units(np.float32(abs(momentum[i])), scale, width_of(exponent, grid))
        level = np.uint32(3) if units >= np.float32(4) else np.uint32(2)
        level = level if units >= np.float32(1) else np.uint32(1)
        level = level if units > np.float32(0) else np.uint32(0)
        sign = np.uint32(SIGN) if momentum[i] < np.float32(0) else np.uint32(0)
        classes[i] = np.uint8(np.uint32(np.uint32(group * np.uint32(LEVELS)) | np.uint32(level | sign)))
    return top


@kernel
def _count(classes, counts):
    n, quarter = classes.shape[0], -(-classes.shape[0] // QUARTERS)
    for first in range(quarter):
        for k in range(QUARTERS):
            i = k * quarter + first
            if i < n:
                counts[k, classes[i] & CLASS] += 1


@kernel
def _widths(top, grid, widths):
    for group in range(GROUPS - 1):
        for level in range(LEVELS):
            byte = group * LEVELS + level
            if np.uint32(group) <= np.uint32(top - grid.below):
                widths[byte] = float_of(width_of(np.uint32(top - np.uint32(group)), grid))
            widths[byte | SIGN] = -widths[byte]


def classes_of(shared: F32, momentum: F32, grid: RoundingGrid, scale: float) -> Classes:
    """The classes of a segment of up to 2^20 elements. shared: θ, (n,). momentum: (n,), as all trainers hold it."""
    each = np.empty(len(shared), np.uint8)
    top = _classes(read_only(shared), read_only(momentum), grid, np.float32(scale), each)
    widths = np.zeros(256, np.float32)
    _widths(np.uint32(top), grid, widths)
    return counted(each, widths)


def counted(each: NDArray[np.uint8], widths: F32) -> Classes:
    """Classes of these bytes."""
    counts = np.zeros((QUARTERS, CLASSES), np.int64)
    _count(read_only(each), counts)
    ends = np.cumsum(counts.T)  # class by class, of each its quarters
    starts = (ends.reshape(CLASSES, QUARTERS) - counts.T).T
    return Classes(each, np.ascontiguousarray(starts), np.append(starts[0], len(each)), widths)


@kernel
def _arrange(classes, at, codes, moves):
    n, quarter = classes.shape[0], -(-classes.shape[0] // QUARTERS)
    for first in range(quarter):
        for k in range(QUARTERS):
            i = k * quarter + first
            if i < n:
                c, code = classes[i], codes[i]
                place = at[k, c & CLASS]
                at[k, c & CLASS] = place + 1
                moves[place] = -code if c & SIGN else code


def arrange(classes: Classes, indices: NDArray[np.uint32], codes: NDArray[np.int8]) -> Places:
    """Bring what is sent into the order of classes. indices: (k,) in range, each once; codes: (k,), none of them 0."""
    n = len(classes.each)
    found, moves = (buffer(name, n, np.int8)[:n] for name in ("codes by index", "codes by class"))
    found.fill(0)
    scatter(found.view(np.uint8), indices, codes.view(np.uint8))
    _arrange(read_only(classes.each), classes.starts.copy(), read_only(found), moves)
    places, values = np.empty(len(indices) + SLACK, np.uint32), np.empty(len(indices) + SLACK, np.uint8)
    found.fill(0)
    count = find_changes(found.view(np.uint8), moves.view(np.uint8), places, values)
    return Places(places[:count], values[:count].view(np.int8))


@kernel
def _spread(classes, at, total, widths, shared, grid, sums):
    n, quarter = classes.shape[0], -(-classes.shape[0] // QUARTERS)
    for first in range(quarter):
        for k in range(QUARTERS):
            i = k * quarter + first
            if i < n:
                c = classes[i]
                place = at[k, c & CLASS]
                at[k, c & CLASS] = place + 1
                width = widths[c]
                if width == np.float32(0):
                    width = float_of(cell_width(shared[i], grid))
                    width = -width if c & SIGN else width
                sums[i] = total[place] * width + np.float32(0)  # no −0


def spread(classes: Classes, total: F32, shared: F32, grid: RoundingGrid, sums: F32) -> None:
    """Bring sums (n,) of moves into the order of indices, each times the width of its cell. A sum of 0 is +0.

    total: the sums by place. shared: θ, (n,) by index.
    """
    inputs = read_only(classes.each), classes.starts.copy(), read_only(total), read_only(classes.widths)
    _spread(*inputs, read_only(shared), grid, sums)


def order(classes: Classes) -> NDArray[np.int64]:
    """The index of the element at each place, (n,)."""
    return np.argsort(classes.each & CLASS, kind="stable")
