"""The segment coder of the context codec, compiled.

It codes one segment's changes given the old bits, in the two phases of `docs/format.md`, "A segment's stream":

1. the *hot* elements (those whose old exponent is below a threshold) in order: does each change? If so, in which
   direction and by how many steps?
2. the changes among the other, *cold* elements: the gap to each one, its direction and its size.

The encoder writes what it codes as events first, which `rangecoder` codes or counts. The decoder takes the same steps
bit by bit, and both compute contexts by the same helpers. `moves` finds hot elements and turns changes into moves and
back. The decoder in plain Python is in `tests/naive/context.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,arg-type"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.compiled import inlined, kernel, part
from pulse_rl.kernels.cpu.rangecoder import (
    SLACK,
    add_bit,
    add_count,
    add_raw,
    count_events,
    decode_bit,
    decode_count,
    decode_raw,
    encode_events,
    finish,
    log2_floor,
    start_decoder,
    start_encoder,
)

LEVELS = 5  # of a row's activity so far
UNARY = 4  # the first bits of a size, which have contexts for each exponent
SCALES = 64  # how far a size can reach above the largest exponent
GAPS = 64  # contexts of gaps: 32 for the length, 32 for the bit below the leading one
SIGNS = 22  # contexts of directions
COLUMN_KEEPS, ROW_KEEPS = np.int64(230), np.int64(243)  # of a lean, in 1/256
CHANGE_EVENTS = 128  # of one change, at most
GAP_BITS = np.int64(20)  # the longest that a gap can be, below its leading one

_U0, _U1 = np.uint64(0), np.uint64(1)
_I0 = np.int64(0)  # Numba compiles a function anew for each number that is written in a call of it


class Place(NamedTuple):
    """A segment's size, and its place in the rows of its tensor."""

    size: int  # elements
    bits: int  # of an element
    row: int  # elements in a row of the tensor
    phase: int  # column of the segment's first element


class Start(NamedTuple):
    """The statistics that a segment starts from. E is the number of exponents of its dtype."""

    threshold: int  # elements with a smaller exponent are hot; 0 to E
    share: NDArray[np.int64]  # (E,) probability of a change by exponent, in 2^-16
    states: NDArray[np.int64]  # (Tables.size,) states of all contexts; the coder changes them


class Changed(NamedTuple):
    """A segment's decoded changes, in the order of its stream: hot ones, then cold ones, each ascending."""

    indices: NDArray[np.uint32]  # (k,)
    ups: NDArray[np.bool_]  # (k,) whether the value grew
    sizes: NDArray[np.uint64]  # (k,) steps, at least 1


class Tables(NamedTuple):
    """The context at which each table starts; activity, (E, LEVELS), starts at 0."""

    unary: int  # (E, UNARY)
    scale: int  # (E + SCALES,)
    top: int  # (E + SCALES, 3)
    gap: int  # (GAPS,)
    sign: int  # (SIGNS,)
    size: int  # contexts in all


class Telling(NamedTuple):
    """How far the changes of a segment are told."""

    hot: int  # hot elements passed
    change: int  # the change that comes next in its phase
    left: int  # changes that are not told yet
    last: int  # the index of the last cold change
    row: "Row"


class Row(NamedTuple):
    """The row of the tensor that the coder is in, and what it has seen there."""

    begin: int  # the index of its first element, negative where the segment starts later in the row
    end: int  # the index after its last element
    found: int  # changes
    expected: int  # changes that the exponents led to expect, in 2^-16
    lean: int  # above 0 where directions agree with those of the columns


@kernel
def tables(exponents):
    """The tables of a dtype with this many exponents."""
    unary = LEVELS * exponents
    scale = unary + UNARY * exponents
    top = scale + exponents + SCALES
    gap = top + 3 * (exponents + SCALES)
    sign = gap + GAPS
    return Tables(unary, scale, top, gap, sign, sign + SIGNS)


# Contexts


@inlined
def _first_row(place):
    zero = np.int64(0)
    return Row(np.int64(-place.phase), np.int64(place.row - place.phase), zero, zero, zero)


@inlined
def _row_of(row, place, i):
    """The row of element i, which is this one or a later one: a new row has seen nothing."""
    if i < row.end:
        return row
    begin = i - (i + place.phase) % place.row
    zero = np.int64(0)
    return Row(begin, begin + place.row, zero, zero, zero)


@inlined
def _level(row):
    """How active a row has been so far: (found + 2) / (expected + 2) against 0.6, 0.84, 1.19 and 1.69."""
    a, b = (row.found + 2) << 21, row.expected + (2 << 16)
    return np.int64(a >= 19 * b) + np.int64(a >= 27 * b) + np.int64(a >= 38 * b) + np.int64(a >= 54 * b)


