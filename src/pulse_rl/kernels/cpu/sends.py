"""What a trainer sends of a segment, as bits: Rice codes of gaps, class by class.

Whether an element is sent, which way and how far depends on θ's exponent and on the momentum, which sender and receiver
both know. So the elements are divided into classes by these, and each class is coded on its own: the gaps between those
of its elements that are sent, then which of them go against the momentum, then how large they are. Within a class a
number has nearly one distribution, and the mean of the last ones gives a good Rice code, without a table and without
the time of an arithmetic coder. A payload is read in time that goes with what is sent, and added up where it is read,
by class (`add`): only the sum of all payloads is brought into the order of the elements.

`docs/loco.md` describes every bit; the naive twin is in `tests/naive/sends.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import buffer, read_only, trailing_zeros
from pulse_rl.kernels.cpu.classes import CLASSES, Classes, Places
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.loco import F32

LONGEST = 24  # ones in a row: the whole number follows
NUMBER = 21  # bits of such a number
CODES = 127  # the largest code
MOST_BITS = 4 * (LONGEST + NUMBER)  # of one element that is sent
ENDS = 3 * (LONGEST + NUMBER) + 2  # bits of a class beside its elements
WORD = 8  # bytes that are read and written at once

_U0, _U1 = np.uint64(0), np.uint64(1)
# 16 times the means that are expected at first: of gaps where most are sent, and of signs; of runs of the smallest
# step; of codes where most are larger.
_OFTEN, _RUN, _LARGE = np.uint64(16), np.uint64(64), np.int64(64)


@intrinsic
def _log2_floor(typingctx: Any, value: Any) -> Any:
    """floor(log2(value)) of a uint64 of at least 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.sub(ir.Constant(ir.IntType(64), 63), zeros)

    return types.uint64(types.uint64), codegen


