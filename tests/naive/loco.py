"""The naive twins of `cpu/loco.py`. A format is a dtype's name here; numbers are exact until rounded.

A Python float holds a float32, a code's value and the difference of neighbours exactly; sums of products are fractions.
"""

from bisect import bisect_left
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

FIELDS = {
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e4m3fn": (4, 3),
    "float4_e2m1fn": (2, 1),
}  # exponent, mantissa
WITHOUT = {"float8_e4m3fn": 1, "float4_e2m1fn": 0}  # codes after the largest; of others, all with its exponent


def to_float32(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even; from halfway between the largest and 2^128 on, infinity."""
    if abs(exact) >= 2**128 - 2**103:
        return np.float32(np.inf if exact > 0 else -np.inf)
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    candidates = [x for x in around if np.isfinite(x)]
    return min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


def fused(a: Any, b: Any, c: Any) -> np.float32:
    """a·b + c, rounded once."""
    if not np.isfinite([a, b, c]).all():
        return np.float32(a * b + c)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return to_float32(exact) if exact else a * b + c  # a fraction has no −0


@cache
def codes(name: str) -> list[float]:
    """The values of a format's codes from 0 up; the last is where it ends: infinity's code, or the largest of FP8."""
    exponents, mantissas = FIELDS[name]
    bias, found = 2 ** (exponents - 1) - 1, []
    last = 2 ** (exponents + mantissas) - 1 - WITHOUT.get(name, 2**mantissas - 1)
    for code in range(last + 1):
        exponent, mantissa = code >> mantissas, code % 2**mantissas
        whole = mantissa + 2**mantissas if exponent else mantissa
        found.append(whole * 2.0 ** (max(exponent, 1) - bias - mantissas))
    return found


def cast_one(value: Any, name: str) -> int:
    exponents, mantissas = FIELDS[name]
    sign = int(np.signbit(value)) << exponents + mantissas
    table = codes(name)
    if np.isinf(value):
        return sign | len(table) - 1
    exact = abs(float(value))
    at = bisect_left(table, exact)
    near = range(max(0, at - 1), min(len(table), at + 1)) or [len(table) - 1]
    return sign | min(near, key=lambda code: (abs(table[code] - exact), code & 1))


def cast(values: Any, name: str, bits: Any) -> None:
    for i, value in enumerate(values):
        bits[i] = cast_one(value, name)


def gate(shared: Any, live: Any, residual: Any, name: str, scale: float, before: Any, after: Any) -> bool:
    finite = True
    for i in range(len(shared)):
        s = residual[i] + (shared[i] - live[i])
        finite = finite and bool(np.isfinite(s))
        before[i] = cast_one(shared[i], name)
        after[i] = cast_one(shared[i] - np.float32(scale) * s, name) if np.isfinite(s) else 0
    return finite


def width(code: int, name: str) -> float:
    """The distance between the magnitude of a format's code and the next one; bfloat16's is at least 2^-64."""
    table = codes(name)
    at = min(int(code) % (1 << sum(FIELDS[name])), len(table) - 2)
    found = table[at + 1] - table[at]
    return max(found, 2.0**-64) if name == "bfloat16" else found


@cache
def magnitudes() -> list[int]:
    """What the codes from 1 to 127 stand for, in units: 1, then 2 and 3 times the powers of two."""
    return [1] + [(2 + code % 2) * 2 ** (code // 2 - 1) for code in range(2, 128)]


def mixed(x: int) -> int:
    """The 32-bit finalizer of murmur3."""
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def log8(shared: Any, live: Any, residual: Any, name: str, scale: float, seed: int, turn: int, found: Any) -> bool:
    finite = True
    for i in range(len(shared)):
        s = residual[i] + (shared[i] - live[i])
        finite = finite and bool(np.isfinite(s))
        units = s / np.float32(width(cast_one(shared[i], name), name)) * np.float32(scale)
        phase = np.float32(((mixed((seed + i) % 2**32) + turn) % 2**32 >> 8) * 2.0**-24)
        whole = int(np.floor(units + phase)) if np.isfinite(s) else 0
        found[i] = np.sign(whole) * (abs(whole) if abs(whole) <= 2 else nearest(units))
    return finite


def nearest(units: Any) -> int:
    """The code whose magnitude is nearest; the larger of two that are equally near."""
    table = magnitudes()
    exact = abs(float(units))
    above = bisect_left(table, exact)  # only it and the one before can be nearest
    return 1 + min(range(len(table))[max(above - 1, 0) : above + 1], key=lambda at: (abs(table[at] - exact), -at))


def log8_values(found: Any, cells: Any, name: str, scale: float, values: Any) -> None:
    for j, code in enumerate(found):
        unit = np.float32(width(cells[j], name)) * np.float32(1 / scale)
        values[j] = np.sign(code) * (np.float32(magnitudes()[abs(int(code)) - 1]) * unit)


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


def overflows(shared: Any, momentum: Any, gradient: Any, lr: float, mu: float) -> bool:
    after = shared.copy()
    outer(after, momentum.copy(), gradient, lr, mu)
    return not np.isfinite(after).all()


def outer(shared: Any, momentum: Any, gradient: Any, lr: float, mu: float) -> None:
    rate, decay = np.float32(lr), np.float32(mu)
    for i in range(len(shared)):
        momentum[i] = decay * momentum[i] + gradient[i]
        shared[i] = fused(-rate, fused(decay, momentum[i], gradient[i]), shared[i])
