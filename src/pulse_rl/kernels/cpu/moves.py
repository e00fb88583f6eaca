"""What the old bits say of a segment, compiled: exponents, which elements are hot, and how values moved.

The naive twins are in `reference_context.py`; the words are those of `docs/format.md`, "A `context` block".
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu.arrays import LANES, buffer, lanes_below, read_only, trailing_zeros

_U0, _U1 = np.uint64(0), np.uint64(1)


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _count_exponents(old, mask, shift, every, counts):
    n = old.shape[0]
    for start in range(0, n, LANES * every):
        for i in range(start, min(n, start + LANES)):
            counts[np.int64((old[i] & mask) >> shift)] += every


@njit(nogil=True, cache=True, inline="always")
def _ordered(value, sign, floating):
    if floating and value & sign:
        return ~value & (sign | (sign - _U1))
    return value ^ sign


@njit(nogil=True, cache=True)
def _moves(old, new, sign, mask, shift, floating, exponents, ups, sizes):
    top = np.uint64(1) << np.uint64(8 * old.itemsize - 1)
    every = top | (top - _U1)
    for j in range(old.shape[0]):
        before, after = np.uint64(old[j]), np.uint64(new[j])
        exponents[j] = (before & mask) >> shift
        difference = (_ordered(after, sign, floating) - _ordered(before, sign, floating)) & every
        ups[j] = difference < top
        sizes[j] = difference if difference < top else (every - difference) + _U1


@njit(nogil=True, cache=True)
def _move(old, indices, ups, sizes, sign, floating, values):
    top = np.uint64(1) << np.uint64(8 * old.itemsize - 1)
    every = top | (top - _U1)
    for j in range(indices.shape[0]):
        place = _ordered(np.uint64(old[indices[j]]), sign, floating)
        place = (place + sizes[j] if ups[j] else place - sizes[j]) & every
        if floating and not place & sign:
            values[j] = ~place & every
        else:
            values[j] = place ^ sign


@njit(nogil=True, cache=True)
def _merge(indices, values, split, out_indices, out_values):
    """Two ascending runs [0, split) and [split, k) into one; False if an index stands in both."""
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
    """How elements moved, in steps of their ordered bit patterns."""

    exponents: NDArray[np.uint16]  # of the old values, (k,)
    ups: NDArray[np.bool_]  # towards +∞, (k,)
    sizes: NDArray[np.uint64]  # steps, at least 1, (k,)


class Hot(NamedTuple):
    """The elements of a segment whose exponent is below a threshold."""

    indices: NDArray[np.uint32]  # ascending, (h,)
    exponents: NDArray[np.uint16]  # (h,)


def find_hot(old: UIntArray, field: Field, threshold: int) -> Hot:
    """The elements of old (n,) below a threshold. Scratch: good until this thread's next call."""
    indices = buffer("indices", len(old), np.uint32)
    exponents = buffer("exponents", len(old), np.uint16)
    if threshold >= field.exponents:
        # Every element: a bound above the largest magnitude need not fit the element's width.
        indices[: len(old)] = np.arange(len(old), dtype=np.uint32)
        count = len(old)
        exponents[:count] = (old & old.dtype.type(field.mask)) >> old.dtype.type(field.shift)
    else:
        kind = old.dtype.type
        bound = kind(threshold << field.shift)
        count = int(_find_hot(read_only(old), kind(field.mask), bound, kind(field.shift), indices, exponents))
    return Hot(indices[:count], exponents[:count])


def count_exponents(old: UIntArray, field: Field, every: int) -> NDArray[np.int64]:
    """How many elements have each exponent, (E,): counted in every so-manieth run of 64 and multiplied."""
    counts = np.zeros(field.exponents, np.int64)
    kind = old.dtype.type
    _count_exponents(read_only(old), kind(field.mask), kind(field.shift), every, counts)
    return counts


def find_moves(old: UIntArray, new: UIntArray, field: Field) -> Moves:
    """How old (k,) became new (k,)."""
    found = Moves(np.empty(len(old), np.uint16), np.empty(len(old), np.bool_), np.empty(len(old), np.uint64))
    _moves(
        read_only(old),
        read_only(new),
        np.uint64(field.sign),
        np.uint64(field.mask),
        np.uint64(field.shift),
        field.floating,
        found.exponents,
        found.ups,
        found.sizes,
    )
    return found


def apply_moves(
    old: UIntArray, indices: NDArray[np.uint32], ups: NDArray[np.bool_], sizes: NDArray[np.uint64], field: Field
) -> UIntArray:
    """The values (k,) that old (n,) at these indices, all in range, moves to: the inverse of `find_moves`."""
    values = np.empty(len(indices), old.dtype)
    _move(read_only(old), indices, ups, sizes, np.uint64(field.sign), field.floating, values)
    return values


def merge(indices: NDArray[np.uint32], values: UIntArray, split: int) -> tuple[NDArray[np.uint32], UIntArray] | None:
    """Two ascending runs of indices, [0, split) and [split, k), into one, with their values; None if one is in both."""
    merged = np.empty(len(indices), np.uint32), np.empty(len(indices), values.dtype)
    return merged if _merge(indices, values, split, *merged) else None
