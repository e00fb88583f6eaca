"""Exponents of old bits, hot elements, and changes as moves in the order of values, compiled.

The naive twins are in `tests/naive/context.py`; `docs/format.md` defines the terms under "A `context` block".
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu.arrays import AHEAD, LANES, lanes_below, prefetch, read_only, trailing_zeros
from pulse_rl.kernels.cpu.changes import gather, gather_rows
from pulse_rl.kernels.cpu.compiled import inlined, kernel

_U0, _U1 = np.uint64(0), np.uint64(1)


@kernel
def hot_flat(old, mask, bound, shift, indices, exponents):
    """Find the elements of old (n,) whose exponent is below a threshold, `bound >> shift`. Returns how many."""
    n = old.shape[0]
    whole = n - n % LANES
    k = np.int64(0)
    for start in range(0, whole, LANES):
        rest = lanes_below(old, start, mask, bound)
        while rest != _U0:
            i = start + np.int64(trailing_zeros(rest))
            indices[k] = i
            exponents[k] = (old[i] & mask) >> shift
            rest &= rest - _U1
            k += 1
    for i in range(whole, n):
        if (old[i] & mask) < bound:
            indices[k] = i
            exponents[k] = (old[i] & mask) >> shift
            k += 1
    return k


@kernel
def hot_in_rows(old, mask, bound, shift, indices, exponents):
    """As `hot_flat` for old (rows, run) that lie apart; indices count through all rows, which have at least LANES."""
    run = old.shape[1]
    whole = run - run % LANES
    line = 64 // old.itemsize  # elements
    k = np.int64(0)
    for r in range(old.shape[0]):
        row, first = old[r], r * run
        coming = old[min(r + AHEAD, old.shape[0] - 1)]
        for start in range(0, run, LANES):
            for part in range(start, start + LANES, line):
                prefetch(coming, part)
            at = min(start, run - LANES)
            rest = lanes_below(row, at, mask, bound)
            if start == whole:  # the rest of a row: the last lanes, without those that were looked at already
                rest &= ~_U0 << np.uint64(whole - at)
            while rest != _U0:
                i = at + np.int64(trailing_zeros(rest))
                indices[k] = first + i
                exponents[k] = (row[i] & mask) >> shift
                rest &= rest - _U1
                k += 1
    return k


@kernel
def every_in_rows(old, mask, shift, indices, exponents):
    """As `hot_in_rows`, of all elements; rows may have any length."""
    k = np.int64(0)
    for r in range(old.shape[0]):
        for i in range(old.shape[1]):
            indices[k] = k
            exponents[k] = (old[r, i] & mask) >> shift
            k += 1
    return k


@kernel
def count_flat(old, mask, shift, every, counts):
    n = old.shape[0]
    for start in range(0, n, LANES * every):
        for i in range(start, min(n, start + LANES)):
            counts[np.int64((old[i] & mask) >> shift)] += every


@kernel
def count_in_rows(old, mask, shift, every, counts):
    run = old.shape[1]
    n = old.shape[0] * run
    for start in range(0, n, LANES * every):
        r, i = start // run, start % run
        for _ in range(start, min(n, start + LANES)):
            counts[np.int64((old[r, i] & mask) >> shift)] += every
            i += 1
            if i == run:
                r, i = r + 1, 0


@inlined
def _ordered(value, sign, floating):
    """The place of a bit pattern in the order of values."""
    if floating and value & sign:
        return ~value & (sign | (sign - _U1))
    return value ^ sign


@kernel
def _find_moves(old, new, sign, mask, shift, floating, moved):
    exponents, ups, sizes = moved
    top = np.uint64(1) << np.uint64(8 * old.itemsize - 1)
    every = top | (top - _U1)
    for j in range(old.shape[0]):
        before, after = np.uint64(old[j]), np.uint64(new[j])
        exponents[j] = (before & mask) >> shift
        difference = (_ordered(after, sign, floating) - _ordered(before, sign, floating)) & every
        ups[j] = difference < top
        sizes[j] = difference if difference < top else (every - difference) + _U1


@kernel
def undo_moves(ups, sizes, sign, floating, values):
    """values: the old ones, which become the new ones."""
    top = np.uint64(1) << np.uint64(8 * values.itemsize - 1)
    every = top | (top - _U1)
    for j in range(values.shape[0]):
        place = _ordered(np.uint64(values[j]), sign, floating)
        place = (place + sizes[j] if ups[j] else place - sizes[j]) & every
        if floating and not place & sign:
            values[j] = ~place & every
        else:
            values[j] = place ^ sign


@kernel
def merge_runs(indices, values, split, out_indices, out_values):
    """Merge two ascending runs, [0, split) and [split, k); returns False if an index is in both."""
    a, b, count = 0, split, indices.shape[0]
    for k in range(count):
        if b == count or (a < split and indices[a] < indices[b]):
            out_indices[k], out_values[k] = indices[a], values[a]
            a += 1
        else:
            if a < split and indices[a] == indices[b]:
                return False
            out_indices[k], out_values[k] = indices[b], values[b]
            b += 1
    return True


class Moves(NamedTuple):
    """Changes as moves: by how many bit patterns, in the order of values, and in which direction."""

    exponents: NDArray[np.uint16]  # (k,) of the old values
    ups: NDArray[np.bool_]  # (k,) whether towards +∞
    sizes: NDArray[np.uint64]  # (k,) steps, at least 1

    def at(self, where: slice | NDArray[np.int64]) -> "Moves":
        """Some of them."""
        return Moves(self.exponents[where], self.ups[where], self.sizes[where])


class Hot(NamedTuple):
    """The elements of a segment whose exponent is below a threshold."""

    indices: NDArray[np.uint32]  # (h,), ascending
    exponents: NDArray[np.uint16]  # (h,)


def count_exponents(old: UIntArray, field: Field, every: int) -> NDArray[np.int64]:
    """Estimate how many elements of old have each exponent, (E,), from every `every`-th run of 64; 1 is exact.

    old: (n,), contiguous; or (rows, run) that lie apart, where the elements of a row lie one after another, and are at
    least LANES.
    """
    counts = np.zeros(field.exponents, np.int64)
    kind = old.dtype.type
    count = count_flat if old.ndim == 1 else count_in_rows
    count(read_only(old), kind(field.mask), kind(field.shift), every, counts)
    return counts


def no_moves(count: int) -> Moves:
    """Memory for this many moves."""
    return Moves(np.empty(count, np.uint16), np.empty(count, np.bool_), np.empty(count, np.uint64))


def find_moves(old: UIntArray, new: UIntArray, field: Field, moved: Moves | None = None) -> Moves:
    """The moves that turn old (k,) into new (k,). moved: the memory for them, if they are not to be in new memory."""
    moved = moved or no_moves(len(old))
    sign, mask, shift = np.uint64(field.sign), np.uint64(field.mask), np.uint64(field.shift)
    _find_moves(read_only(old), read_only(new), sign, mask, shift, field.floating, moved)
    return moved


def apply_moves(
    old: UIntArray, indices: NDArray[np.uint32], ups: NDArray[np.bool_], sizes: NDArray[np.uint64], field: Field
) -> UIntArray:
    """The new values (k,) at indices (k,) of old, which are in range: the inverse of `find_moves`.

    old: as in `count_exponents`; indices count through all rows.
    """
    values = np.empty(len(indices), old.dtype)
    (gather if old.ndim == 1 else gather_rows)(old, indices, values)
    undo_moves(ups, sizes, np.uint64(field.sign), field.floating, values)
    return values
