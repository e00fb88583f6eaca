"""Exponents of old bits, hot elements, and changes as moves in the order of values, compiled.

The naive twins are in `tests/naive/context.py`; `docs/format.md` defines the terms under "A `context` block".
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu.arrays import AHEAD, LANES, read_only, trailing_zeros
from pulse_rl.kernels.cpu.compiled import inlined, kernel, part
from pulse_rl.kernels.cpu.spots import ask_for, lanes_up_to, load

_U0, _U1 = np.uint64(0), np.uint64(1)

# What a segment is, as kernels take it: where its old bits lie, as `coding.MemoryRows`; what it is, as `coding.Kind`;
# where its changes begin and end among those of all, and its stream.
_COLUMNS = ("rows", "run", "apart", "stride", "phase", "number", "begin", "end", "stream", "stream_end")
SEGMENT = np.dtype([("address", np.uint64), *((name, np.int64) for name in _COLUMNS)])


@part
def find_hot(like, segment, mask, most, shift, indices, exponents):
    """Find the elements whose bits of the exponent are `most` or less. Returns how many.

    like: an array of their dtype. Where there are several rows, each has at least LANES elements.
    """
    address, rows, run = segment.address, segment.rows, segment.run
    line = 64 // like.itemsize  # elements
    k = np.int64(0)
    for r in range(rows):
        first = r * run
        coming = np.uint64(segment.apart * min(AHEAD, rows - 1 - r))
        for start in range(0, run, LANES):
            at = max(0, min(start, run - LANES))
            if run < LANES:
                rest = _U0
                for i in range(run):
                    rest |= np.uint64((load(like, address, i) & mask) <= most) << np.uint64(i)
            else:
                if coming:  # processors do not foresee where the next row lies
                    for piece in range(start, start + LANES, line):
                        ask_for(like, address + coming, piece)
                rest = lanes_up_to(like, address, at, mask, most)
                rest &= ~_U0 << np.uint64(start - at)  # the rest of a row: without what was looked at already
            while rest != _U0:
                i = at + np.int64(trailing_zeros(rest))
                indices[k] = first + i
                exponents[k] = (load(like, address, i) & mask) >> shift
                rest &= rest - _U1
                k += 1
        address += np.uint64(segment.apart)
    return k


@kernel
def count_in_segments(like, segments, mask, shift, every, counts):
    line = 64 // like.itemsize  # elements
    for s in range(segments.shape[0]):
        segment, each = segments[s], every[s]
        run, n = segment.run, segment.rows * segment.run
        coming = segments[min(s + 1, segments.shape[0] - 1)].address  # processors do not foresee where that lies
        for start in range(0, n, LANES * each):
            for piece in range(start, start + LANES, line):
                ask_for(like, coming, piece)
            row, i = segment.address + np.uint64(start // run * segment.apart), start % run
            left = min(n - start, LANES)
            while left > 0:
                here = min(left, run - i)
                for k in range(i, i + here):
                    counts[s, np.int64((load(like, row, k) & mask) >> shift)] += each
                row, i, left = row + np.uint64(segment.apart), np.int64(0), left - here


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


def no_moves(count: int) -> Moves:
    """Memory for this many moves."""
    return Moves(np.empty(count, np.uint16), np.empty(count, np.bool_), np.empty(count, np.uint64))


def find_moves(old: UIntArray, new: UIntArray, field: Field, moved: Moves | None = None) -> Moves:
    """The moves that turn old (k,) into new (k,). moved: the memory for them, if they are not to be in new memory."""
    moved = moved or no_moves(len(old))
    sign, mask, shift = np.uint64(field.sign), np.uint64(field.mask), np.uint64(field.shift)
    _find_moves(read_only(old), read_only(new), sign, mask, shift, field.floating, moved)
    return moved


def apply_moves(old: UIntArray, ups: NDArray[np.bool_], sizes: NDArray[np.uint64], field: Field) -> UIntArray:
    """The new values (k,) that old ones (k,) become: the inverse of `find_moves`."""
    values = old.copy()
    undo_moves(ups, sizes, np.uint64(field.sign), field.floating, values)
    return values