@intrinsic
def _load(typingctx: Any, data: Any, at: Any) -> Any:
    """The 8 bytes of data (uint8) from `at` on, as a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(_word(context, builder, signature, args))
        value.align = 1
        return value

    return types.uint64(data, types.int64), codegen


@intrinsic
def _store(typingctx: Any, data: Any, at: Any, value: Any) -> Any:
    """Write a uint64 to the 8 bytes of data (uint8) from `at` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word(context, builder, signature, args)).align = 1
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), codegen


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """The address of data[at], as one of a word. Words are little-endian, as all processors that we know of are."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())


@inlined
def _parameter(mean):
    return _log2_floor((mean >> np.uint64(4)) | _U1)


@inlined
def _learned(mean, value):
    """16 times the mean of about the last 16 values."""
    return mean + value - (mean >> np.uint64(4))


@inlined
def _center(mean):
    return (mean + np.int64(8)) >> np.int64(4)


# Writing. bits, held: what is not written yet, and how many bits, below 8. out, at: bytes, and how many are written.


@inlined
def _put(bits, held, out, at, value, width):
    """Write `width` bits, up to 56."""
    bits |= value << np.uint64(held)
    held += width
    _store(out, at, bits)
    return bits >> np.uint64(held & ~7), held & 7, at + (held >> 3)


@inlined
def _write(bits, held, out, at, value, mean):
    low = _parameter(mean)
    ones = value >> low
    if ones < np.uint64(LONGEST):
        code = ((_U1 << ones) - _U1) | (value & ((_U1 << low) - _U1)) << (ones + _U1)
        return _put(bits, held, out, at, code, np.int64(ones + _U1 + low))
    code = ((_U1 << np.uint64(LONGEST)) - _U1) | value << np.uint64(LONGEST)
    return _put(bits, held, out, at, code, LONGEST + NUMBER)


@kernel
def _encode(edges, ends, places, moves, start, out):
    """Returns how many bytes are written. ends: of each class, how many sends it and those before it have.

    start: 16 times the mean gap that is expected at first.
    """
    bits, held, at = _U0, np.int64(0), np.int64(0)
    gaps, rests, turns, runs, sizes, errors, codes = start, _OFTEN, _OFTEN, _RUN, _U0, _OFTEN, _LARGE
    end = np.int64(0)
    for c in range(CLASSES):
        begin, stop = edges[c], edges[c + 1]
        if begin == stop:
            continue
        first, end = end, ends[c]

        most = 2 * (end - first) > stop - begin
        bits, held, at = _put(bits, held, out, at, np.uint64(most), 1)
        after = begin  # the place behind the last one whose gap was written
        if most:
            for j in range(first, end + 1):
                for rest in range(places[j - 1] + 1 if j > first else begin, places[j] if j < end else stop):
                    gap = np.uint64(rest - after)
                    bits, held, at = _write(bits, held, out, at, gap, rests)
                    rests, after = _learned(rests, gap), rest + 1
        else:
            for j in range(first, end):
                gap = np.uint64(np.int64(places[j]) - after)
                bits, held, at = _write(bits, held, out, at, gap, gaps)
                gaps, after = _learned(gaps, gap), np.int64(places[j]) + 1
        bits, held, at = _write(bits, held, out, at, np.uint64(stop - after), rests if most else gaps)
        if first == end:
            continue

        larger, after = 0, first
        for j in range(first, end):
            larger += abs(np.int64(moves[j])) > 1
            if moves[j] < 0:
                gap = np.uint64(j - after)
                bits, held, at = _write(bits, held, out, at, gap, turns)
                turns, after = _learned(turns, gap), j + 1
        bits, held, at = _write(bits, held, out, at, np.uint64(end - after), turns)

        most = 2 * larger > end - first
        bits, held, at = _put(bits, held, out, at, np.uint64(most), 1)
        if most:
            for j in range(first, end):
                code = abs(np.int64(moves[j]))
                off = code - _center(codes)
                error = np.uint64(2 * off if off >= 0 else -2 * off - 1)
                bits, held, at = _write(bits, held, out, at, error, errors)
                errors = _learned(errors, error)
                codes += code - (codes >> np.int64(4))
        else:
            after = first
            for j in range(first, end):
                code = abs(np.int64(moves[j]))
                if code > 1:
                    gap = np.uint64(j - after)
                    bits, held, at = _write(bits, held, out, at, gap, runs)
                    runs, after = _learned(runs, gap), j + 1
                    size = np.uint64(code - 2)
                    bits, held, at = _write(bits, held, out, at, size, sizes)
                    sizes = _learned(sizes, size)
            bits, held, at = _write(bits, held, out, at, np.uint64(end - after), runs)
    return at + np.int64(held > 0)


def encode(classes: Classes, sent: Places) -> bytes:
    """The stream of what is sent of a segment; no bytes where that is nothing."""
    count = len(sent.places)
    if not count:
        return b""
    ends = np.searchsorted(sent.places, classes.edges[1:].astype(np.uint32))
    out = buffer("stream", (count * MOST_BITS + CLASSES * ENDS) // 8 + 1 + WORD, np.uint8)
    start = _start(len(classes.each), count)
    written = _encode(read_only(classes.edges), ends, read_only(sent.places), read_only(sent.moves), start, out)
    return out[:written].tobytes()


def _start(elements: int, count: int) -> np.uint64:
    return np.uint64(16 * elements // count)


# Reading: the inverse. data (m + WORD,) uint8 is an untrusted stream of m bytes, then zeros: behind its end it is read
# as zeros, and found to be too short. bits, held: what was read ahead, and how many bits of it count; at: bytes read.


@inlined
def _fill(bits, held, data, at):
    """Read ahead to 56 bits or more, all of them below `held` and the next ones' lowest above."""
    bits |= _load(data, min(at, data.shape[0] - WORD)) << np.uint64(held)
    return bits, held | 56, at + ((63 - held) >> 3)


@inlined
def _flag(bits, held, data, at):
    bits, held, at = _fill(bits, held, data, at)
    return bits & _U1, bits >> _U1, held - 1, at


