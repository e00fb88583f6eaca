"""The cast of float32 to bfloat16 on the device, as `weights.casts` has it on the CPU."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import cuda

from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    device,
    example,
    high_word,
    kernel,
    launch,
    load,
    low_word,
    store,
)

_MAGNITUDE, _SIGN, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x80000000), np.uint32(0x7F800000)
_HALF, _NAN = np.uint32(0x7FFF), np.uint32(0x7FC0)
_LOW = np.uint64(0xFFFFFFFF)
_16, _32 = np.uint32(16), np.uint64(32)


@device
def rounded(bits):
    """The bfloat16 bits nearest to those of a float32, ties to even; a quiet NaN of the same sign for NaN."""
    magnitude = np.uint32(bits & _MAGNITUDE)
    sign = np.uint32((bits & _SIGN) >> _16)
    if magnitude > _INFINITY:
        return np.uint32(sign | _NAN)
    odd = np.uint32((magnitude >> _16) & np.uint32(1))
    return np.uint32(sign | np.uint32(np.uint32(magnitude + np.uint32(_HALF + odd)) >> _16))


@device
def _pair(word):
    """The bfloat16 bits of two float32, side by side."""
    first, second = rounded(np.uint32(word & _LOW)), rounded(np.uint32(word >> _32))
    return np.uint64(np.uint64(first) | (np.uint64(second) << np.uint64(16)))


@device
def four(low, high):
    """The bfloat16 bits of the four float32 in two words, as one word."""
    return np.uint64(_pair(low) | (_pair(high) << _32))


@kernel
def _cast(floats, words, halves, source, target, size):
    """A thread casts four elements. floats, words, halves: arrays of the widths of what is read and written."""
    at = cuda.grid(1)
    p, q, i = source + np.uint64(16 * at), target + np.uint64(8 * at), 4 * at
    if i + 4 <= size and (p & np.uint64(15)) == np.uint64(0) and (q & np.uint64(7)) == np.uint64(0):
        store(words, q, four(low_word(p), high_word(p)))
        return
    for j in range(i, min(i + 4, size)):
        bits = rounded(load(floats, source + np.uint64(4 * j)))
        store(halves, target + np.uint64(2 * j), np.uint16(bits))


def cast(values: DeviceArray, bits: DeviceArray) -> None:
    """Queue that bits become those of float32 values in bfloat16. Memory-bound, 6 bytes an element."""
    source, target, size = np.uint64(values.data_ptr()), np.uint64(bits.data_ptr()), values.numel()
    launch(_cast, -(-size // (4 * THREADS)), THREADS, *map(example, (4, 8, 2)), source, target, size)