@inlined
def _grade(lean):
    a = abs(lean)
    grade = np.int64(a >= 16) + np.int64(a >= 48) + np.int64(a >= 96)
    return grade if lean >= 0 else -grade


@inlined
def _sign_context(column_grade, row_lean):
    return 0 if column_grade == 0 else 1 + 7 * (abs(column_grade) - 1) + _grade(row_lean) + 3


@inlined
def _faded(lean, keep):
    return (lean * keep) >> 8 if lean >= 0 else -((-lean * keep) >> 8)


@inlined
def _learned(row, leans, column, up):
    """The row after a change: the column and the row learn its direction."""
    of_column, of_row = np.int64(leans[column]), row.lean
    sign = 1 if up else -1
    leans[column] = _faded(of_column, COLUMN_KEEPS) + (sign if of_row >= 0 else -sign) * min(32, 8 + abs(of_row))
    agreement = 16 * sign if of_column > 0 else (-16 * sign if of_column < 0 else 0)
    return Row(row.begin, row.end, row.found + 1, row.expected, _faded(of_row, ROW_KEEPS) + agreement)


@inlined
def _expecting(row, share):
    """The row after an element that changes with this probability, in 2^-16."""
    return Row(row.begin, row.end, row.found, row.expected + share, row.lean)


# Encoding. Arguments: events (n,) uint16, memory for those that are coded at once. indices (k,) uint32, ascending, and
# moved (k,): the changes. leans (row,) int32: of each column; zeros at first. Loops take arrays out of their tuples
# before they start: to take one out counts a reference, which costs 8 % of the time if it is done for every element.


@part
def _add_size(events, k, at, exponent, size):
    """A number of steps, at least 1: its bit length in unary, two bits in context, the rest raw. at: the tables."""
    length = log2_floor(size)
    for j in range(length + 1):
        i = at.unary + UNARY * exponent + j if j < UNARY else at.scale + exponent + j
        k = add_bit(events, k, i, np.int64(j < length))
    prefix = 1
    for j in range(min(length, 2)):
        bit = np.int64((size >> np.uint64(length - 1 - j)) & _U1)
        k = add_bit(events, k, at.top + 3 * (exponent + length) + prefix - 1, bit)
        prefix = 2 * prefix + bit
    return add_raw(events, k, size, length - 2)


@inlined
def _hot_at(hots, exponents, h):
    """A hot element's index and exponent. They are loaded before the element comes: a device would wait for them."""
    if h < hots.shape[0]:
        return np.int64(hots[h]), np.int64(exponents[h])
    return _I0, _I0


@inlined
def _next(j, hot, moved, threshold):
    """The first change from j on that is hot, or that is cold."""
    exponents = moved.exponents
    while j < exponents.shape[0] and (np.int64(exponents[j]) < threshold) != hot:
        j += 1
    return j


@part
def begin_telling(place, start, hot, moved):
    """How far a segment is written as events at first: not at all."""
    first = _next(_I0, hot.indices.shape[0] > 0, moved, start.threshold)
    return Telling(_I0, first, np.int64(moved.sizes.shape[0]), np.int64(-1), _first_row(place))


