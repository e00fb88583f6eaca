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
