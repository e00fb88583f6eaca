"""What a trainer sends of a segment, as bits: Rice codes of gaps, class by class.

Whether an element is sent, which way and how far depends on θ's exponent and on the momentum, which sender and receiver
both know. So the elements are divided into classes by these, and each class is coded on its own: the gaps between those
of its elements that are sent, then which of them go against the momentum, then how large they are. Within a class a
number has nearly one distribution, and the mean of the last ones gives a good Rice code, without a table and without
the time of an arithmetic coder. The receiver sorts the elements by class once for all payloads; after that a payload
takes time for what is sent only. `docs/loco.md` describes every bit; the naive twin is in `kernels/reference/sends.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only, trailing_zeros
from pulse_rl.kernels.cpu.classes import CLASS, CLASSES, DOWN, EXPONENT, PLACE, SIGN, Sorted
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.loco import F32, magnitude

LONGEST = 24  # ones in a row: the whole number follows
NUMBER = 21  # bits of such a number
CODES = 127  # the largest code
MOST_BITS = 4 * (LONGEST + NUMBER)  # of one element that is sent
ENDS = 3 * (LONGEST + NUMBER) + 2  # bits of a class beside its elements

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


# Writing. bits, held: what is not written yet, and how many bits. out, at: the bytes, and how many are written.


@inlined
def _put(bits, held, out, at, value, width):
    bits |= value << np.uint64(held)
    held += width
    while held >= 8:
        out[at] = np.uint8(bits & np.uint64(255))
        at += 1
        bits >>= np.uint64(8)
        held -= 8
    return bits, held, at


@inlined
def _write(bits, held, out, at, value, mean):
    low = _parameter(mean)
    ones = np.int64(value >> low)
    if ones < LONGEST:
        bits, held, at = _put(bits, held, out, at, (_U1 << np.uint64(ones)) - _U1, ones + 1)
        return _put(bits, held, out, at, value & ((_U1 << low) - _U1), np.int64(low))
    bits, held, at = _put(bits, held, out, at, (_U1 << np.uint64(LONGEST)) - _U1, LONGEST)
    return _put(bits, held, out, at, value, NUMBER)


@kernel
def _arrange(classes, indices, codes, counts, sent, ranks, moves):
    """Bring sends into the order of classes: each one's rank in its class, and its code, negative against the momentum.

    counts, sent: (CLASSES,), to be set to the elements of each class, and those of them that are sent.
    """
    for j in range(indices.shape[0]):
        sent[classes[indices[j]] & CLASS] += 1
    to = np.zeros(CLASSES, np.int64)
    for c in range(CLASSES - 1):
        to[c + 1] = to[c] + sent[c]
    seen = np.zeros((4, CLASSES), np.int64)  # four of each, as in `classes`
    i = np.int64(0)
    for j in range(indices.shape[0]):
        while i < indices[j]:
            seen[i & 3, classes[i] & CLASS] += 1
            i += 1
        c = classes[i] & CLASS
        ranks[to[c]] = seen[0, c] + seen[1, c] + seen[2, c] + seen[3, c]
        moves[to[c]] = -codes[j] if classes[i] & SIGN else codes[j]
        to[c] += 1
    while i < classes.shape[0]:
        seen[i & 3, classes[i] & CLASS] += 1
        i += 1
    for c in range(CLASSES):
        counts[c] = seen[0, c] + seen[1, c] + seen[2, c] + seen[3, c]


@kernel
def _encode(counts, sent, ranks, moves, start, out):
    """Returns how many bytes are written. start: 16 times the mean gap that is expected at first."""
    bits, held, at = _U0, np.int64(0), np.int64(0)
    gaps, rests, turns, runs, sizes, errors, codes = start, _OFTEN, _OFTEN, _RUN, _U0, _OFTEN, _LARGE
    first = 0
    for c in range(CLASSES):
        if counts[c] == 0:
            continue
        end, before = first + sent[c], np.int64(-1)

        most = 2 * sent[c] > counts[c]
        bits, held, at = _put(bits, held, out, at, np.uint64(most), 1)
        if most:
            for j in range(first, end):
                for rest in range(ranks[j - 1] + 1 if j > first else 0, ranks[j]):
                    gap = np.uint64(rest - before - 1)
                    bits, held, at = _write(bits, held, out, at, gap, rests)
                    rests, before = _learned(rests, gap), rest
            for rest in range(ranks[end - 1] + 1, counts[c]):
                gap = np.uint64(rest - before - 1)
                bits, held, at = _write(bits, held, out, at, gap, rests)
                rests, before = _learned(rests, gap), rest
            bits, held, at = _write(bits, held, out, at, np.uint64(counts[c] - before - 1), rests)
        else:
            for j in range(first, end):
                gap = np.uint64(ranks[j] - before - 1)
                bits, held, at = _write(bits, held, out, at, gap, gaps)
                gaps, before = _learned(gaps, gap), ranks[j]
            bits, held, at = _write(bits, held, out, at, np.uint64(counts[c] - before - 1), gaps)
        if first == end:
            continue

        larger, before = 0, np.int64(first - 1)
        for j in range(first, end):
            larger += abs(moves[j]) > 1
            if moves[j] < 0:
                gap = np.uint64(j - before - 1)
                bits, held, at = _write(bits, held, out, at, gap, turns)
                turns, before = _learned(turns, gap), np.int64(j)
        bits, held, at = _write(bits, held, out, at, np.uint64(end - before - 1), turns)

        most = 2 * larger > sent[c]
        bits, held, at = _put(bits, held, out, at, np.uint64(most), 1)
        if most:
            for j in range(first, end):
                code = np.int64(abs(moves[j]))
                off = code - _center(codes)
                error = np.uint64(2 * off if off >= 0 else -2 * off - 1)
                bits, held, at = _write(bits, held, out, at, error, errors)
                errors = _learned(errors, error)
                codes += code - (codes >> np.int64(4))
        else:
            before = np.int64(first - 1)
            for j in range(first, end):
                if abs(moves[j]) > 1:
                    gap = np.uint64(j - before - 1)
                    bits, held, at = _write(bits, held, out, at, gap, runs)
                    runs, before = _learned(runs, gap), np.int64(j)
                    size = np.uint64(abs(moves[j]) - 2)
                    bits, held, at = _write(bits, held, out, at, size, sizes)
                    sizes = _learned(sizes, size)
            bits, held, at = _write(bits, held, out, at, np.uint64(end - before - 1), runs)
        first = end
    bits, held, at = _put(bits, held, out, at, _U0, (8 - held) & 7)
    return at


def encode(classes: NDArray[np.uint8], indices: NDArray[np.uint32], codes: NDArray[np.int8]) -> bytes:
    """The stream of what is sent of a segment; no bytes where that is nothing.

    classes: (n,), as `classes_of` gives them. indices: (k,) ascending; codes: (k,), none of them 0.
    """
    count = len(indices)
    if not count:
        return b""
    counts, sent = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    ranks, moves = np.empty(count, np.int64), np.empty(count, np.int16)
    _arrange(read_only(classes), read_only(indices), read_only(codes), counts, sent, ranks, moves)
    out = np.empty((count * MOST_BITS + CLASSES * ENDS) // 8 + 1, np.uint8)
    return out[: _encode(counts, sent, ranks, moves, _start(len(classes), count), out)].tobytes()


def _start(elements: int, count: int) -> np.uint64:
    return np.uint64(16 * elements // count)


# Reading: the inverse. data (m,) uint8 is untrusted: behind its end it is read as zeros, and found to be too short.


@inlined
def _fill(bits, held, data, at):
    while held <= 56:
        if at < data.shape[0]:
            bits |= np.uint64(data[at]) << np.uint64(held)
        at += 1
        held += 8
    return bits, held, at


@inlined
def _read(bits, held, data, at, mean):
    bits, held, at = _fill(bits, held, data, at)
    low = _parameter(mean)
    ones = np.int64(trailing_zeros(~bits))
    if ones < LONGEST:
        bits, held = bits >> np.uint64(ones + 1), held - ones - 1
        bits, held, at = _fill(bits, held, data, at)
        value = np.uint64(ones) << low | bits & ((_U1 << low) - _U1)
        return value, bits >> low, held - np.int64(low), at
    bits, held = bits >> np.uint64(LONGEST), held - LONGEST
    bits, held, at = _fill(bits, held, data, at)
    value = bits & ((_U1 << np.uint64(NUMBER)) - _U1)
    return value, bits >> np.uint64(NUMBER), held - NUMBER, at


@kernel
def _decode(data, edges, places, start, units, indices, codes, values):
    """Returns whether the stream is sound."""
    bits, held, at = _U0, np.int64(0), np.int64(0)
    gaps, rests, turns, runs, sizes, errors, means = start, _OFTEN, _OFTEN, _RUN, _U0, _OFTEN, _LARGE
    end, count = np.int64(0), indices.shape[0]
    for c in range(CLASSES):
        begin, size = edges[c], edges[c + 1] - edges[c]
        if size == 0:
            continue
        first = end

        bits, held, at = _fill(bits, held, data, at)
        most, bits, held = bits & _U1, bits >> _U1, held - 1
        after = np.int64(0)  # the last one whose gap was read
        while True:
            gap, bits, held, at = _read(bits, held, data, at, rests if most else gaps)
            here = after + np.int64(gap)
            if here > size:
                return False
            if most:
                if end + here - after > count:
                    return False
                for rank in range(after, here):
                    indices[end] = places[begin + rank]
                    end += 1
            if here == size:
                break
            if most:
                rests = _learned(rests, gap)
            else:
                if end == count:
                    return False
                indices[end] = places[begin + here]
                end += 1
                gaps = _learned(gaps, gap)
            after = here + 1
        if first == end:
            continue

        for j in range(first, end):
            codes[j] = 1
        after = first
        while True:
            gap, bits, held, at = _read(bits, held, data, at, turns)
            here = after + np.int64(gap)
            if here > end:
                return False
            if here == end:
                break
            codes[here] = -1
            turns, after = _learned(turns, gap), here + 1

        bits, held, at = _fill(bits, held, data, at)
        most, bits, held = bits & _U1, bits >> _U1, held - 1
        if most:
            for j in range(first, end):
                error, bits, held, at = _read(bits, held, data, at, errors)
                off = np.int64(error >> _U1)
                code = _center(means) + (-off - 1 if error & _U1 else off)
                if code < 1 or code > CODES:
                    return False
                codes[j] *= code
                errors = _learned(errors, error)
                means += code - (means >> np.int64(4))
        else:
            after = first
            while True:
                gap, bits, held, at = _read(bits, held, data, at, runs)
                here = after + np.int64(gap)
                if here > end:
                    return False
                if here == end:
                    break
                runs, after = _learned(runs, gap), here + 1
                more, bits, held, at = _read(bits, held, data, at, sizes)
                if more > np.uint64(CODES - 2):
                    return False
                codes[here] *= np.int64(more) + 2
                sizes = _learned(sizes, more)
    broken = np.float32(0)
    for j in range(end):
        place, code = indices[j], np.int32(codes[j])
        value = np.float32(magnitude(np.uint32(abs(code))) * units[(place >> EXPONENT) & np.uint32(255)])
        values[j] = -value if (code < 0) != (place >= DOWN) else value
        indices[j] = place & PLACE
        broken += value - value  # NaN once a value is infinite
    return end == count and at - held // 8 == data.shape[0] and broken == 0


def decode(data: NDArray[np.uint8], elements: Sorted, count: int, units: F32) -> tuple[NDArray[np.uint32], F32] | None:
    """The inverse: indices (count,) in range, each once, by class, and what the codes stand for, float32 (count,).

    units: (256,), the unit of each exponent. Returns None for a stream that does not hold as many, has more bytes, or
    holds a value that overflows float32.
    """
    indices, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    if not count:
        return (indices, values) if not len(data) else None
    codes = np.empty(count, np.int8)
    edges, places = read_only(elements.edges), read_only(elements.places)
    start = _start(len(places), count)
    sound = _decode(read_only(data), edges, places, start, read_only(units), indices, codes, values)
    return (indices, values) if sound else None
