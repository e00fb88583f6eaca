"""The naive twins of the kernels in `cpu.py` and `loco.py`: plain Python over integers, written to be obviously right.

Same names, same arguments, same results; only the tests run them. A reader in another language can be
checked against them.
"""

from bisect import bisect_left
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

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


# The twins of `loco.py`. A format is a dtype's name here; numbers are exact fractions, rounded where it says so.

_FIELDS = {"bfloat16": (8, 7), "float16": (5, 10), "float8_e4m3fn": (4, 3)}  # bits of exponent and mantissa


def to_float32(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even. No infinities: tests stay far from them."""
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def fused(a: Any, b: Any, c: Any) -> np.float32:
    """a·b + c, rounded once."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return to_float32(exact) if exact else a * b + c  # a fraction has no −0


@cache
def codes(name: str) -> list[Fraction]:
    """The values of a format's codes from 0 up; the last is where it ends: infinity's code, or the largest of FP8."""
    exponents, mantissas = _FIELDS[name]
    bias, found = 2 ** (exponents - 1) - 1, []
    last = 2 ** (exponents + mantissas) - (2 if name == "float8_e4m3fn" else 2**mantissas)
    for code in range(last + 1):
        exponent, mantissa = code >> mantissas, code % 2**mantissas
        whole = mantissa + 2**mantissas if exponent else mantissa
        found.append(whole * Fraction(2) ** (max(exponent, 1) - bias - mantissas))
    return found


def cast_one(value: Any, name: str) -> int:
    exponents, mantissas = _FIELDS[name]
    sign = int(np.signbit(value)) << exponents + mantissas
    table = codes(name)
    if np.isinf(value):
        return sign | len(table) - 1
    exact = abs(Fraction(float(value)))
    at = bisect_left(table, exact)
    near = range(max(0, at - 1), min(len(table), at + 1)) or [len(table) - 1]
    return sign | min(near, key=lambda code: (abs(table[code] - exact), code & 1))


def cast(values: Any, name: str, bits: Any) -> None:
    for i, value in enumerate(values):
        bits[i] = cast_one(value, name)


def gate(shared: Any, live: Any, residual: Any, name: str, before: Any, after: Any) -> bool:
    finite = True
    for i in range(len(shared)):
        s = residual[i] + (shared[i] - live[i])
        finite = finite and bool(np.isfinite(s))
        before[i] = cast_one(shared[i], name)
        after[i] = cast_one(shared[i] - s, name) if np.isfinite(s) else 0
    return finite


def pick(shared: Any, live: Any, residual: Any, indices: Any, values: Any) -> None:
    for j, i in enumerate(indices):
        values[j] = residual[i] + (shared[i] - live[i])


def keep(shared: Any, live: Any, residual: Any, indices: Any, values: Any) -> None:
    sent = dict(zip(indices.tolist(), values, strict=True))
    for i in range(len(shared)):
        s = residual[i] + (shared[i] - live[i])
        residual[i] = s - sent.get(i, np.float32(0))


def add(total: Any, indices: Any, values: Any) -> None:
    for index, value in zip(indices, values, strict=True):
        total[index] += value


def difference(shared: Any, live: Any, out: Any) -> bool:
    for i in range(len(shared)):
        out[i] = shared[i] - live[i]
    return bool(np.isfinite(out).all())


def outer(shared: Any, momentum: Any, gradient: Any, lr: float, mu: float) -> None:
    rate, decay = np.float32(lr), np.float32(mu)
    for i in range(len(shared)):
        momentum[i] = decay * momentum[i] + gradient[i]
        shared[i] = fused(-rate, fused(decay, momentum[i], gradient[i]), shared[i])
