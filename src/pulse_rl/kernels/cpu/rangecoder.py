"""An adaptive binary range coder, compiled: bits in contexts, raw bits, and whole numbers made of both.

`docs/format.md` describes it under "The coder"; `tests/naive/context.py` has the decoder in plain Python.
Everything is integer arithmetic, so that every machine codes the same bits.

A state is one int64: the probability of a 1 in units of 2^-32, above 10 bits that count the bits seen so far. After a
bit the probability moves towards it by 1 / (seen + 1.5): a running mean first, a window of 1,000 bits later. The coder
splits a 64-bit range and moves 32 bits at a time; a carry is added to the bytes already written (G. N. N. Martin,
"Range encoding", 1979). A decoder reads zeros past the end of its stream, so trailing zeros are not written.

An encoder whose output is None writes nothing and counts: each state becomes ones << 32 | bits.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel, part

SEEN = 10  # bits of a state that count
LIMIT = (1 << SEEN) - 1
STEPS = np.array([(2 << 16) // (2 * seen + 3) for seen in range(LIMIT + 1)], np.int64)  # 2^16 / (seen + 1.5)

SLACK = 512  # bytes of output that coding one change or one number can take at most, at 4 for each of its bits
NUMBER_BITS = 40  # the longest that a number can be, below its leading one
NUMBER_CONTEXTS = 128  # for each kind of number: 64 for its length, 64 for the bit below the leading one

FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.int64(1 << 32)
_BYTE = np.uint64(255)
_WORD = np.uint64(1 << 32)
_20, _32 = np.uint64(20), np.uint64(32)
_U0, _U1 = np.uint64(0), np.uint64(1)


class RangeEncoder(NamedTuple):
    """An encoder between two bits."""

    low: Any  # uint64; the code lies in [low, low + width)
    width: Any  # uint64
    at: Any  # int64; bytes written


class RangeDecoder(NamedTuple):
    """A decoder between two bits."""

    code: Any  # uint64; below width
    width: Any  # uint64
    at: Any  # int64; bytes read


# States


@inlined
def _adapted(state, bit):
    """The state after a bit."""
    probability, seen = state >> SEEN, state & LIMIT
    if bit:
        step = ((_ONE - probability) * STEPS[seen]) >> 16
    else:
        step = -((probability * STEPS[seen]) >> 16)
    return ((probability + step) << SEEN) | min(seen + 1, LIMIT)


@inlined
def _share(state, width):
    """The part of the range that stands for a 1: never empty, never all of it."""
    return (width >> _20) * np.uint64((state >> (SEEN + 12)) | 1)


# Encoding


@inlined
def start_encoder():
    return RangeEncoder(_U0, FULL, np.int64(0))


@part
def _carry(out, at):
    """Add 1 to the number that out[:at] spells."""
    at -= 1
    while out[at] == 255:
        out[at] = 0
        at -= 1
    out[at] += np.uint8(1)


@inlined
def _shift(low, width, at, out):
    """Write four bytes if the range has become narrow."""
    if width < _WORD:
        for k in range(4):
            out[at + k] = np.uint8((low >> np.uint64(56 - 8 * k)) & _BYTE)
        return RangeEncoder(low << _32, width << _32, at + 4)
    return RangeEncoder(low, width, at)


@inlined
def encode_bit(coder, out, states, i, bit):
    """Code a bit in context i."""
    if out is None:
        states[i] += (np.int64(bit) << 32) + 1
        return coder
    low, width, at = coder
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


@part
def encode_raw(coder, out, value, bits):
    """Code the low bits of a uint64 as they are, the highest first."""
    if out is None:
        return coder
    while bits > 0:
        count = min(bits, 16)
        bits -= count
        low, width, at = coder
        width >>= np.uint64(count)
        share = width * ((value >> np.uint64(bits)) & np.uint64((1 << count) - 1))
        low += share
        if low < share:
            _carry(out, at)
        coder = _shift(low, width, at, out)
    return coder


@part
def finish(coder, out):
    """Write as few bytes as identify a code in the range; return the bytes in all, without trailing zeros."""
    low, width, at = coder
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


# Decoding


@inlined
def _word(data, at):
    """Four bytes, the highest first; zeros past the end."""
    value = _U0
    for k in range(4):
        value = (value << np.uint64(8)) | (np.uint64(data[at + k]) if at + k < data.shape[0] else _U0)
    return value


@inlined
def start_decoder(data):
    return RangeDecoder((_word(data, 0) << _32) | _word(data, 4), FULL, np.int64(8))


@inlined
def _refill(code, width, at, data):
    """Read four bytes if the range has become narrow."""
    if width < _WORD:
        return RangeDecoder((code << _32) | _word(data, at), width << _32, at + 4)
    return RangeDecoder(code, width, at)


@inlined
def decode_bit(coder, data, states, i):
    """The bit in context i, and the decoder after it."""
    code, width, at = coder
    state = states[i]
    share = _share(state, width)
    bit = np.int64(code < share)
    if bit:
        width = share
    else:
        code -= share
        width -= share
    states[i] = _adapted(state, bit)
    return bit, _refill(code, width, at, data)


@part
def decode_raw(coder, data, value, bits):
    """Append this many raw bits to a uint64, and the decoder after them."""
    while bits > 0:
        count = min(bits, 16)
        bits -= count
        code, width, at = coder
        width >>= np.uint64(count)
        piece = min(code // width, np.uint64((1 << count) - 1))
        code -= piece * width
        value = (value << np.uint64(count)) | piece
        coder = _refill(code, width, at, data)
    return value, coder


# Whole numbers


@inlined
def log2_floor(value):
    """floor(log2(value)) of a uint64 of at least 1."""
    bits = 0
    while (value >> np.uint64(bits + 1)) > _U0:
        bits += 1
    return bits


@part
def encode_count(coder, out, states, unary, top, count):
    """Code a uint64 of at least 1: its bit length in unary, the highest bit below its leading one in context, the rest
    raw. unary, top: the first contexts of the two, by length."""
    length = log2_floor(count)
    for j in range(length + 1):
        coder = encode_bit(coder, out, states, unary + j, j < length)
    if length > 0:
        bit = (count >> np.uint64(length - 1)) & _U1
        coder = encode_bit(coder, out, states, top + length, bit == _U1)
    if length > 1:
        coder = encode_raw(coder, out, count, length - 1)
    return coder


@part
def decode_count(coder, data, states, unary, top, limit):
    """The inverse, and the decoder after it; 0 for more than `limit` bits below the leading one."""
    length = 0
    while True:
        bit, coder = decode_bit(coder, data, states, unary + length)
        if not bit:
            break
        length += 1
        if length > limit:
            return _U0, coder
    count = _U1
    if length > 0:
        bit, coder = decode_bit(coder, data, states, top + length)
        count = np.uint64(2 + bit)
    if length > 1:
        count, coder = decode_raw(coder, data, count, length - 1)
    return count, coder


@kernel
def _encode_numbers(out, states, numbers, kinds):
    coder = start_encoder()
    for j in range(numbers.shape[0]):
        first = NUMBER_CONTEXTS * np.int64(kinds[j])
        coder = encode_count(coder, out, states, first, first + 64, np.uint64(numbers[j]) + _U1)
    return finish(coder, out)


@kernel
def _decode_numbers(data, states, kinds, numbers):
    coder = start_decoder(data)
    for j in range(kinds.shape[0]):
        first = NUMBER_CONTEXTS * np.int64(kinds[j])
        number, coder = decode_count(coder, data, states, first, first + 64, NUMBER_BITS)
        if number == _U0:
            return False
        numbers[j] = np.int64(number - _U1)
    return True


def encode_numbers(numbers: NDArray[np.int64], kinds: NDArray[np.uint8]) -> bytes:
    """Code whole numbers (k,) from 0 to 2^40; those of one kind share their statistics. kinds: (k,)."""
    out = np.empty(len(numbers) * SLACK + SLACK, np.uint8)
    return out[: _encode_numbers(out, _number_states(), read_only(numbers), read_only(kinds))].tobytes()


def decode_numbers(data: memoryview, kinds: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """The inverse; None for a broken stream."""
    numbers = np.empty(len(kinds), np.int64)
    read = _decode_numbers(read_only(np.frombuffer(data, np.uint8)), _number_states(), read_only(kinds), numbers)
    return numbers if read else None


def _number_states() -> NDArray[np.int64]:
    """Every context of every kind at one half, unseen."""
    return np.full(256 * NUMBER_CONTEXTS, (1 << 31) << SEEN, np.int64)


# Code lengths


@kernel
def _log2(values, logs):
    for j in range(values.shape[0]):
        value = np.uint64(values[j])
        length = log2_floor(value)
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
    _log2(read_only(values.reshape(-1)), logs.reshape(-1))
    return logs
