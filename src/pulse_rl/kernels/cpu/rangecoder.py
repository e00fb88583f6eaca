"""An adaptive binary range coder, compiled: bits in contexts, raw bits, and whole numbers made of both.

`docs/format.md` describes it under "The coder"; `tests/naive/context.py` has the decoder in plain Python.
Everything is integer arithmetic, so that every machine codes the same bits.

A state is one int64: the probability of a 1 in units of 2^-32, above 10 bits that count the bits seen so far. After a
bit the probability moves towards it by 1 / (seen + 1.5): a running mean first, a window of 1,000 bits later. The coder
splits a 64-bit range and moves 32 bits at a time; a carry is added to the bytes already written (G. N. N. Martin,
"Range encoding", 1979). A decoder reads zeros past the end of its stream, so trailing zeros are not written.

What is to be coded is first written down as *events*, so that few places code and the others are compiled quickly. They
can be counted instead: each state becomes ones << 32 | bits.
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

EVENTS = 1024  # words of events that are coded at once
RAW = 0xFFF0  # more than twice any context
EVENT_NBYTES = 4  # of output that coding an event can take at most
SLACK = EVENT_NBYTES * EVENTS
NUMBER_BITS = np.int64(40)  # the longest that a number can be, below its leading one
NUMBER_EVENTS = 48  # of one
NUMBER_CONTEXTS = 128  # for each kind of number: 64 for its length, 64 for the bit below the leading one

FULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.int64(1 << 32)
_BYTE = np.uint64(255)
_WORD = np.uint64(1 << 32)
_20, _32 = np.uint64(20), np.uint64(32)
_U0, _U1 = np.uint64(0), np.uint64(1)
_I0 = np.int64(0)  # Numba compiles a function anew for each number that is written in a call of it


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
    rate = STEPS[seen]
    if bit:
        step = ((_ONE - probability) * rate) >> 16
    else:
        step = -((probability * rate) >> 16)
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


@part
def encode_events(coder, out, states, events, count):
    """Code `count` events: words of at most 16 bits, twice a context and its bit. A word from RAW on says how many bits
    of the next word are coded as they are, less one."""
    low, width, at = coder
    k = 0
    while k < count:
        event = np.int64(events[k])
        k += 1
        if event < RAW:
            i, bit = event >> 1, event & 1
            state = states[i]
            share = _share(state, width)
            start = _U0 if bit else share
            width = share if bit else width - share
            states[i] = _adapted(state, bit)
        else:
            bits = np.uint64(event - RAW + 1)
            width >>= bits
            start = width * np.uint64(events[k])
            k += 1
        low += start
        if low < start:
            _carry(out, at)
        if width < _WORD:
            for j in range(4):
                out[at + j] = np.uint8((low >> np.uint64(56 - 8 * j)) & _BYTE)
            low, width, at = low << _32, width << _32, at + 4
    return RangeEncoder(low, width, at)


@part
def count_events(states, events, count):
    """Count the bits of `count` events: each state becomes ones << 32 | bits."""
    k = 0
    while k < count:
        event = np.int64(events[k])
        k += 1
        if event < RAW:
            states[event >> 1] += ((event & 1) << 32) + 1
        else:
            k += 1


@inlined
def add_bit(events, k, i, bit):
    """Add a bit in context i to k events. Returns how many there are."""
    events[k] = 2 * i + bit
    return k + 1


@part
def add_raw(events, k, value, bits):
    """Add the low bits of a uint64 as they are, the highest first."""
    while bits > 0:
        count = min(bits, 16)
        bits -= count
        events[k] = RAW + count - 1
        events[k + 1] = (value >> np.uint64(bits)) & np.uint64((1 << count) - 1)
        k += 2
    return k


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
    return RangeDecoder((_word(data, _I0) << _32) | _word(data, _I0 + 4), FULL, np.int64(8))


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
def add_count(events, k, unary, top, count):
    """Add a uint64 of at least 1: its bit length in unary, the highest bit below its leading one in context, the rest
    raw. unary, top: the first contexts of the two, by length."""
    length = log2_floor(count)
    for j in range(length + 1):
        k = add_bit(events, k, unary + j, np.int64(j < length))
    if length > 0:
        k = add_bit(events, k, top + length, np.int64((count >> np.uint64(length - 1)) & _U1))
    return add_raw(events, k, count, length - 1)


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
def _encode_numbers(out, events, states, numbers, kinds):
    k = _I0
    for j in range(numbers.shape[0]):
        first = NUMBER_CONTEXTS * np.int64(kinds[j])
        k = add_count(events, k, first, first + 64, np.uint64(numbers[j]) + _U1)
    return finish(encode_events(start_encoder(), out, states, events, k), out)


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
    events = np.empty(len(numbers) * NUMBER_EVENTS, np.uint16)
    out = np.empty(EVENT_NBYTES * len(events) + SLACK, np.uint8)
    size = _encode_numbers(out, events, _number_states(), read_only(numbers), read_only(kinds))
    return out[:size].tobytes()


def decode_numbers(data: memoryview, kinds: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """The inverse; None for a broken stream."""
    numbers = np.empty(len(kinds), np.int64)
    read = _decode_numbers(read_only(np.frombuffer(data, np.uint8)), _number_states(), read_only(kinds), numbers)
    return numbers if read else None


def _number_states() -> NDArray[np.int64]:
    """Every context of every kind at one half, unseen."""
    return np.full(256 * NUMBER_CONTEXTS, (1 << 31) << SEEN, np.int64)


# Code lengths


def log2(values: NDArray[np.int64], fraction: int = 8) -> NDArray[np.int64]:
    """Binary logarithms of whole numbers from 1 to 2^62, the same on every machine.

    fraction: bits after the point, up to 16; what comes after them is cut off.
    """
    rest, logs = values.astype(np.uint64), np.zeros(values.shape, np.int64)
    for bits in (32, 16, 8, 4, 2, 1):
        above = rest >= np.uint64(1 << bits)
        rest = np.where(above, rest >> np.uint64(bits), rest)
        logs += bits * above
    # The mantissa as 1.31 fixed point, squared once for each bit of the fraction.
    mantissa = np.where(logs <= 31, values << np.maximum(31 - logs, 0), values >> np.maximum(logs - 31, 0))
    mantissa = mantissa.astype(np.uint64)
    for _ in range(fraction):
        mantissa = (mantissa * mantissa) >> np.uint64(31)
        carry = mantissa >> _32
        mantissa >>= carry
        logs = 2 * logs + carry.astype(np.int64)
    return logs
