"""Quantise bfloat16 in blocks: the largest magnitude of each, the codes under given factors, and what changes do.

A stack of matrices is (rows, columns) of bfloat16 bits, one matrix after another. The blocks of each lie in a grid,
those at the right and lower edge cut off; the rows of all grids follow one another, too. A value is multiplied by the
block's factor, or divided by it, and perhaps rounded to bfloat16 first; it becomes a code of FP8, of INT8 or of FP4, of
which a byte has two, the first one in its lower half. The factors themselves are made in `weights.views.rules`.

All blocks of a view have numbers, and each has a mark while changes are followed: `touch` finds which blocks changes
are in, and `requantise` writes codes and says what they were, of many tensors in a call.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.loco import E2M1, FORMATS, bits_of, float_of, rounded
from pulse_rl.kernels.cpu.spots import ask_for, load, store

# How a value becomes a code; from DIVIDED_FP4 on a byte has two.
MULTIPLIED, DIVIDED, DIVIDED_NARROW, DIVIDED_WHOLE, DIVIDED_FP4, DIVIDED_NARROW_FP4 = range(6)
UNTOUCHED, TOUCHED, STALE, RESCALED = map(np.uint8, range(4))  # marks of blocks
_MAGNITUDE = np.uint16(0x7FFF)
_WHOLE = np.float32(3 << 22)
_E4M3, _BF16 = FORMATS["float8_e4m3fn"], FORMATS["bfloat16"]


class BlockGrid(NamedTuple):
    """How a stack of matrices is cut into blocks."""

    rows: int  # of a block
    columns: int
    height: int  # rows of a matrix


# A part of a tensor in which elements change, and the stack that it lies in: where this has its bits and its codes, the
# number of its first block, how many of these are beside each other, and its columns; then its grid, the number of its
# first matrix' table of factors, and how much larger the next one's is. Then how many rows and columns of how many
# matrices the part has, where it begins, its changes among those of all, and its elements.
_STACK = ("blocks", "across", "columns", "block_rows", "block_columns", "height", "table", "tables")
_PART = ("first", "column", "rows", "width", "begin", "end", "size")
PLACE = np.dtype([("source", np.uint64), ("codes", np.uint64), *((name, np.int64) for name in (*_STACK, *_PART))])


@inlined
def _down(row, grid):
    """In which row of blocks a row lies."""
    return row // grid.height * ((grid.height + grid.rows - 1) // grid.rows) + row % grid.height // grid.rows


@kernel
def _largest(bits, grid, first, marks, largest):
    for row in range(bits.shape[0]):
        down = _down(first + row, grid)
        for across in range(largest.shape[1]):
            if marks[down, across] != STALE:
                continue
            line = bits[row, across * grid.columns : (across + 1) * grid.columns]
            found = largest[down, across]
            for i in range(line.shape[0]):
                magnitude = np.uint16(line[i] & _MAGNITUDE)
                found = magnitude if magnitude > found else found
            largest[down, across] = found


def largest(
    bits: NDArray[np.uint16], grid: BlockGrid, first: int, marks: NDArray[np.uint8], found: NDArray[np.uint16]
) -> None:
    """Raise what was found of each block that is STALE to the largest magnitude in some rows.

    bits: (n, columns), the rows from `first` on. marks, found: (blocks down, blocks across), of all rows; bits without
    their sign, among which NaN is the largest.
    """
    _largest(read_only(bits), grid, first, read_only(marks), found)


@inlined
def _e4m3(value):
    # Of all NaN that of 0 · ∞ on x86: the sign of a product of two depends on how the loop was compiled.
    code = rounded(bits_of(value), _E4M3)
    return np.uint32(0xFF) if code & np.uint32(0x7F) == np.uint32(0x7F) else code


@inlined
def _code(bits, factor, how):
    value = float_of(np.uint32(np.uint32(bits) << np.uint32(16)))
    if how == MULTIPLIED:
        return _e4m3(np.float32(value * factor))
    if how == DIVIDED:
        return _e4m3(np.float32(value / factor))
    if how != DIVIDED_FP4:
        narrow = np.uint32(rounded(bits_of(np.float32(value / factor)), _BF16) << np.uint32(16))
        value = float_of(narrow)
    else:
        value = np.float32(value / factor)
    # A zero point of 0 is added: −0 becomes +0.
    value = np.float32(value + np.float32(0))
    if how == DIVIDED_NARROW:
        return _e4m3(value)
    if how >= DIVIDED_FP4:
        return rounded(bits_of(value), E2M1)
    value = min(max(value, np.float32(-128)), np.float32(127))
    # Of so large a float the last bits are whole numbers: the sum is rounded to the nearest one, halves to even.
    return bits_of(np.float32(value + _WHOLE)) & np.uint32(255)


@inlined
def _codes(line, factor, how, into):
    for i in range(line.shape[0]):
        into[i] = _code(line[i], factor, how)


@inlined
def _pairs(line, factor, how, into):
    for i in range(into.shape[0]):
        into[i] = _code(line[2 * i], factor, how) | _code(line[2 * i + 1], factor, how) << np.uint32(4)


@kernel
def _quantise(bits, grid, first, factors, how, codes):
    for row in range(bits.shape[0]):
        down = _down(first + row, grid)
        for across in range(factors.shape[1]):
            start, stop = across * grid.columns, (across + 1) * grid.columns
            line, factor = bits[row, start:stop], factors[down, across]
            into = codes[row, start // 2 : stop // 2] if how >= DIVIDED_FP4 else codes[row, start:stop]
            if how == MULTIPLIED:
                _codes(line, factor, MULTIPLIED, into)
            elif how == DIVIDED:
                _codes(line, factor, DIVIDED, into)
            elif how == DIVIDED_NARROW:
                _codes(line, factor, DIVIDED_NARROW, into)
            elif how == DIVIDED_WHOLE:
                _codes(line, factor, DIVIDED_WHOLE, into)
            elif how == DIVIDED_FP4:
                _pairs(line, factor, DIVIDED_FP4, into)
            else:
                _pairs(line, factor, DIVIDED_NARROW_FP4, into)


def quantise(
    bits: NDArray[np.uint16],
    grid: BlockGrid,
    first: int,
    factors: NDArray[np.float32],
    how: int,
    codes: NDArray[np.uint8],
) -> None:
    """Write the codes of some rows: FP8 E4M3, saturated at ±448, INT8, at −128 and 127, or FP4 E2M1, at ±6.

    bits, first: as for `largest`. factors: (blocks down, blocks across). how: MULTIPLIED, DIVIDED or DIVIDED_NARROW;
    DIVIDED_WHOLE for INT8; DIVIDED_FP4 or DIVIDED_NARROW_FP4. codes: (n, columns); of FP4 (n, columns / 2), and the
    columns of a block are even.
    """
    _quantise(read_only(bits), grid, first, read_only(factors), how, codes)


class _Corner(NamedTuple):
    """The first element of a place: its row in its matrix, and the rows of elements and of blocks above this one."""

    row: int
    above: int
    down: int


@inlined
def _corner(place):
    row = place.first % place.height
    above = place.first - row
    return _Corner(row, above, above // place.height * _high(place))


@inlined
def _high(place):
    """Rows of blocks of a matrix."""
    return (place.height + place.block_rows - 1) // place.block_rows


@inlined
def _find(place, corner, i):
    """Where an element of a place lies in its stack, and the number of its block.

    i: uint32. A division of 32 bits takes a third of the time of one of 64.
    """
    row = np.uint32(i // np.uint32(place.width))
    column = np.int64(np.uint32(i - row * np.uint32(place.width))) + place.column
    above, down = corner.above, corner.down
    if np.int64(row) >= place.rows:
        matrix = np.uint32(row // np.uint32(place.rows))
        row = np.uint32(row - matrix * np.uint32(place.rows))
        above, down = above + np.int64(matrix) * place.height, down + np.int64(matrix) * _high(place)
    row = np.uint32(row + np.uint32(corner.row))
    down += np.int64(np.uint32(row // np.uint32(place.block_rows)))
    across = np.int64(np.uint32(np.uint32(column) // np.uint32(place.block_columns)))
    return (above + np.int64(row)) * place.columns + column, place.blocks + down * place.across + across


@kernel
def _touch(places, indices, old, largest, marks, seen, touched):
    flats, blocks, new = seen
    count = 0
    for s in range(places.shape[0]):
        place = places[s]
        corner = _corner(place)
        for k in range(place.begin, place.end):  # ask for the cache lines: a load waits for those before it
            flats[k], blocks[k] = _find(place, corner, indices[k])
            ask_for(new, place.source, flats[k])
        for k in range(place.begin, place.end):
            new[k] = load(new, place.source, flats[k])
            block = blocks[k]
            if marks[block] == UNTOUCHED:
                marks[block] = TOUCHED
                touched[count] = block
                count += 1
            before, after = np.uint16(old[k] & _MAGNITUDE), np.uint16(new[k] & _MAGNITUDE)
            if after >= largest[block]:
                largest[block] = after
            elif before == largest[block]:
                marks[block] = STALE
    return count


class Seen(NamedTuple):
    """Changed elements, (k,) each."""

    flats: NDArray[np.int64]  # where they lie in their stacks
    blocks: NDArray[np.int64]
    new: NDArray[np.uint16]  # their bits


def touch(
    places: NDArray[np.void],
    indices: NDArray[np.uint32],
    old: NDArray[np.uint16],
    largest: NDArray[np.uint16],
    marks: NDArray[np.uint8],
) -> tuple[Seen, NDArray[np.int64]]:
    """Find in which blocks elements have changed, and raise the largest magnitudes of these.

    places: (n,) PLACE. indices: (k,) in their places; old: (k,) the bits before. largest, marks: (blocks,). Blocks that
    were UNTOUCHED become TOUCHED, or STALE where the largest magnitude became smaller and has to be looked for.
    Returns the elements as they are, and the blocks that were UNTOUCHED.
    """
    size = len(indices)
    seen = Seen(np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint16))
    touched = np.empty(min(size, len(marks)), np.int64)
    count = _touch(read_only(places), read_only(indices), read_only(old), largest, marks, seen, touched)
    return seen, touched[:count]


@inlined
def _table(place, flat):
    """The number of an element's table of factors."""
    return place.table + (flat // (place.columns * place.height) * place.tables if place.tables else 0)


@inlined
def _write(place, flat, bits, factor, how, i, changed, first, count):
    """Write the code of an element; where its byte changes, the byte's index and what it was. Returns how many have.

    first: how many there were before this place.
    """
    indices, codes = changed
    code = np.uint8(_code(bits, factor, how))
    if how >= DIVIDED_FP4:
        half, flat, i = np.uint8(4 * (flat & 1)), flat >> 1, np.uint32(i >> 1)
        before = load(codes, place.codes, flat)
        code = np.uint8(before & np.uint8(0xF0 >> half) | np.uint8(code << half))
        if count > first and indices[count - 1] == i:  # the other half has changed, too
            store(codes, place.codes, flat, code)
            return count
    else:
        before = load(codes, place.codes, flat)
    if before == code:
        return count
    store(codes, place.codes, flat, code)
    indices[count], codes[count] = i, before
    return count + 1


@kernel
def _requantise(places, indices, seen, marks, numbers, factors, how, counts, changed):
    flats, blocks, new = seen
    count = 0
    halves = np.int64(1 if how >= DIVIDED_FP4 else 0)
    for s in range(places.shape[0]):
        place, first = places[s], count
        k, i = place.begin, np.int64(0)
        if place.size == 0:
            for j in range(place.begin, place.end):
                ask_for(changed[1], place.codes, flats[j] >> halves)
            for j in range(place.begin, place.end):
                factor = factors[_table(place, flats[j]), numbers[blocks[j]]]
                count = _write(place, flats[j], new[j], factor, how, indices[j], changed, first, count)
        corner = _corner(place)
        while i < place.size:  # row by row, all that lies in one block
            (flat, block), end = _find(place, corner, np.uint32(i)), i + place.width
            table, column = _table(place, flat), place.column % place.block_columns
            while i < end:
                stop, anew = min(end, i + place.block_columns - column), marks[block] == RESCALED
                for j in range(i, stop if anew else i):
                    bits, factor = load(new, place.source, flat + j - i), factors[table, numbers[block]]
                    count = _write(place, flat + j - i, bits, factor, how, np.uint32(j), changed, first, count)
                while k < place.end and np.int64(indices[k]) < stop:
                    if not anew:
                        factor = factors[table, numbers[block]]
                        count = _write(place, flats[k], new[k], factor, how, indices[k], changed, first, count)
                    k += 1
                flat, i, block, column = flat + stop - i, stop, block + 1, 0
        counts[s] = count - first
    return count


def requantise(
    places: NDArray[np.void],
    indices: NDArray[np.uint32],
    seen: Seen,
    marks: NDArray[np.uint8],
    numbers: NDArray[np.uint16],
    factors: NDArray[np.float32],
    how: int,
    most: int,
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint8]]:
    """Write the codes of changed elements, and of all elements of blocks that are RESCALED.

    places, indices, marks: as for `touch`, which has `seen` these elements. Only places whose `size` is not 0 may have
    RESCALED blocks. numbers: (blocks,) of each scale. factors: (tables, scales) by these. most: how many codes can
    change. Returns how many bytes of codes have changed in each place, their indices in it, ascending, and what they
    were. Places of FP4 begin and end at even columns: else the indices do not count.
    """
    counts = np.empty(len(places), np.int64)
    changed = np.empty(most, np.uint32), np.empty(most, np.uint8)
    read = Seen(read_only(seen.flats), read_only(seen.blocks), read_only(seen.new))
    inputs = read_only(places), read_only(indices), read, read_only(marks)
    count = _requantise(*inputs, read_only(numbers), read_only(factors), how, counts, changed)
    return counts, changed[0][:count].copy(), changed[1][:count].copy()


def warm() -> None:
    """Compile them all."""
    bits, grid = np.zeros((2, 64), np.uint16), BlockGrid(1, 32, 2)
    found, codes, marks = np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint8), np.full((2, 2), STALE)
    largest(bits, grid, 0, marks, found)
    quantise(bits, grid, 0, np.ones((2, 2), np.float32), MULTIPLIED, codes)
    place = np.zeros(1, PLACE)
    place["source"], place["codes"] = bits.ctypes.data, codes.ctypes.data
    place["columns"] = place["width"] = 64
    place["block_rows"] = place["rows"] = 1
    place["height"], place["block_columns"], place["across"], place["end"] = 2, 32, 2, 4
    flat, factors = np.arange(4, dtype=np.uint32), np.ones((1, 1 << 15), np.float32)
    seen, _ = touch(place, flat, bits[0, :4].copy(), found.reshape(-1), marks.reshape(-1))
    requantise(place, flat, seen, marks.reshape(-1), found.reshape(-1), factors, MULTIPLIED, 4)
