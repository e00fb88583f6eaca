"""The naive twins of the kernels in `study.py`: same names, same arguments, same results."""

from collections import Counter
from typing import Any

import numpy as np


def count_differing(old: Any, new: Any) -> int:
    return sum(int(a) != int(b) for a, b in zip(old, new, strict=True))


def recurring(former: Any, old: Any, indices: Any, values: Any) -> tuple[int, int]:
    again = sum(int(former[i]) != int(old[i]) for i in indices)
    back = sum(int(former[i]) == int(value) for i, value in zip(indices, values, strict=True))
    return again, back


def histogram(moved: Any, exponents: int) -> tuple[Any, Any]:
    counts = Counter(
        (int(exponent) * 2**52 + min(int(size), 2**52 - 1)) * 2 + bool(up)
        for exponent, up, size in zip(moved.exponents, moved.ups, moved.sizes, strict=True)
    )
    keys = sorted(counts)
    return np.array(keys, np.uint64), np.array([counts[key] for key in keys], np.int64)
