"""The naive twins of `cpu/gaps.py`."""

from typing import Any


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


def gap_decode(low: Any, high: Any, sizes: Any, counts: Any, dense: Any, indices: Any) -> int:
    words = [int(a) + 256 * int(b) for a, b in zip(low, high, strict=True)]
    at = k = 0
    for number, (size, count, every) in enumerate(zip(sizes, counts, dense, strict=True)):
        index = -1
        if every:
            indices[k : k + count] = range(count)
            k += count
            continue
        for _ in range(int(count)):
            if at >= len(words):
                return -1 - number
            gap = words[at]
            at += 1
            if gap == 0xFFFF:
                if at + 2 > len(words):
                    return -1 - number
                gap = words[at] + (words[at + 1] << 16)
                at += 2
                if gap < 0xFFFF:
                    return -1 - number
            index += gap + 1
            if index >= size:
                return -1 - number
            indices[k] = index
            k += 1
    return at
