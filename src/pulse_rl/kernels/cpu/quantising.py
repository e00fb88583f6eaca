"""Quantise bfloat16 in blocks: the largest magnitude of each, the codes under given factors, and what a change does.

A stack of matrices is (rows, columns) of bfloat16 bits, one matrix after another. The blocks of each lie in a grid,
those at the right and lower edge cut off; the rows of all grids follow one another, too. A value becomes a code in one
of three ways: multiplied by the block's factor, divided by it, or divided by it and rounded to bfloat16 first. The
factors themselves are made in `weights.views.rules`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.loco import FORMATS, bits_of, float_of, rounded

MULTIPLIED, DIVIDED, DIVIDED_NARROW = 0, 1, 2  # how a value becomes a code
_MAGNITUDE = np.uint16(0x7FFF)
_E4M3, _BF16 = FORMATS["float8_e4m3fn"], FORMATS["bfloat16"]


class BlockGrid(NamedTuple):
    """How a stack of matrices is cut into blocks."""

    rows: int  # of a block
    columns: int
    height: int  # rows of a matrix


@inlined
def _down(row, grid):
    """In which row of blocks a row lies."""
    return row // grid.height * ((grid.height + grid.rows - 1) // grid.rows) + row % grid.height // grid.rows


@kernel
def _largest(bits, grid, first, largest):
    for row in range(bits.shape[0]):
        down = _down(first + row, grid)
        for across in range(largest.shape[1]):
            line = bits[row, across * grid.columns : (across + 1) * grid.columns]
            found = largest[down, across]
            for i in range(line.shape[0]):
                magnitude = np.uint16(line[i] & _MAGNITUDE)
                found = magnitude if magnitude > found else found
            largest[down, across] = found


def largest(bits: NDArray[np.uint16], grid: BlockGrid, first: int, found: NDArray[np.uint16]) -> None:
    """Raise what was found of each block to the largest magnitude in some rows.

    bits: (n, columns), the rows from `first` on. found: (blocks down, blocks across), of all rows; bits without their
    sign, among which NaN is the largest.
    """
    _largest(read_only(bits), grid, first, found)


@inlined
def _code(bits, factor, how):
    value = float_of(np.uint32(np.uint32(bits) << np.uint32(16)))
    if how == MULTIPLIED:
        return rounded(bits_of(np.float32(value * factor)), _E4M3)
    if how == DIVIDED:
        return rounded(bits_of(np.float32(value / factor)), _E4M3)
    narrow = np.uint32(rounded(bits_of(np.float32(value / factor)), _BF16) << np.uint32(16))
    # A zero point of 0 is added: −0 becomes +0.
    return rounded(bits_of(np.float32(float_of(narrow) + np.float32(0))), _E4M3)


@kernel
def _quantise(bits, grid, first, factors, how, codes):
    for row in range(bits.shape[0]):
        down = _down(first + row, grid)
        for across in range(factors.shape[1]):
            start, stop = across * grid.columns, (across + 1) * grid.columns
            line, into, factor = bits[row, start:stop], codes[row, start:stop], factors[down, across]
            if how == MULTIPLIED:
                for i in range(line.shape[0]):
                    into[i] = _code(line[i], factor, MULTIPLIED)
            elif how == DIVIDED:
                for i in range(line.shape[0]):
                    into[i] = _code(line[i], factor, DIVIDED)
            else:
                for i in range(line.shape[0]):
                    into[i] = _code(line[i], factor, DIVIDED_NARROW)


def quantise(
    bits: NDArray[np.uint16],
    grid: BlockGrid,
    first: int,
    factors: NDArray[np.float32],
    how: int,
    codes: NDArray[np.uint8],
) -> None:
    """Write the FP8 E4M3 codes (n, columns) of some rows, saturated at ±448.

    bits, first: as for `largest`. factors: (blocks down, blocks across). how: MULTIPLIED, DIVIDED or DIVIDED_NARROW.
    """
    _quantise(read_only(bits), grid, first, read_only(factors), how, codes)


@kernel
def _touch(flat, old, new, grid, columns, found, stale):
    for i in range(flat.shape[0]):
        at = np.int64(flat[i])
        down, across = _down(at // columns, grid), at % columns // grid.columns
        before, after = np.uint16(old[i] & _MAGNITUDE), np.uint16(new[i] & _MAGNITUDE)
        if after >= found[down, across]:
            found[down, across] = after
        elif before == found[down, across]:
            stale[down, across] = True


def touch(
    flat: NDArray[np.uint32],
    old: NDArray[np.uint16],
    new: NDArray[np.uint16],
    grid: BlockGrid,
    columns: int,
    found: NDArray[np.uint16],
    stale: NDArray[np.bool_],
) -> None:
    """Bring the largest magnitudes of blocks up to date with changed elements.

    flat: (k,) their flat positions; old, new: (k,) their bits. found: (blocks down, blocks across), as before. stale:
    the same shape; gets True where the largest one became smaller, so that the block has to be looked through.
    """
    _touch(read_only(flat), read_only(old), read_only(new), grid, columns, found, stale)


@kernel
def _requantise(flat, new, grid, columns, factors, how, codes):
    for i in range(flat.shape[0]):
        at = np.int64(flat[i])
        row, column = at // columns, at % columns
        factor = factors[_down(row, grid), column // grid.columns]
        codes[row, column] = _code(new[i], factor, how)


def requantise(
    flat: NDArray[np.uint32],
    new: NDArray[np.uint16],
    grid: BlockGrid,
    columns: int,
    factors: NDArray[np.float32],
    how: int,
    codes: NDArray[np.uint8],
) -> None:
    """Write the codes of changed elements. codes: (rows, columns), all; flat, new: as for `touch`."""
    _requantise(read_only(flat), read_only(new), grid, columns, read_only(factors), how, codes)


def warm() -> None:
    """Compile them all."""
    bits, grid = np.zeros((2, 64), np.uint16), BlockGrid(1, 32, 2)
    found, codes = np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint8)
    flat, factors = np.arange(4, dtype=np.uint32), np.ones((2, 2), np.float32)
    largest(bits, grid, 0, found)
    quantise(bits, grid, 0, factors, MULTIPLIED, codes)
    touch(flat, bits[0, :4].copy(), bits[0, :4].copy(), grid, 64, found, np.zeros((2, 2), np.bool_))
    requantise(flat, bits[0, :4].copy(), grid, 64, factors, MULTIPLIED, codes)
