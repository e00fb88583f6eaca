"""The naive twins of `cpu/digests.py`."""

from typing import Any

MASK = (1 << 64) - 1
C1 = 0x9E3779B97F4A7C15
C2 = 0x87C37B91114253D5


def mix(x: int) -> int:
    """MurmurHash3's 64-bit finalizer."""
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def digest_range(seed: int, start: int, bits: Any) -> int:
    return digest_at(seed, start, range(len(bits)), bits)


def digest_at(seed: int, start: int, indices: Any, values: Any) -> int:
    return (
        sum(
            mix((seed + (start + int(i)) * C1 + int(bits) * C2) & MASK) for i, bits in zip(indices, values, strict=True)
        )
        & MASK
    )


def digest_delta(seed: int, start: int, indices: Any, before: Any, after: Any) -> int:
    return (digest_at(seed, start, indices, after) - digest_at(seed, start, indices, before)) & MASK


def digest_rows(seed: int, starts: Any, run: int, bits: Any) -> int:
    rows = (digest_range(seed, int(start), bits[r * run : (r + 1) * run]) for r, start in enumerate(starts))
    return sum(rows) & MASK


def positions(starts: Any, run: int, indices: Any, found: Any) -> None:
    for j, index in enumerate(indices):
        row, column = divmod(int(index), run)
        found[j] = starts[row] + column
