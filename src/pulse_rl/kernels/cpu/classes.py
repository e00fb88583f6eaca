"""The classes of a segment's elements: what sender and receiver know of each one before anything is sent.

A class is the exponent of θ in the gate's format, and how large the momentum is in the units that are sent. Both say
how likely an element is to be sent, and the momentum's sign says which way.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import buffer, read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.loco import F32, Grid, cell_width, in_units

GROUPS = 16  # of exponents: the segment's largest, those below it one by one, and all the rest
LEVELS = 4  # of the momentum: zero, less than a unit, less than 4, more
CLASSES = GROUPS * LEVELS
SIGN = np.uint8(0x80)  # of a class byte: the momentum is negative
CLASS = np.uint8(0x7F)  # the rest of it

PLACE = np.uint32((1 << 20) - 1)  # of a place: the element's index
EXPONENT = np.uint32(20)  # from this bit on its exponent, 8 bits
DOWN = np.uint32(1 << 31)  # its SIGN
TO_SIGN = np.uint32(24)  # from SIGN to DOWN


@kernel
def _classes(cells, momentum, grid, scale, classes):
    top = np.uint32(0)
    for i in range(cells.shape[0]):
        exponent = np.uint32((np.uint32(cells[i]) & grid.magnitude) >> grid.shift)
        top = exponent if exponent > top else top
    for i in range(cells.shape[0]):
        cell = np.uint32(cells[i])
        group = np.uint32(top - np.uint32((cell & grid.magnitude) >> grid.shift))
        group = np.uint32(GROUPS - 1) if group > np.uint32(GROUPS - 1) else group
        units = in_units(np.float32(abs(momentum[i])), scale, cell_width(cell, grid))
        level = np.uint32(units > np.float32(0)) + np.uint32(units >= np.float32(1)) + np.uint32(units >= np.float32(4))
        sign = np.uint32(SIGN) if momentum[i] < np.float32(0) else np.uint32(0)
        classes[i] = np.uint8(np.uint32(group * np.uint32(LEVELS) + level) | sign)


def classes_of(cells: UIntArray, momentum: F32, grid: Grid, scale: float) -> NDArray[np.uint8]:
    """The class of each element, (n,), and SIGN where its momentum is negative.

    cells: θ's bits (n,) in the gate's format, n up to 2^20. momentum: (n,), as all trainers hold it.
    """
    classes = np.empty(len(cells), np.uint8)
    _classes(read_only(cells), read_only(momentum), grid, np.float32(scale), classes)
    return classes


class Sorted(NamedTuple):
    """The elements of a segment, sorted by class. Scratch."""

    edges: NDArray[np.int64]  # (CLASSES + 1,): where each class begins, and the last one's end
    places: NDArray[np.uint32]  # (n,): of each class its elements, ascending, as PLACE, EXPONENT and DOWN say


@inlined
def _put(classes, cells, grid, i, at, places):
    c = classes[i]
    exponent = np.uint32((np.uint32(cells[i]) & grid.magnitude) >> grid.shift)
    place = np.uint32(np.uint32(i) | np.uint32(exponent << EXPONENT))
    places[at[c & CLASS]] = np.uint32(place | np.uint32(np.uint32(c & SIGN) << TO_SIGN))
    at[c & CLASS] += 1


@kernel
def _sort(classes, cells, grid, edges, places):
    # A counter that is read right after it was written takes longer than the rest of the loop: so four quarters of the
    # elements are counted beside each other.
    n, quarter = classes.shape[0], classes.shape[0] // 4
    at = np.zeros((4, CLASSES), np.int64)
    for i in range(quarter):
        for k in range(4):
            at[k, classes[k * quarter + i] & CLASS] += 1
    for i in range(4 * quarter, n):
        at[3, classes[i] & CLASS] += 1
    begun = 0
    for c in range(CLASSES):
        edges[c] = begun
        for k in range(4):
            count = at[k, c]
            at[k, c] = begun
            begun += count
    edges[CLASSES] = begun
    for i in range(quarter):
        for k in range(4):
            _put(classes, cells, grid, k * quarter + i, at[k], places)
    for i in range(4 * quarter, n):
        _put(classes, cells, grid, i, at[3], places)


def sort(classes: NDArray[np.uint8], cells: UIntArray, grid: Grid) -> Sorted:
    """Sort the elements of a segment by class. classes, cells: (n,), as of `classes_of`."""
    edges = np.empty(CLASSES + 1, np.int64)
    places = buffer("places", len(classes), np.uint32)[: len(classes)]
    _sort(read_only(classes), read_only(cells), grid, edges, places)
    return Sorted(edges, places)
