"""The hot loops of the context codec: an adaptive binary range coder and what it says of a segment.

The codec, its contexts and its binarisation are described in `docs/format.md`; `reference_context.py` has
the decoder in plain Python. Everything is integer arithmetic, so that every machine codes the same bits.

A state is one int64: the probability of a 1 in units of 2^-32, above 10 bits that say how many bits it has seen.
After a bit the probability moves towards it by 1 / (seen + 1.5): a running mean first, a window of 1,000 bits
later. The coder splits a 64-bit range and moves 32 bits at a time; a carry goes back into the bytes already
written (G. N. N. Martin, "Range encoding", 1979). A decoder reads zeros past the end of its stream, so trailing
zeros are not written. With `None` for the output an encoder only counts: ones << 32 | bits, in each context.

One file, because Numba's cache does not see changes in functions that are inlined from another; `moves` is apart.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu.arrays import buffer, read_only

# Contexts, for E exponents: where each table starts (see `contexts`).
LEVELS = 5  # of a row's activity so far
UNARY = 4  # first bits of a size that have contexts of their own exponent
SCALES = 64  # how far a size can reach above the largest exponent
SIGNS = 22
GAP_BITS, NUMBER_BITS = 20, 40  # the longest that a gap and a number in the head can be, below their leading one
_SLACK = 512  # bytes: more than one change or one number can take, at 4 bytes for each of its bits

SEEN = 10  # bits
LIMIT = (1 << SEEN) - 1
STEPS = np.array([(2 << 16) // (2 * seen + 3) for seen in range(LIMIT + 1)], np.int64)  # 2^16 / (seen + 1.5)

FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.int64(1 << 32)
_BYTE = np.uint64(255)
_WORD = np.uint64(1 << 32)
_20, _32 = np.uint64(20), np.uint64(32)
_U0, _U1 = np.uint64(0), np.uint64(1)


@njit(nogil=True, cache=True, inline="always")
def _adapted(state, bit):
    probability, seen = state >> SEEN, state & LIMIT
    if bit:
        step = ((_ONE - probability) * STEPS[seen]) >> 16
    else:
        step = -((probability * STEPS[seen]) >> 16)
    return ((probability + step) << SEEN) | min(seen + 1, LIMIT)


@njit(nogil=True, cache=True, inline="always")
def _share(state, width):
    """The part of the range that stands for a 1: never empty, never all of it."""
    return (width >> _20) * np.uint64((state >> (SEEN + 12)) | 1)


@njit(nogil=True, cache=True)
def _carry(out, at):
    at -= 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += np.uint8(1)


@njit(nogil=True, cache=True, inline="always")
def _shift(low, width, at, out):
    if width < _WORD:
        for k in range(4):
            out[at + k] = np.uint8((low >> np.uint64(56 - 8 * k)) & _BYTE)
        return low << _32, width << _32, at + 4
    return low, width, at


@njit(nogil=True, cache=True, inline="always")
def _encode_bit(low, width, at, out, states, i, bit):
    if out is None:
        states[i] += (np.int64(bit) << 32) + 1
        return low, width, at
    state = states[i]
    share = _share(state, width)
    if bit:
        width = share
    else:
        low += share
        if low < share:
            _carry(out, at)
        width -= share
    states[i] = _adapted(state, bit)
    return _shift(low, width, at, out)


@njit(nogil=True, cache=True)
def _encode_raw(low, width, at, out, value, bits):
    """The low bits of a uint64 as they are, the highest first."""
    if out is None:
        return low, width, at
    while bits > 0:
        count = min(bits, 16)
        bits -= count
        width >>= np.uint64(count)
        share = width * ((value >> np.uint64(bits)) & np.uint64((1 << count) - 1))
        low += share
        if low < share:
            _carry(out, at)
        low, width, at = _shift(low, width, at, out)
    return low, width, at


@njit(nogil=True, cache=True)
def _finish(low, width, at, out):
    """Write as few bytes as say enough; return how many there are in all, without trailing zeros."""
    for count in range(9):
        rest = FULL >> np.uint64(8 * count) if count < 8 else _U0
        value = (low + rest) & ~rest
        if np.uint64(value - low) < width:
            if value < low:
                _carry(out, at)
            for k in range(count):
                out[at + k] = np.uint8((value >> np.uint64(56 - 8 * k)) & _BYTE)
            at += count
            break
    while at > 0 and out[at - 1] == 0:
        at -= 1
    return at


@njit(nogil=True, cache=True, inline="always")
def _word(data, at):
    value = _U0
    for k in range(4):
        value = (value << np.uint64(8)) | (np.uint64(data[at + k]) if at + k < data.shape[0] else _U0)
    return value


@njit(nogil=True, cache=True, inline="always")
def _refill(code, width, at, data):
    if width < _WORD:
        return (code << _32) | _word(data, at), width << _32, at + 4
    return code, width, at


@njit(nogil=True, cache=True, inline="always")
def _decode_bit(code, width, at, data, states, i):
    state = states[i]
    share = _share(state, width)
    bit = np.int64(code < share)
    if bit:
        width = share
    else:
        code -= share
        width -= share
    states[i] = _adapted(state, bit)
    code, width, at = _refill(code, width, at, data)
    return bit, code, width, at


@njit(nogil=True, cache=True)
def _decode_raw(code, width, at, data, value, bits):
    while bits > 0:
        count = min(bits, 16)
        bits -= count
        width >>= np.uint64(count)
        piece = min(code // width, np.uint64((1 << count) - 1))
        code -= piece * width
        value = (value << np.uint64(count)) | piece
        code, width, at = _refill(code, width, at, data)
    return value, code, width, at


@njit(nogil=True, cache=True, inline="always")
def _width(value):
    """floor(log2(value)) of a uint64, at least 1."""
    bits = 0
    while (value >> np.uint64(bits + 1)) > _U0:
        bits += 1
    return bits


@njit(nogil=True, cache=True)
def contexts(exponents):
    """Where the tables start: activity, unary, scale, top, gap, sign, and the number of contexts."""
    unary = LEVELS * exponents
    scale = unary + UNARY * exponents
    top = scale + exponents + SCALES
    gap = top + 3 * (exponents + SCALES)
    sign = gap + 64
    return unary, scale, top, gap, sign, sign + SIGNS


@njit(nogil=True, cache=True)
def _encode_size(low, width, at, out, states, exponents, exponent, size):
    """By how many steps a value moved, at least 1: its bit length in unary, two bits in context, the rest raw."""
    unary, scale, top, _, _, _ = contexts(exponents)
    length = _width(size)
    for j in range(length + 1):
        i = unary + UNARY * exponent + j if j < UNARY else scale + exponent + j
        low, width, at = _encode_bit(low, width, at, out, states, i, j < length)
    prefix = 1
    for j in range(min(length, 2)):
        bit = np.int64((size >> np.uint64(length - 1 - j)) & _U1)
        low, width, at = _encode_bit(low, width, at, out, states, top + 3 * (exponent + length) + prefix - 1, bit)
        prefix = 2 * prefix + bit
    if length > 2:
        low, width, at = _encode_raw(low, width, at, out, size, length - 2)
    return low, width, at


@njit(nogil=True, cache=True)
def _decode_size(code, width, at, data, states, exponents, exponent, bits):
    """The inverse; 0 for a size that does not fit so many bits."""
    unary, scale, top, _, _, _ = contexts(exponents)
    length = 0
    while True:
        i = unary + UNARY * exponent + length if length < UNARY else scale + exponent + length
        bit, code, width, at = _decode_bit(code, width, at, data, states, i)
        if not bit:
            break
        length += 1
        if length >= bits:
            return _U0, code, width, at
    prefix = 1
    for _ in range(min(length, 2)):
        bit, code, width, at = _decode_bit(code, width, at, data, states, top + 3 * (exponent + length) + prefix - 1)
        prefix = 2 * prefix + bit
    size = np.uint64(prefix)
    if length > 2:
        size, code, width, at = _decode_raw(code, width, at, data, size, length - 2)
    return size, code, width, at


@njit(nogil=True, cache=True)
def _encode_count(low, width, at, out, states, unary, top, count):
    """A uint64 of at least 1: its bit length in unary, one bit in context, the rest raw."""
    length = _width(count)
    for j in range(length + 1):
        low, width, at = _encode_bit(low, width, at, out, states, unary + j, j < length)
    if length > 0:
        bit = (count >> np.uint64(length - 1)) & _U1
        low, width, at = _encode_bit(low, width, at, out, states, top + length, bit == _U1)
    if length > 1:
        low, width, at = _encode_raw(low, width, at, out, count, length - 1)
    return low, width, at


@njit(nogil=True, cache=True)
def _decode_count(code, width, at, data, states, unary, top, limit):
    """The inverse; 0 for more than `limit` bits below the leading one."""
    length = 0
    while True:
        bit, code, width, at = _decode_bit(code, width, at, data, states, unary + length)
        if not bit:
            break
        length += 1
        if length > limit:
            return _U0, code, width, at
    count = _U1
    if length > 0:
        bit, code, width, at = _decode_bit(code, width, at, data, states, top + length)
        count = np.uint64(2 + bit)
    if length > 1:
        count, code, width, at = _decode_raw(code, width, at, data, count, length - 1)
    return count, code, width, at


@njit(nogil=True, cache=True, inline="always")
def _level(found, expected):
    """How active a row has been so far: (found + 2) / (expected + 2) against 0.6, 0.84, 1.19 and 1.69.

    expected: in units of 2^-16 changes.
    """
    a, b = (found + 2) << 21, expected + (2 << 16)
    return np.int64(a >= 19 * b) + np.int64(a >= 27 * b) + np.int64(a >= 38 * b) + np.int64(a >= 54 * b)


@njit(nogil=True, cache=True, inline="always")
def _grade(lean):
    a = abs(lean)
    grade = np.int64(a >= 16) + np.int64(a >= 48) + np.int64(a >= 96)
    return grade if lean >= 0 else -grade


@njit(nogil=True, cache=True, inline="always")
def _faded(lean, keep):
    return (lean * keep) >> 8 if lean >= 0 else -((-lean * keep) >> 8)


@njit(nogil=True, cache=True, inline="always")
def _lean(columns, column, row, up):
    """After a change: how its column leans, given the row's agreement with the columns; returns the row's."""
    was = np.int64(columns[column])
    sign = 1 if up else -1
    columns[column] = _faded(was, 230) + (sign if row >= 0 else -sign) * min(32, 8 + abs(row))
    return _faded(row, 243) + (16 * sign if was > 0 else (-16 * sign if was < 0 else 0))


@njit(nogil=True, cache=True, inline="always")
def _sign_context(grade, row):
    return 0 if grade == 0 else 1 + 7 * (abs(grade) - 1) + _grade(row) + 3


@njit(nogil=True, cache=True)
def _encode_segment(hot, indices, moved, threshold, exponents, place, share, states, columns, out, limit):
    _, _, _, gap, sign, _ = contexts(exponents)
    low, width, at = _U0, FULL, 0
    count = indices.shape[0]
    left, j = count, 0
    begin, end = np.int64(-place.phase), np.int64(place.stride - place.phase)
    found, expected, row = np.int64(0), np.int64(0), np.int64(0)
    for h in range(hot.indices.shape[0]):
        if left == 0:
            break
        if at > limit and out is not None:
            return -1
        i = np.int64(hot.indices[h])
        if i >= end:
            begin = i - (i + place.phase) % place.stride
            end = begin + place.stride
            found, expected, row = np.int64(0), np.int64(0), np.int64(0)
        while j < count and np.int64(indices[j]) < i:
            j += 1
        changed = j < count and np.int64(indices[j]) == i
        exponent = np.int64(hot.exponents[h])
        context = LEVELS * exponent + _level(found, expected)
        low, width, at = _encode_bit(low, width, at, out, states, context, changed)
        expected += share[exponent]
        if changed:
            found += 1
            left -= 1
            column = i - begin
            grade = _grade(np.int64(columns[column]))
            up = moved.ups[j]
            agrees = up if grade >= 0 else not up
            low, width, at = _encode_bit(low, width, at, out, states, sign + _sign_context(grade, row), agrees)
            row = _lean(columns, column, row, up)
            low, width, at = _encode_size(low, width, at, out, states, exponents, exponent, moved.sizes[j])
    last = np.int64(-1)
    for j in range(count):
        if left == 0:
            break
        if at > limit and out is not None:
            return -1
        if np.int64(moved.exponents[j]) < threshold:
            continue
        left -= 1
        step = np.uint64(np.int64(indices[j]) - last)
        last = np.int64(indices[j])
        low, width, at = _encode_count(low, width, at, out, states, gap, gap + 32, step)
        low, width, at = _encode_bit(low, width, at, out, states, sign, moved.ups[j])
        low, width, at = _encode_size(
            low, width, at, out, states, exponents, min(threshold, exponents - 1), moved.sizes[j]
        )
    if out is None:
        return 0
    at = _finish(low, width, at, out)
    return at if at <= limit else -1


@njit(nogil=True, cache=True)
def _decode_segment(data, hot, size, bits, threshold, exponents, place, share, states, columns, indices, ups, sizes):
    _, _, _, gap, sign, _ = contexts(exponents)
    code, width, at = (_word(data, 0) << _32) | _word(data, 4), FULL, 8
    count = indices.shape[0]
    k = 0
    begin, end = np.int64(-place.phase), np.int64(place.stride - place.phase)
    found, expected, row = np.int64(0), np.int64(0), np.int64(0)
    for h in range(hot.indices.shape[0]):
        if k == count:
            break
        i = np.int64(hot.indices[h])
        if i >= end:
            begin = i - (i + place.phase) % place.stride
            end = begin + place.stride
            found, expected, row = np.int64(0), np.int64(0), np.int64(0)
        exponent = np.int64(hot.exponents[h])
        context = LEVELS * exponent + _level(found, expected)
        changed, code, width, at = _decode_bit(code, width, at, data, states, context)
        expected += share[exponent]
        if changed:
            found += 1
            column = i - begin
            grade = _grade(np.int64(columns[column]))
            agrees, code, width, at = _decode_bit(code, width, at, data, states, sign + _sign_context(grade, row))
            up = agrees == 1 if grade >= 0 else agrees == 0
            row = _lean(columns, column, row, up)
            moved, code, width, at = _decode_size(code, width, at, data, states, exponents, exponent, bits)
            if moved == _U0:
                return -1
            indices[k] = i
            ups[k] = up
            sizes[k] = moved
            k += 1
    hot_changes = k
    last = np.int64(-1)
    while k < count:
        step, code, width, at = _decode_count(code, width, at, data, states, gap, gap + 32, GAP_BITS)
        last += np.int64(step)
        if step == _U0 or last >= size:
            return -1
        up, code, width, at = _decode_bit(code, width, at, data, states, sign)
        moved, code, width, at = _decode_size(
            code, width, at, data, states, exponents, min(threshold, exponents - 1), bits
        )
        if moved == _U0:
            return -1
        indices[k] = last
        ups[k] = up == 1
        sizes[k] = moved
        k += 1
    return hot_changes


NUMBER_CONTEXTS = 128  # for each kind of number: 64 for its length, 64 for the bit below the leading one


@njit(nogil=True, cache=True)
def _encode_numbers(numbers, kinds, states, out):
    low, width, at = _U0, FULL, 0
    for j in range(numbers.shape[0]):
        first = NUMBER_CONTEXTS * np.int64(kinds[j])
        low, width, at = _encode_count(low, width, at, out, states, first, first + 64, np.uint64(numbers[j]) + _U1)
    return _finish(low, width, at, out)


@njit(nogil=True, cache=True)
def _decode_numbers(data, kinds, states, numbers):
    code, width, at = (_word(data, 0) << _32) | _word(data, 4), FULL, 8
    for j in range(kinds.shape[0]):
        first = NUMBER_CONTEXTS * np.int64(kinds[j])
        number, code, width, at = _decode_count(code, width, at, data, states, first, first + 64, NUMBER_BITS)
        if number == _U0:
            return False
        numbers[j] = np.int64(number - _U1)
    return True


@njit(nogil=True, cache=True)
def _log2(values, logs):
    for j in range(values.shape[0]):
        value = np.uint64(values[j])
        length = _width(value)
        # The mantissa as 1.31 fixed point, squared once for each bit of the fraction.
        mantissa = value << np.uint64(31 - length) if length <= 31 else value >> np.uint64(length - 31)
        log = length
        for _ in range(8):
            mantissa = (mantissa * mantissa) >> np.uint64(31)
            carry = mantissa >> _32
            mantissa >>= carry
            log = 2 * log + np.int64(carry)
        logs[j] = log


def log2(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Binary logarithms of whole numbers from 1 to 2^62, in 1/256, rounded down: the same on every machine."""
    logs = np.empty(values.shape, np.int64)
    _log2(values.reshape(-1), logs.reshape(-1))
    return logs


