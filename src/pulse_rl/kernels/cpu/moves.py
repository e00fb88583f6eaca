"""Exponents of old bits, hot elements, and changes as moves in the order of values, compiled.

The naive twins are in `kernels/reference/context.py`; `docs/format.md` defines the terms under "A `context` block".
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu.arrays import AHEAD, LANES, buffer, lanes_below, prefetch, read_only, trailing_zeros
from pulse_rl.kernels.cpu.changes import gather, gather_rows
from pulse_rl.kernels.cpu.compiled import inlined, kernel

_U0, _U1 = np.uint64(0), np.uint64(1)


@kernel
def _find_hot(old, mask, bound, shift, indices, exponents):
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
def _find_hot_rows(old, mask, bound, shift, indices, exponents):
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
def _count_exponents(old, mask, shift, every, counts):
    n = old.shape[0]
    for start in range(0, n, LANES * every):
        for i in range(start, min(n, start + LANES)):
            counts[np.int64((old[i] & mask) >> shift)] += every


@kernel
def _count_exponents_rows(old, mask, shift, every, counts):
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
def _apply_moves(ups, sizes, sign, floating, values):
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
def _merge(indices, values, split, out_indices, out_values):
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


class Hot(NamedTuple):
    """The elements of a segment whose exponent is below a threshold."""

    indices: NDArray[np.uint32]  # (h,), ascending
    exponents: NDArray[np.uint16]  # (h,)


def find_hot(old: UIntArray, field: Field, threshold: int) -> Hot:
    """Find the elements of old below a threshold. The result is valid until this thread's next call.

    old: (n,), contiguous; or (rows, run) that lie apart, whose indices count through all rows. The elements of a row
    lie one after another, and are at least LANES.
    """
    count = old.size
    indices = buffer("indices", count, np.uint32)
    exponents = buffer("exponents", count, np.uint16)
    kind = old.dtype.type
    if threshold >= field.exponents:
        # All elements: a bound above the largest magnitude may not fit the element's width.
        indices[:count] = np.arange(count, dtype=np.uint32)
        exponents[:count] = ((old & kind(field.mask)) >> kind(field.shift)).reshape(-1)
    else:
        find = _find_hot if old.ndim == 1 else _find_hot_rows
        bound = kind(threshold << field.shift)
        count = int(find(read_only(old), kind(field.mask), bound, kind(field.shift), indices, exponents))
    return Hot(indices[:count], exponents[:count])


def count_exponents(old: UIntArray, field: Field, every: int) -> NDArray[np.int64]:
    """Estimate how many elements of old have each exponent, (E,), from every `every`-th run of 64; 1 is exact.

    old: as in `find_hot`.
    """
    counts = np.zeros(field.exponents, np.int64)
    kind = old.dtype.type
    count = _count_exponents if old.ndim == 1 else _count_exponents_rows
    count(read_only(old), kind(field.mask), kind(field.shift), every, counts)
    return counts


def find_moves(old: UIntArray, new: UIntArray, field: Field) -> Moves:
    """The moves that turn old (k,) into new (k,)."""
    moved = Moves(np.empty(len(old), np.uint16), np.empty(len(old), np.bool_), np.empty(len(old), np.uint64))
    sign, mask, shift = np.uint64(field.sign), np.uint64(field.mask), np.uint64(field.shift)
    _find_moves(read_only(old), read_only(new), sign, mask, shift, field.floating, moved)
    return moved


def apply_moves(
    old: UIntArray, indices: NDArray[np.uint32], ups: NDArray[np.bool_], sizes: NDArray[np.uint64], field: Field
) -> UIntArray:
    """The new values (k,) at indices (k,) of old, which are in range: the inverse of `find_moves`.

    old: as in `find_hot`.
    """
    values = np.empty(len(indices), old.dtype)
    (gather if old.ndim == 1 else gather_rows)(old, indices, values)
    _apply_moves(ups, sizes, np.uint64(field.sign), field.floating, values)
    return values


def merge(indices: NDArray[np.uint32], values: UIntArray, split: int) -> tuple[NDArray[np.uint32], UIntArray] | None:
    """Merge two ascending runs of indices, [0, split) and [split, k), and their values; None if an index is in both."""
    merged = np.empty(len(indices), np.uint32), np.empty(len(indices), values.dtype)
    return merged if _merge(indices, values, split, *merged) else None
