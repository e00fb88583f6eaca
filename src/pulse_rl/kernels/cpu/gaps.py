"""The `gap` codec's words: the gaps between ascending indices as 16-bit words with an escape."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel

_ONE, _TWO = np.uint64(1), np.uint64(2)


@kernel
def _gap_encode(indices, edges, words):
    k = 0
    for s in range(edges.shape[0] - 1):
        previous = np.int64(-1)
        for j in range(edges[s], edges[s + 1]):
            index = np.int64(indices[j])
            gap = index - previous - 1
            previous = index
            if gap < 0xFFFF:
                words[k] = gap
                k += 1
            else:
                words[k] = 0xFFFF
                words[k + 1] = gap & 0xFFFF
                words[k + 2] = gap >> 16
                k += 3
    return k


def gap_encode(indices: NDArray[np.uint32], edges: NDArray[np.int64], words: NDArray[np.uint16]) -> int:
    """Write the gaps between the indices of each segment, ascending, into words (at least 3k,). Returns how many words.

    edges: (segments + 1,), where the indices of each begin, and the last one's end. A gap is the number of unchanged
    elements before a change. Below 65535 it is one word; otherwise the word 65535, then its low and its high 16 bits.
    """
    return int(_gap_encode(read_only(indices), read_only(edges), words))


@inlined
def _word(low, high, at):
    return np.int64(low[at]) | (np.int64(high[at]) << 8)


@kernel
def _gap_decode(low, high, sizes, counts, dense, indices):
    at, words, k = np.uint64(0), np.uint64(low.shape[0]), np.int64(0)  # an index without a sign is not checked for one
    for s in range(sizes.shape[0]):
        index, size, mine = np.int64(-1), sizes[s], indices[k : k + counts[s]]
        for j in range(mine.shape[0]):
            if dense[s]:
                mine[j] = j
                continue
            if at >= words:
                return -1 - s
            gap = _word(low, high, at)
            at += _ONE
            if gap == 0xFFFF:
                if at + _TWO > words:
                    return -1 - s
                gap = _word(low, high, at) | (_word(low, high, at + _ONE) << 16)
                at += _TWO
                if gap < 0xFFFF:
                    return -1 - s
            index += gap + 1
            if index >= size:
                return -1 - s
            mine[j] = index
        k += counts[s]
    return np.int64(at)


def gap_decode(
    low: NDArray[np.uint8],
    high: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    dense: NDArray[np.bool_],
    indices: NDArray[np.uint32],
) -> int:
    """Fill indices (k,) from the gaps of several segments; each is proved below its segment's size.

    low, high: (words,) the low and the high bytes of the words. sizes, counts: (segments,) elements and changes of
    each; the counts add up to k. dense: (segments,) those that have no gaps, as all their elements change. Returns how
    many words were used; −1 − s if the words run out in segment s, an index of it is out of range, or a short gap is
    written as a long one.
    """
    words = read_only(low), read_only(high)
    return int(_gap_decode(*words, read_only(sizes), read_only(counts), read_only(dense), indices))