class Place(NamedTuple):
    """Where a segment lies in its tensor's rows."""

    stride: int  # elements a row
    phase: int  # column of the segment's first element


def encode_segment(
    hot: moves.Hot,
    indices: NDArray[np.uint32],
    moved: moves.Moves,
    threshold: int,
    field: Field,
    place: Place,
    share: NDArray[np.int64],
    states: NDArray[np.int64],
    limit: int | None,
) -> bytes | None:
    """Code one segment's changes.

    share: (E,), the probability of a change by exponent, in 2^-16. states: all contexts', changed here.
    limit: bytes; None counts into states (as zeros at first) and returns None, and so does a longer stream.
    """
    columns = np.zeros(place.stride, np.int32)
    out = None if limit is None else buffer("out", limit + _SLACK, np.uint8)
    count = _encode_segment(
        hot,
        read_only(indices),
        moved,
        threshold,
        field.exponents,
        place,
        share,
        states,
        columns,
        out,
        limit or 0,
    )
    return None if out is None or count < 0 else out[:count].tobytes()


def decode_segment(
    stream: memoryview,
    old: UIntArray,
    count: int,
    threshold: int,
    field: Field,
    place: Place,
    share: NDArray[np.int64],
    states: NDArray[np.int64],
) -> tuple[NDArray[np.uint32], UIntArray] | None:
    """The inverse: the indices (count,), ascending and in range, and the new values. None for a broken stream."""
    hot = moves.find_hot(old, field, threshold)
    indices = np.empty(count, np.uint32)
    ups = np.empty(count, np.bool_)
    sizes = np.empty(count, np.uint64)
    split = _decode_segment(
        np.frombuffer(stream, np.uint8),
        hot,
        len(old),
        8 * old.itemsize,
        threshold,
        field.exponents,
        place,
        share,
        states,
        np.zeros(place.stride, np.int32),
        indices,
        ups,
        sizes,
    )
    if split < 0:
        return None
    values = moves.move(old, indices, ups, sizes, field)
    return (indices, values) if split in (0, count) else moves.merge(indices, values, split)


def encode_numbers(numbers: NDArray[np.int64], kinds: NDArray[np.uint8]) -> bytes:
    """Code whole numbers (k,) from 0 to 2^40; those of one kind share their statistics."""
    out = np.empty(len(numbers) * _SLACK + _SLACK, np.uint8)
    return out[: _encode_numbers(numbers, kinds, _number_states(), out)].tobytes()


def decode_numbers(data: memoryview, kinds: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """The inverse; None for a broken stream."""
    numbers = np.empty(len(kinds), np.int64)
    return numbers if _decode_numbers(np.frombuffer(data, np.uint8), kinds, _number_states(), numbers) else None


def _number_states() -> NDArray[np.int64]:
    return np.full(256 * NUMBER_CONTEXTS, (1 << 31) << SEEN, np.int64)
