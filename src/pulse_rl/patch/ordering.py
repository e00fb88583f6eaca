"""The changes of one patch in the order in which they lie in live memory.

Its segments are tiles, whose rows alternate in memory: written one after the other they take half as long again, as
each page is met several times. Where all of them are rows in plain memory, one call sorts them; `merging` does it for
any memory and for several patches, segment by segment.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels.cpu.ordering import Stretches, in_order
from pulse_rl.patch.live import Copies
from pulse_rl.patch.merging import REACH, Ordered
from pulse_rl.patch.work import Lying
from pulse_rl.weights.bits import HostBits, TorchBits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import derived
from pulse_rl.weights.pieces import pieces_of


def in_memory_order(
    several: Sequence[tuple[Lying, NDArray[np.int64]]], live: Mapping[str, Copies]
) -> list[Ordered] | None:
    """The changes in order, of each width; with those, the elements of each segment.

    live: the tensors, of which no two share memory.

    None where that is not known to be faster: tensors alternate in memory, or changes lie too unevenly.
    """
    pieces = derived(live, _pieces)
    if pieces is None:
        return None
    found: list[Ordered] = []
    for lying, sizes in several:
        if len(lying.indices):
            ordered = _of_width(lying, sizes, pieces)
            if ordered is None:
                return None
            found.append(ordered)
    return found


class _Pieces(NamedTuple):
    """All pieces of live tensors, by their addresses."""

    addresses: NDArray[np.int64]
    ends: NDArray[np.int64]
    memory: list[HostBits | TorchBits]
    names: list[str]


def _pieces(live: Mapping[str, Copies]) -> _Pieces | None:
    """None unless all are plain memory of one device, and no tensor has copies."""
    held = [(name, piece.bits) for name, copies in live.items() for bits in copies for piece in pieces_of(bits)]
    found = [
        (bits.address, name, bits) for name, bits in held if isinstance(bits, HostBits | TorchBits) and bits.contiguous
    ]
    if len(found) < len(held) or any(len(copies) > 1 for copies in live.values()):
        return None
    if len({bits.device for _, _, bits in found}) > 1:
        return None
    found.sort(key=itemgetter(0))
    addresses = np.array([address for address, _, _ in found], np.int64)
    ends = addresses + np.array([bits.size * bits.stored_itemsize for _, _, bits in found], np.int64)
    return _Pieces(addresses, ends, [bits for _, _, bits in found], [name for _, name, _ in found])


def _of_width(lying: Lying, segment_sizes: NDArray[np.int64], pieces: _Pieces) -> Ordered | None:
    """The same for elements of one width, of which some change. segment_sizes: elements of each segment."""
    spots, counts, indices, values = lying
    used, itemsize = np.flatnonzero(counts), values.itemsize
    rows = segment_sizes[used] // spots.runs[used]
    start = spots.addresses[used].view(np.int64)
    end = start + itemsize * ((rows - 1) * spots.apart[used] + spots.runs[used])
    order = np.argsort(start, kind="stable")
    members, start, end = used[order], start[order], np.maximum.accumulate(end[order])
    owners = np.searchsorted(pieces.addresses, start, "right") - 1
    edges = np.flatnonzero(np.append(True, start[1:] >= end[:-1]))  # where memory begins that nothing before reaches
    ends = end[np.append(edges[1:], len(end)) - 1]
    if (owners < 0).any() or (ends > pieces.ends[owners[edges]]).any():
        return None  # a stretch that is no piece's alone
    edges = np.flatnonzero(np.append(True, owners[1:] != owners[:-1]))
    here, ends = owners[edges], end[np.append(edges[1:], len(end)) - 1]
    sizes = (ends - start[edges]) // itemsize
    if (sizes >= REACH).any():
        return None
    stretches = Stretches(members, np.append(edges, len(members)), start[edges], sizes)
    sorted_changes = in_order(spots, stretches, counts, indices, values)
    if sorted_changes is None:
        return None
    stops = np.cumsum(np.add.reduceat(counts[members], edges))
    memory, names = [pieces.memory[at] for at in here], [pieces.names[at] for at in here]
    return Ordered(memory, names, start[edges], np.append(0, stops), Changes(*sorted_changes))
