"""The sums of a digest's terms over elements; `weights.digests` has the formula."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel

# Odd 64-bit constants: the golden ratio's fraction (Steele et al., SplitMix64) and MurmurHash3's first multiplier.
C1 = np.uint64(0x9E3779B97F4A7C15)
C2 = np.uint64(0x87C37B91114253D5)
M1 = np.uint64(0xFF51AFD7ED558CCD)  # MurmurHash3's 64-bit finalizer
M2 = np.uint64(0xC4CEB9FE1A85EC53)
_33 = np.uint64(33)


@inlined
def mixed(x):
    """MurmurHash3's finalizer."""
    x ^= x >> _33
    x *= M1
    x ^= x >> _33
    x *= M2
    x ^= x >> _33
    return x


@kernel
def _digest_range(seed, start, bits):
    total = np.uint64(0)
    position = seed + start * C1
    for i in range(bits.shape[0]):
        total += mixed(position + np.uint64(i) * C1 + np.uint64(bits[i]) * C2)
    return total


def digest_range(seed: int, start: int, bits: UIntArray) -> int:
    """The sum of the digest's terms of bits (n,), whose first element has the flat index `start`."""
    return int(_digest_range(np.uint64(seed), np.uint64(start), read_only(bits)))


@kernel
def _digest_delta(seed, start, indices, before, after):
    total = np.uint64(0)
    position = seed + start * C1
    for j in range(indices.shape[0]):
        place = position + np.uint64(indices[j]) * C1
        total += mixed(place + np.uint64(after[j]) * C2) - mixed(place + np.uint64(before[j]) * C2)
    return total


def digest_delta(
    seed: int, start: int, indices: NDArray[np.uint32] | NDArray[np.int64], before: UIntArray, after: UIntArray
) -> int:
    """The change of the digest, mod 2^64, if the elements at start + indices change from before to after, (k,) each."""
    return int(
        _digest_delta(np.uint64(seed), np.uint64(start), read_only(indices), read_only(before), read_only(after))
    )


@kernel
def _digest_rows(seed, starts, run, bits):
    total = np.uint64(0)
    for r in range(starts.shape[0]):
        position = seed + np.uint64(starts[r]) * C1
        for i in range(run):
            total += mixed(position + np.uint64(i) * C1 + np.uint64(bits[r * run + i]) * C2)
    return total


def digest_rows(seed: int, starts: NDArray[np.int64], run: int, bits: UIntArray) -> int:
    """The sum of the digest's terms of bits (rows · run,), whose rows begin at the flat indices starts (rows,)."""
    return int(_digest_rows(np.uint64(seed), read_only(starts), run, read_only(bits)))


@kernel
def _positions(starts, run, indices, found):
    for j in range(indices.shape[0]):
        row = np.uint32(indices[j] // run)
        found[j] = starts[row] + np.int64(np.uint32(indices[j] - row * run))


def positions(starts: NDArray[np.int64], run: int, indices: NDArray[np.uint32], found: NDArray[np.int64]) -> None:
    """Set found (k,) to the flat index in the tensor of each index (k,) in rows of `run` that begin at starts."""
    _positions(read_only(starts), np.uint32(run), read_only(indices), found)