@inlined
def _read(bits, held, data, at, mean):
    bits, held, at = _fill(bits, held, data, at)
    low = _parameter(mean)
    ones = trailing_zeros(~bits)
    if ones < np.uint64(LONGEST):
        bits >>= ones + _U1
        value = ones << low | bits & ((_U1 << low) - _U1)
        return value, bits >> low, held - np.int64(ones + _U1 + low), at
    value = (bits >> np.uint64(LONGEST)) & ((_U1 << np.uint64(NUMBER)) - _U1)
    return value, bits >> np.uint64(LONGEST + NUMBER), held - LONGEST - NUMBER, at


@kernel
def _decode(data, edges, start, largest, places, moves):
    """Returns whether the stream is sound."""
    bits, held, at = _U0, np.int64(0), np.int64(0)
    gaps, rests, turns, runs, sizes, errors, codes = start, _OFTEN, _OFTEN, _RUN, _U0, _OFTEN, _LARGE
    end, count = np.int64(0), places.shape[0]
    for c in range(CLASSES):
        after, stop = edges[c], edges[c + 1]
        if after == stop:
            continue
        first = end

        most, bits, held, at = _flag(bits, held, data, at)
        if most:
            while True:
                gap, bits, held, at = _read(bits, held, data, at, rests)
                here = after + np.int64(gap)
                if here > stop or end + here - after > count:
                    return False
                for place in range(after, here):
                    places[end] = place
                    end += 1
                if here == stop:
                    break
                rests, after = _learned(rests, gap), here + 1
        else:
            while True:
                gap, bits, held, at = _read(bits, held, data, at, gaps)
                here = after + np.int64(gap)
                if here >= stop or end == count:
                    break
                places[end] = here
                end += 1
                gaps, after = _learned(gaps, gap), here + 1
            if here != stop:
                return False
        if first == end:
            continue
        if largest[c] < 1:
            return False

        for j in range(first, end):
            moves[j] = 1
        after = first
        while True:
            gap, bits, held, at = _read(bits, held, data, at, turns)
            here = after + np.int64(gap)
            if here >= end:
                break
            moves[here] = -1
            turns, after = _learned(turns, gap), here + 1
        if here != end:
            return False

        most, bits, held, at = _flag(bits, held, data, at)
        if most:
            for j in range(first, end):
                error, bits, held, at = _read(bits, held, data, at, errors)
                off = np.int64(error >> _U1)
                code = _center(codes) + (-off - 1 if error & _U1 else off)
                if code < 1 or code > largest[c]:
                    return False
                moves[j] *= code
                errors = _learned(errors, error)
                codes += code - (codes >> np.int64(4))
        else:
            after = first
            while True:
                gap, bits, held, at = _read(bits, held, data, at, runs)
                here = after + np.int64(gap)
                if here >= end:
                    break
                runs, after = _learned(runs, gap), here + 1
                more, bits, held, at = _read(bits, held, data, at, sizes)
                if more + np.uint64(2) > np.uint64(largest[c]):
                    return False
                moves[here] *= np.int64(more) + 2
                sizes = _learned(sizes, more)
            if here != end:
                return False
    return end == count and at - (held >> 3) == data.shape[0] - WORD


def decode(data: memoryview, classes: Classes, count: int, largest: NDArray[np.int64]) -> Places | None:
    """The inverse: what is sent, (count,). largest: (CLASSES,), the largest code that each class may have.

    Returns None for a stream that does not hold as many, has more bytes, or holds a larger code.
    """
    found = Places(np.empty(count, np.uint32), np.empty(count, np.int8))
    if not count:
        return None if len(data) else found
    stream = buffer("stream", len(data) + WORD, np.uint8)[: len(data) + WORD]
    stream[: len(data)] = np.frombuffer(data, np.uint8)
    stream[len(data) :] = 0
    start = _start(len(classes.each), count)
    return found if _decode(read_only(stream), read_only(classes.edges), start, read_only(largest), *found) else None


@kernel
def _add(total, places, moves, values):
    for j in range(places.shape[0]):
        total[places[j]] += values[np.int64(moves[j]) + CODES]


def add(total: F32, sent: Places, values: F32) -> None:
    """Add what is sent to total (n,), by place. values: (2 · CODES + 1,), what the moves from −CODES on stand for."""
    _add(total, read_only(sent.places), read_only(sent.moves), read_only(values))
