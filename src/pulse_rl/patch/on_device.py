"""What differs between two states of weights that lie on one device, found there: only the changes come to the host.

A call searches many segments, in the order in which a patch codes them, so nothing is left to be sorted.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.kernels import cpu
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import PatchSection
from pulse_rl.patch.segments import Entry
from pulse_rl.patch.targets import device_for, locate
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.changes import Changes, Found
from pulse_rl.weights.devices import Cuda, Device
from pulse_rl.weights.layout import derived
from pulse_rl.weights.pieces import pieces_of

AT_ONCE = 1 << 28  # elements that are searched in a call; the bits that lead to what changed take 32 MB
SPARSE = 64  # elements for each change that a first call has room for


def differing(
    one: PatchSection,
    table: Sequence[Entry],
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    held_nbytes: int,
    *,
    digest_old: bool,
) -> Iterator[Found] | None:
    """The changes of all segments of a group, in order; None unless all of it lies on one device, as rows.

    table: of all tensors. held_nbytes: how much memory the changes of a call should take.
    """
    if not derived(new, _has_any):
        return None
    device = derived(new, _device_of, one.entries)
    if not isinstance(device, Cuda):
        return None
    before, after = (derived(state, _rows_on, table, one, device) for state in (old, new))
    if before is None or after is None:
        return None
    cast, sizes = after.itemsize != one.itemsize, np.repeat(one.group.sizes, len(one.entries))
    return _search(device, before.spots, after.spots, sizes, one.itemsize, cast, held_nbytes, digest_old)


def _has_any(tensors: Mapping[str, Bits]) -> bool:
    """Whether any tensors lie on a device."""
    return any(
        isinstance(piece.bits, TorchBits) and piece.bits.device is not None
        for tensor in tensors.values()
        for piece in pieces_of(tensor)
    )


def _device_of(tensors: Mapping[str, Bits], entries: Sequence[Entry]) -> Device:
    """The device on which most elements of a group lie."""
    return device_for(tensors[entry.name] for entry in entries)


class _Rows(NamedTuple):
    """Where the segments of a group lie, each as rows on one device."""

    spots: cpu.Spots
    itemsize: int  # bytes of an element in memory


def _rows_on(tensors: Mapping[str, Bits], table: Sequence[Entry], one: PatchSection, device: Device) -> _Rows | None:
    """None unless all of a group lies on this device, in elements of one width."""
    stored = {
        bits.stored_itemsize
        for entry in one.entries
        for _, bits, _ in pieces_of(tensors[entry.name])
        if isinstance(bits, HostBits | TorchBits)
    }
    if len(stored) != 1:
        return None
    spots, windows, *_ = derived(derived(tensors, each_alone), locate, table, device)
    spots = spots.of(one.numbers)
    if not (spots.addresses > 0).all() or (windows.runs[one.numbers] != cpu.WHOLE).any():
        return None
    return _Rows(spots, *stored)


def _search(
    device: Cuda,
    old: cpu.Spots,
    new: cpu.Spots,
    sizes: NDArray[np.int64],
    itemsize: int,
    cast: bool,
    held_nbytes: int,
    digest_old: bool,
) -> Iterator[Found]:
    searched = changed = at = 0
    ends = np.cumsum(sizes)
    while at < len(sizes):
        density = changed / searched if searched else 1 / SPARSE
        elements = min(AT_ONCE, int(held_nbytes / max(density * (4 + 2 * itemsize), 1e-9)))
        end = max(at + 1, int(np.searchsorted(ends, searched + elements, "right")))
        here = range(at, end)
        clock = time.perf_counter()
        before, after, mine = old.of(here), new.of(here), sizes[at:end]
        most = 1024 + int(mine.sum() * min(1.0, 2 * density))
        found = device.find(before, after, mine, itemsize, most, cast=cast)
        base = device.digest(before, mine, itemsize) if digest_old else 0
        seconds = time.perf_counter() - clock
        changes = Changes(found.indices, found.values)
        yield Found(found.edges, changes, found.replaced, found.delta, seconds, base=base)
        searched, changed, at = int(ends[end - 1]), changed + len(found.indices), end
