"""The naive twins of the kernels in `cpu.py`: plain Python over integers, written to be obviously right.

Same names, same arguments, same results; only the tests run them. A reader in another language can be
checked against them.
"""

from typing import Any

MASK = (1 << 64) - 1
C1 = 0x9E3779B97F4A7C15
C2 = 0x87C37B91114253D5


def find_changes(old: Any, new: Any, indices: Any, values: Any) -> int:
    k = 0
    for i in range(len(old)):
        if int(old[i]) != int(new[i]):
            indices[k], values[k] = i, new[i]
            k += 1
    return k


def scatter(target: Any, indices: Any, values: Any) -> None:
    for index, value in zip(indices, values, strict=True):
        target[int(index)] = value


def gather(source: Any, indices: Any, values: Any) -> None:
    for j, index in enumerate(indices):
        values[j] = source[int(index)]


def union(indices: Any, values: Any, more_indices: Any, more_values: Any, all_indices: Any, all_values: Any) -> int:
    merged = dict(zip(more_indices, more_values, strict=True)) | dict(zip(indices, values, strict=True))
    for k, index in enumerate(sorted(merged)):
        all_indices[k], all_values[k] = index, merged[index]
    return len(merged)


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


def gap_encode(indices: Any, words: Any) -> int:
    k, previous = 0, -1
    for index in indices:
        gap = int(index) - previous - 1
        previous = int(index)
        coded = [gap] if gap < 0xFFFF else [0xFFFF, gap & 0xFFFF, gap >> 16]
        for word in coded:
            words[k] = word
            k += 1
    return k


def gap_decode(words: Any, n: int, indices: Any) -> int:
    at, index = 0, -1
    for j in range(len(indices)):
        if at >= len(words):
            return -1
        gap = int(words[at])
        at += 1
        if gap == 0xFFFF:
            if at + 2 > len(words):
                return -1
            gap = int(words[at]) + (int(words[at + 1]) << 16)
            at += 2
            if gap < 0xFFFF:
                return -1
        index += gap + 1
        if index >= n:
            return -1
        indices[j] = index
    return at
