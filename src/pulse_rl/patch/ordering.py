"""The changes of one patch in the order in which they lie in live memory.

Its segments are tiles, whose rows alternate in memory: written one after the other they take half as long again, as
each page is met several times. Where all of them are rows in plain memory, one call sorts them; `merging` does it for
any memory and for several patches, segment by segment.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.ordering import Stretches, in_order
from pulse_rl.patch.live import Copies
from pulse_rl.patch.merging import REACH, Write
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.pieces import pieces_of


class Lying(NamedTuple):
    """Decoded changes of segments that lie as rows in plain memory, all of one width."""

    itemsize: int
    spots: cpu.Spots
    sizes: list[int]  # elements of each segment
    names: list[str]  # of each segment's tensor
    changes: list[Changes]  # of each segment


def writes_in_order(lying: Sequence[Lying], live: Mapping[str, Copies]) -> list[Write] | None:
    """One write for each stretch of memory, in order. live: the tensors, of which no two share memory.

    None where that is not known to be faster: tensors alternate in memory, or changes lie too unevenly.
    """
    found: list[Write] = []
    width = attrgetter("itemsize")
    for itemsize, alike in groupby(sorted(lying, key=width), key=width):
        writes = list(_of_width(itemsize, list(alike), live))
        if not all(writes):
            return None
        found += filter(None, writes)
    return found


def _of_width(itemsize: int, lying: Sequence[Lying], live: Mapping[str, Copies]) -> Iterator[Write | None]:
    """The same for elements of one width. A None means: not this way."""
    spots = cpu.Spots._make(map(np.concatenate, zip(*(each.spots for each in lying), strict=True)))
    names = [name for each in lying for name in each.names]
    changes = [one for each in lying for one in each.changes]
    counts = np.array([len(one.indices) for one in changes], np.int64)
    used = np.flatnonzero(counts)
    if not len(used):
        return
    rows = np.array([size for each in lying for size in each.sizes], np.int64)[used] // spots.runs[used]
    start = spots.addresses[used].view(np.int64)
    end = start + itemsize * ((rows - 1) * spots.apart[used] + spots.runs[used])
    order = np.argsort(start, kind="stable")
    members, start, end = used[order], start[order], np.maximum.accumulate(end[order])
    edges = np.flatnonzero(np.append(True, start[1:] >= end[:-1]))  # where memory begins that nothing before reaches
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    owners = np.array([numbers[name] for name in names], np.int64)[members]
    if (np.minimum.reduceat(owners, edges) != np.maximum.reduceat(owners, edges)).any():
        yield None
        return
    ends = end[np.append(edges[1:], len(end)) - 1]
    places = zip([names[member] for member in members[edges]], start[edges].tolist(), ends.tolist(), strict=True)
    memory = [_piece(live[name][0], *place) for name, *place in places]
    # Where each piece begins.
    begins = np.array([at for at, bits in enumerate(memory) if at == 0 or bits is not memory[at - 1]], np.int64)
    edges, ends, memory = edges[begins], ends[np.append(begins[1:], len(ends)) - 1], [memory[at] for at in begins]
    sizes = (ends - start[edges]) // itemsize
    if None in memory or (sizes >= REACH).any():
        yield None
        return
    stretches = Stretches(members, np.append(edges, len(members)), start[edges], sizes)
    joined = np.concatenate([one.indices for one in changes]), np.concatenate([one.values for one in changes])
    sorted_changes = in_order(spots, stretches, counts, *joined)
    if sorted_changes is None:
        yield None
        return
    indices, values = sorted_changes
    stops = np.cumsum(np.add.reduceat(counts[members], edges)).tolist()
    at = 0
    for edge, bits, first, stop in zip(edges, memory, start[edges].tolist(), stops, strict=True):
        assert bits is not None
        begin = (first - bits.address) // itemsize
        yield Write(bits, names[members[edge]], begin, Changes(indices[at:stop], values[at:stop]))
        at = stop


def _piece(tensor: Bits, first: int, end: int) -> HostBits | TorchBits | None:
    """The piece of a tensor that holds these addresses, in plain memory; None without one."""
    for _, bits, *_ in pieces_of(tensor):
        if isinstance(bits, HostBits | TorchBits) and bits.contiguous:
            address = bits.address
            if address <= first and end <= address + bits.size * bits.itemsize:
                return bits
    return None