@part
def tell(events, place, start, hot, indices, moved, leans, walk):
    """Write what comes next in a segment as events. Returns how many, and how far this is."""
    at = tables(start.share.shape[0])
    share, threshold, hots, exponents = start.share, start.threshold, hot.indices, hot.exponents
    ups, sizes = moved.ups, moved.sizes
    h, j, left, last, row = walk
    k, room, count = _I0, events.shape[0] - CHANGE_EVENTS, indices.shape[0]
    while left > 0 and k < room:
        is_hot = h < hots.shape[0]
        if is_hot:
            i, exponent = np.int64(hots[h]), np.int64(exponents[h])
            h += 1
            row = _row_of(row, place, i)
            # Does the element change?
            changed = j < count and np.int64(indices[j]) == i
            k = add_bit(events, k, LEVELS * exponent + _level(row), np.int64(changed))
            row = _expecting(row, share[exponent])
            if changed:
                # In which direction: the one that its column leans to, or the other?
                column = i - row.begin
                grade = _grade(np.int64(leans[column]))
                agrees = np.int64(ups[j] == (grade >= 0))
                k = add_bit(events, k, at.sign + _sign_context(grade, row.lean), agrees)
                row = _learned(row, leans, column, ups[j])
        else:
            i, exponent, changed = np.int64(indices[j]), min(threshold, share.shape[0] - 1), True
            k = add_count(events, k, at.gap, at.gap + GAPS // 2, np.uint64(i - last))
            k = add_bit(events, k, at.sign, np.int64(ups[j]))
            last = i
        if changed:
            # By how many steps?
            k = _add_size(events, k, at, exponent, sizes[j])
            left -= 1
        if changed or h == hots.shape[0]:
            was_hot, is_hot = is_hot, h < hots.shape[0]
            j = _next(j + 1 if is_hot == was_hot else _I0, is_hot, moved, threshold)
    return k, Telling(h, j, left, last, row)


@inlined
def _has_room(coder, out):
    """Whether events can be coded: always where they are counted."""
    return out.shape[0] == 0 or coder.at <= out.shape[0] - SLACK


@part
def code(coder, out, states, events, count):
    """Code events while there is room, or count their bits where out is empty. Returns the encoder after them."""
    if out.shape[0] == 0:
        count_events(states, events, count)
    elif _has_room(coder, out):
        coder = encode_events(coder, out, states, events, count)
    return coder


@part
def end_coding(coder, out):
    """The bytes of the stream; −1 if it became longer than out without its slack."""
    if out.shape[0] == 0:
        return 0
    count = finish(coder, out) if _has_room(coder, out) else out.shape[0]
    return count if count <= out.shape[0] - SLACK else -1


@part
def encode_stream(out, events, place, start, hot, indices, moved, leans):
    """Code a segment's changes, or count their bits where out is empty. Returns as `end_coding`."""
    coder, walk = start_encoder(), begin_telling(place, start, hot, moved)
    while walk.left > 0 and _has_room(coder, out):
        count, walk = tell(events, place, start, hot, indices, moved, leans, walk)
        coder = code(coder, out, start.states, events, count)
    return end_coding(coder, out)


# Decoding. Arguments: data (m,) uint8, untrusted. changed: filled in. leans: as above.


@part
def _decode_size(coder, data, states, at, exponent, bits):
    """The inverse, and the decoder after it; 0 for a size that does not fit an element of this many bits."""
    length = 0
    while True:
        i = at.unary + UNARY * exponent + length if length < UNARY else at.scale + exponent + length
        bit, coder = decode_bit(coder, data, states, i)
        if not bit:
            break
        length += 1
        if length >= bits:
            return _U0, coder
    prefix = 1
    for _ in range(min(length, 2)):
        bit, coder = decode_bit(coder, data, states, at.top + 3 * (exponent + length) + prefix - 1)
        prefix = 2 * prefix + bit
    size = np.uint64(prefix)
    if length > 2:
        size, coder = decode_raw(coder, data, size, length - 2)
    return size, coder


@part
def decode_stream(data, place, start, hot, leans, changed):
    """Both phases. Returns the number of hot changes; −1 for a broken stream. Indices are proved in range."""
    states, share, hots, exponents = start.states, start.share, hot.indices, hot.exponents
    indices, ups, sizes = changed
    at = tables(share.shape[0])
    cold = min(start.threshold, share.shape[0] - 1)
    row, coder = _first_row(place), start_decoder(data)
    h, k, last, count, split = 0, 0, np.int64(-1), indices.shape[0], 0
    coming = _hot_at(hots, exponents, _I0)
    while k < count:
        if h < hots.shape[0]:
            i, exponent = coming
            h += 1
            coming = _hot_at(hots, exponents, np.int64(h))
            row, expected = _row_of(row, place, i), share[exponent]
            # Does the element change?
            changes, coder = decode_bit(coder, data, states, LEVELS * exponent + _level(row))
            row = _expecting(row, expected)
            if not changes:
                continue
            # In which direction: the one that its column leans to, or the other?
            column = i - row.begin
            grade = _grade(np.int64(leans[column]))
            agrees, coder = decode_bit(coder, data, states, at.sign + _sign_context(grade, row.lean))
            up = agrees == 1 if grade >= 0 else agrees == 0
            row = _learned(row, leans, column, up)
            split += 1
        else:
            gap, coder = decode_count(coder, data, states, at.gap, at.gap + GAPS // 2, GAP_BITS)
            i, exponent = last + np.int64(gap), cold
            if gap == _U0 or i >= place.size:
                return -1
            agrees, coder = decode_bit(coder, data, states, at.sign)
            up, last = agrees == 1, i
        # By how many steps?
        size, coder = _decode_size(coder, data, states, at, exponent, place.bits)
        if size == _U0:
            return -1
        indices[k], ups[k], sizes[k] = i, up, size
        k += 1
    return split
