"""The `gap` codec's words: the gaps between ascending indices as 16-bit words with an escape."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.arrays import read_only
from pulse_rl.kernels.cpu.compiled import kernel


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


@kernel
def _gap_decode(words, sizes, counts, dense, indices):
    at = 0
    k = np.int64(0)
    for s in range(sizes.shape[0]):
        index = np.int64(-1)
        for j in range(k, k + counts[s]):
            if dense[s]:
                indices[j] = j - k
                continue
            if at >= words.shape[0]:
                return -1 - s
            gap = np.int64(words[at])
            at += 1
            if gap == 0xFFFF:
                if at + 2 > words.shape[0]:
                    return -1 - s
                gap = np.int64(words[at]) | (np.int64(words[at + 1]) << 16)
                at += 2
                if gap < 0xFFFF:
                    return -1 - s
            index += gap + 1
            if index >= sizes[s]:
                return -1 - s
            indices[j] = index
        k += counts[s]
    return at


def gap_decode(
    words: NDArray[np.uint16],
    sizes: NDArray[np.int64],
    counts: NDArray[np.int64],
    dense: NDArray[np.bool_],
    indices: NDArray[np.uint32],
) -> int:
    """Fill indices (k,) from the gaps of several segments in words; each is proved below its segment's size.

    sizes, counts: (segments,) elements and changes of each; the counts add up to k. dense: (segments,) those that have
    no gaps, as all their elements change. Returns how many words were used; −1 − s if the words run out in segment s,
    an index of it is out of range, or a short gap is written as a long one.
    """
    return int(_gap_decode(read_only(words), read_only(sizes), read_only(counts), read_only(dense), indices))
