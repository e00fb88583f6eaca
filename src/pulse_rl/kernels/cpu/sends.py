"""What a trainer sends of a segment, as bits: Rice codes of gaps, and of runs of the smallest step.

Which elements are sent depends on θ's exponents, which sender and receiver both know. So a gap counts elements of one
exponent alone: those between two of them that are sent. Per exponent it has nearly one distribution, and the mean of
the last ones gives a good Rice code, without a table and without the time of an arithmetic coder. `docs/loco.md`
describes every bit; the decoder in plain Python is in `kernels/reference/sends.py`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import Field, UIntArray
from pulse_rl.kernels.cpu.arrays import read_only, trailing_zeros
from pulse_rl.kernels.cpu.compiled import inlined, kernel
from pulse_rl.kernels.cpu.rangecoder import log2_floor

LONGEST = 24  # ones in a row: the whole number follows
NUMBER = 21  # bits of such a number
CODES = 127  # the largest code
EXPONENTS = 256  # at most, of all gates
MOST_BITS = 160  # of one send, with what is written where its exponent is first met

_U0, _U1 = np.uint64(0), np.uint64(1)
_RUN = np.uint64(64)  # 16 times the mean run that is expected at first


@inlined
def _parameter(mean):
    return log2_floor((mean >> np.uint64(4)) | _U1)


@inlined
def _learned(mean, value):
    """16 times the mean of about the last 16 values."""
    return mean + value - (mean >> np.uint64(4))


# Writing. buffer, held: bits that are not written yet, and how many. out, at: the bytes, and how many are written.


@inlined
def _put(buffer, held, out, at, value, width):
    buffer |= value << np.uint64(held)
    held += width
    while held >= 8:
        out[at] = np.uint8(buffer & np.uint64(255))
        at += 1
        buffer >>= np.uint64(8)
        held -= 8
    return buffer, held, at


@inlined
def _write(buffer, held, out, at, value, mean):
    low = np.uint64(_parameter(mean))
    ones = np.int64(value >> low)
    if ones < LONGEST:
        buffer, held, at = _put(buffer, held, out, at, (_U1 << np.uint64(ones)) - _U1, ones + 1)
        return _put(buffer, held, out, at, value & ((_U1 << low) - _U1), np.int64(low))
    buffer, held, at = _put(buffer, held, out, at, (_U1 << np.uint64(LONGEST)) - _U1, LONGEST)
    return _put(buffer, held, out, at, value, NUMBER)


@kernel
def _find(cells, mask, shift, indices, codes, gaps, runs, met, first_gaps, first_runs):
    """What follows each send among those of its exponent: the next gap, and behind a larger step the run of smallest.

    met: (EXPONENTS,) the first element of an exponent, or −1; first_gaps, first_runs: likewise what comes first.
    """
    seen = np.zeros(EXPONENTS, np.int64)  # elements since the last send
    run = np.zeros(EXPONENTS, np.int64)
    last = np.full(EXPONENTS, -1, np.int64)  # send
    larger = np.full(EXPONENTS, -1, np.int64)  # the last one by more than the smallest step
    j, count = np.int64(0), indices.shape[0]
    wanted = np.int64(indices[0]) if count else np.int64(-1)
    for i in range(cells.shape[0]):
        e = np.int64((cells[i] & mask) >> shift)
        if met[e] < 0:
            met[e] = i
        if i != wanted:
            seen[e] += 1
            continue
        if last[e] < 0:
            first_gaps[e] = seen[e]
        else:
            gaps[last[e]] = seen[e]
        seen[e], last[e] = 0, j
        if abs(np.int64(codes[j])) == 1:
            run[e] += 1
        else:
            if larger[e] < 0:
                first_runs[e] = run[e]
            else:
                runs[larger[e]] = run[e]
            run[e], larger[e] = 0, j
        j += 1
        wanted = np.int64(indices[j]) if j < count else np.int64(-1)
    for e in range(EXPONENTS):
        if last[e] < 0:
            first_gaps[e] = seen[e]
        else:
            gaps[last[e]] = seen[e]
        if larger[e] < 0:
            first_runs[e] = run[e]
        else:
            runs[larger[e]] = run[e]


@kernel
def _encode(cells, mask, shift, indices, codes, gaps, runs, order, met, first_gaps, first_runs, out):
    """Returns how many bytes are written. order: the exponents, by their first element; met: that element."""
    buffer, held, at = _U0, np.int64(0), np.int64(0)
    start = np.uint64(16 * cells.shape[0] // max(1, indices.shape[0]))
    means = np.full(EXPONENTS, start, np.uint64)  # of gaps
    run_means = np.full(EXPONENTS, _RUN, np.uint64)
    sizes = np.zeros(EXPONENTS, np.uint64)  # of what is above the smallest step and one more
    left = np.full(EXPONENTS, -1, np.int64)  # of a run
    begun = 0
    for j in range(indices.shape[0]):
        i = np.int64(indices[j])
        while begun < order.shape[0] and met[order[begun]] <= i:
            e = order[begun]
            gap = np.uint64(first_gaps[e])
            buffer, held, at = _write(buffer, held, out, at, gap, means[e])
            means[e] = _learned(means[e], gap)
            begun += 1
        e = np.int64((cells[i] & mask) >> shift)
        code = np.int64(codes[j])
        buffer, held, at = _put(buffer, held, out, at, np.uint64(code < 0), 1)
        if left[e] < 0:
            left[e] = first_runs[e]
            buffer, held, at = _write(buffer, held, out, at, np.uint64(left[e]), run_means[e])
            run_means[e] = _learned(run_means[e], np.uint64(left[e]))
        if left[e] == 0:
            size = np.uint64(abs(code) - 2)
            buffer, held, at = _write(buffer, held, out, at, size, sizes[e])
            sizes[e] = _learned(sizes[e], size)
            left[e] = runs[j]
            buffer, held, at = _write(buffer, held, out, at, np.uint64(left[e]), run_means[e])
            run_means[e] = _learned(run_means[e], np.uint64(left[e]))
        else:
            left[e] -= 1
        gap = np.uint64(gaps[j])
        buffer, held, at = _write(buffer, held, out, at, gap, means[e])
        means[e] = _learned(means[e], gap)
    buffer, held, at = _put(buffer, held, out, at, _U0, (8 - held) & 7)
    return at


def encode(cells: UIntArray, indices: NDArray[np.uint32], codes: NDArray[np.int8], field: Field) -> bytes:
    """The stream of what is sent of a segment; no bytes where that is nothing.

    cells: θ's bits (n,) in the gate's format, n up to 2^20. indices: (k,) ascending; codes: (k,), none of them 0.
    """
    count = len(indices)
    if not count:
        return b""
    mask, shift = cells.dtype.type(field.mask), cells.dtype.type(field.shift)
    met, first_gaps, first_runs = np.full(EXPONENTS, -1), np.zeros(EXPONENTS, np.int64), np.zeros(EXPONENTS, np.int64)
    gaps, runs = np.empty(count, np.int32), np.empty(count, np.int32)
    sent = read_only(cells), mask, shift, read_only(indices), read_only(codes), gaps, runs
    _find(*sent, met, first_gaps, first_runs)
    order = np.argsort(met, kind="stable")
    order = order[met[order] >= 0]
    out = np.empty(count * MOST_BITS // 8 + 16 * EXPONENTS, np.uint8)
    return out[: _encode(*sent, order, met, first_gaps, first_runs, out)].tobytes()


# Reading: the inverse. data (m,) uint8 is untrusted: behind its end it is read as zeros, and found to be too short.


@inlined
def _fill(buffer, held, data, at):
    while held <= 56:
        if at < data.shape[0]:
            buffer |= np.uint64(data[at]) << np.uint64(held)
        at += 1
        held += 8
    return buffer, held, at


@inlined
def _read(buffer, held, data, at, mean):
    buffer, held, at = _fill(buffer, held, data, at)
    low = np.uint64(_parameter(mean))
    ones = np.int64(trailing_zeros(~buffer))
    if ones < LONGEST:
        buffer, held = buffer >> np.uint64(ones + 1), held - ones - 1
        buffer, held, at = _fill(buffer, held, data, at)
        value = np.uint64(ones) << low | buffer & ((_U1 << low) - _U1)
        return value, buffer >> low, held - np.int64(low), at
    buffer, held = buffer >> np.uint64(LONGEST), held - LONGEST
    buffer, held, at = _fill(buffer, held, data, at)
    value = buffer & ((_U1 << np.uint64(NUMBER)) - _U1)
    return value, buffer >> np.uint64(NUMBER), held - NUMBER, at


@kernel
def _decode(data, cells, mask, shift, indices, codes):
    """Returns whether the stream is sound."""
    buffer, held, at = _U0, np.int64(0), np.int64(0)
    count, j = indices.shape[0], np.int64(0)
    start = np.uint64(16 * cells.shape[0] // max(1, count))
    means = np.full(EXPONENTS, start, np.uint64)
    run_means = np.full(EXPONENTS, _RUN, np.uint64)
    sizes = np.zeros(EXPONENTS, np.uint64)
    left = np.full(EXPONENTS, -1, np.int64)  # of a run
    until = np.full(EXPONENTS, -1, np.int64)  # elements before the next send; −1: not met
    for i in range(cells.shape[0]):
        e = np.int64((cells[i] & mask) >> shift)
        ahead = until[e]
        if ahead > 0:
            until[e] = ahead - 1
            continue
        if j == count:
            break
        if ahead < 0:
            gap, buffer, held, at = _read(buffer, held, data, at, means[e])
            means[e] = _learned(means[e], gap)
            if gap > _U0:
                until[e] = np.int64(gap) - 1
                continue
        buffer, held, at = _fill(buffer, held, data, at)
        down = buffer & _U1
        buffer, held = buffer >> _U1, held - 1
        if left[e] < 0:
            run, buffer, held, at = _read(buffer, held, data, at, run_means[e])
            run_means[e] = _learned(run_means[e], run)
            left[e] = np.int64(run)
        size = np.int64(1)
        if left[e] == 0:
            more, buffer, held, at = _read(buffer, held, data, at, sizes[e])
            sizes[e] = _learned(sizes[e], more)
            if more > np.uint64(CODES - 2):
                return False
            size = np.int64(more) + 2
            run, buffer, held, at = _read(buffer, held, data, at, run_means[e])
            run_means[e] = _learned(run_means[e], run)
            left[e] = np.int64(run)
        else:
            left[e] -= 1
        gap, buffer, held, at = _read(buffer, held, data, at, means[e])
        means[e] = _learned(means[e], gap)
        until[e] = np.int64(gap)
        indices[j] = i
        codes[j] = np.int8(-size if down else size)
        j += 1
    return j == count and at - held // 8 == data.shape[0]


def decode(
    data: NDArray[np.uint8], cells: UIntArray, count: int, field: Field
) -> tuple[NDArray[np.uint32], NDArray[np.int8]] | None:
    """The inverse: indices (count,), ascending and in range, and codes; None for a stream that does not hold them."""
    indices, codes = np.empty(count, np.uint32), np.empty(count, np.int8)
    mask, shift = cells.dtype.type(field.mask), cells.dtype.type(field.shift)
    if not count:
        return (indices, codes) if not len(data) else None
    sound = _decode(read_only(data), read_only(cells), mask, shift, indices, codes)
    return (indices, codes) if sound else None
