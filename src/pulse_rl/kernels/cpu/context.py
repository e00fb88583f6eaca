"""The segment coder of the context codec, compiled.

It codes one segment's changes given the old bits, in the two phases of `docs/format.md`, "A segment's stream":

1. the *hot* elements (those whose old exponent is below a threshold) in order: does each change? If so, in which
   direction and by how many steps?
2. the changes among the other, *cold* elements: the gap to each one, its direction and its size.

Encoder and decoder have the same functions in the same order, and both compute contexts by the same helpers.
`rangecoder` codes the bits; `moves` finds hot elements and turns changes into moves and back. The decoder in plain
Python is in `tests/naive/context.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,arg-type"

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.compiled import inlined, kernel, part
from pulse_rl.kernels.cpu.rangecoder import (
    SLACK,
    decode_bit,
    decode_count,
    decode_raw,
    encode_bit,
    encode_count,
    encode_raw,
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
GAP_BITS = 20  # the longest that a gap can be, below its leading one

_U0, _U1 = np.uint64(0), np.uint64(1)


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
    leans[column] = _faded(of_column, 230) + (sign if of_row >= 0 else -sign) * min(32, 8 + abs(of_row))
    agreement = 16 * sign if of_column > 0 else (-16 * sign if of_column < 0 else 0)
    return Row(row.begin, row.end, row.found + 1, row.expected, _faded(of_row, 243) + agreement)


@inlined
def _expecting(row, share):
    """The row after an element that changes with this probability, in 2^-16."""
    return Row(row.begin, row.end, row.found, row.expected + share, row.lean)


# Encoding. Arguments: out (m,) uint8, or None to count. indices (k,) uint32, ascending, and moved (k,): the changes.
# leans (row,) int32: of each column; zeros at first. Loops take arrays out of their tuples before they start: to take
# one out counts a reference, which costs 8 % of the time if it is done for every element.


@part
def _encode_size(coder, out, states, at, exponent, size):
    """A number of steps, at least 1: its bit length in unary, two bits in context, the rest raw. at: the tables."""
    length = log2_floor(size)
    for j in range(length + 1):
        i = at.unary + UNARY * exponent + j if j < UNARY else at.scale + exponent + j
        coder = encode_bit(coder, out, states, i, j < length)
    prefix = 1
    for j in range(min(length, 2)):
        bit = np.int64((size >> np.uint64(length - 1 - j)) & _U1)
        coder = encode_bit(coder, out, states, at.top + 3 * (exponent + length) + prefix - 1, bit)
        prefix = 2 * prefix + bit
    if length > 2:
        coder = encode_raw(coder, out, size, length - 2)
    return coder


@inlined
def _is_full(coder, out):
    """Whether the stream is longer than it may become."""
    if out is None:
        return False
    return coder.at > out.shape[0] - SLACK


@part
def _encode_hot(coder, out, place, start, hot, indices, moved, leans):
    """Phase 1. Returns the encoder and how many changes are left; −1 for too long a stream."""
    states, share = start.states, start.share
    at = tables(share.shape[0])
    row = _first_row(place)
    count = indices.shape[0]
    left, j = count, 0
    for h in range(hot.indices.shape[0]):
        if left == 0:
            break
        if _is_full(coder, out):
            return coder, -1
        i, exponent = np.int64(hot.indices[h]), np.int64(hot.exponents[h])
        row = _row_of(row, place, i)
        # Does the element change?
        while j < count and np.int64(indices[j]) < i:
            j += 1
        changed = j < count and np.int64(indices[j]) == i
        coder = encode_bit(coder, out, states, LEVELS * exponent + _level(row), changed)
        row = _expecting(row, share[exponent])
        if not changed:
            continue
        # In which direction: the one that its column leans to, or the other?
        up, column = moved.ups[j], i - row.begin
        grade = _grade(np.int64(leans[column]))
        agrees = up if grade >= 0 else not up
        coder = encode_bit(coder, out, states, at.sign + _sign_context(grade, row.lean), agrees)
        row = _learned(row, leans, column, up)
        # By how many steps?
        coder = _encode_size(coder, out, states, at, exponent, moved.sizes[j])
        left -= 1
    return coder, left


@part
def _encode_cold(coder, out, start, indices, moved, left):
    """Phase 2, of `left` changes. Returns the encoder and how many are left: 0, or −1 for too long a stream."""
    states, share = start.states, start.share
    exponents = share.shape[0]
    at = tables(exponents)
    exponent = min(start.threshold, exponents - 1)
    last = np.int64(-1)
    for j in range(indices.shape[0]):
        if left == 0:
            break
        if _is_full(coder, out):
            return coder, -1
        if np.int64(moved.exponents[j]) < start.threshold:
            continue
        i = np.int64(indices[j])
        coder = encode_count(coder, out, states, at.gap, at.gap + GAPS // 2, np.uint64(i - last))
        coder = encode_bit(coder, out, states, at.sign, moved.ups[j])
        coder = _encode_size(coder, out, states, at, exponent, moved.sizes[j])
        last = i
        left -= 1
    return coder, left


@part
def encode_stream(out, place, start, hot, indices, moved, leans):
    """Both phases. Returns the bytes of the stream; −1 if it becomes longer than out without its slack."""
    coder, left = _encode_hot(start_encoder(), out, place, start, hot, indices, moved, leans)
    if left > 0:
        coder, left = _encode_cold(coder, out, start, indices, moved, left)
    if out is None:
        return 0
    if left < 0:
        return -1
    count = finish(coder, out)
    return count if count <= out.shape[0] - SLACK else -1


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
def _decode_hot(coder, data, place, start, hot, leans, changed):
    """Phase 1. Returns the decoder and the number of changes; −1 for a broken stream."""
    states, share = start.states, start.share
    at = tables(share.shape[0])
    row = _first_row(place)
    k, count = 0, changed.indices.shape[0]
    for h in range(hot.indices.shape[0]):
        if k == count:
            break
        i, exponent = np.int64(hot.indices[h]), np.int64(hot.exponents[h])
        row = _row_of(row, place, i)
        # Does the element change?
        changes, coder = decode_bit(coder, data, states, LEVELS * exponent + _level(row))
        row = _expecting(row, share[exponent])
        if not changes:
            continue
        # In which direction: the one that its column leans to, or the other?
        column = i - row.begin
        grade = _grade(np.int64(leans[column]))
        agrees, coder = decode_bit(coder, data, states, at.sign + _sign_context(grade, row.lean))
        up = agrees == 1 if grade >= 0 else agrees == 0
        row = _learned(row, leans, column, up)
        # By how many steps?
        size, coder = _decode_size(coder, data, states, at, exponent, place.bits)
        if size == _U0:
            return coder, -1
        changed.indices[k], changed.ups[k], changed.sizes[k] = i, up, size
        k += 1
    return coder, k


@part
def _decode_cold(coder, data, place, start, k, changed):
    """Phase 2, after k changes. Returns whether the stream is sound; indices are proved in range."""
    states, share = start.states, start.share
    exponents = share.shape[0]
    at = tables(exponents)
    exponent = min(start.threshold, exponents - 1)
    i = np.int64(-1)
    while k < changed.indices.shape[0]:
        gap, coder = decode_count(coder, data, states, at.gap, at.gap + GAPS // 2, GAP_BITS)
        i += np.int64(gap)
        if gap == _U0 or i >= place.size:
            return False
        up, coder = decode_bit(coder, data, states, at.sign)
        size, coder = _decode_size(coder, data, states, at, exponent, place.bits)
        if size == _U0:
            return False
        changed.indices[k], changed.ups[k], changed.sizes[k] = i, up == 1, size
        k += 1
    return True


@part
def decode_stream(data, place, start, hot, leans, changed):
    """Both phases. Returns the number of hot changes; −1 for a broken stream."""
    coder, k = _decode_hot(start_decoder(data), data, place, start, hot, leans, changed)
    if k < 0 or not _decode_cold(coder, data, place, start, k, changed):
        return -1
    return k
