"""What differs between two states of weights that lie on one device, found there: only the changes come to the host.

A call searches many segments, in the order in which a patch codes them, so nothing is left to be sorted. Where they lie
is found here for host memory, too.
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
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes, Found
from pulse_rl.weights.devices import Cuda, Device
from pulse_rl.weights.layout import derived

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
    device = derived(new, _device_of, one.entries)
    if not isinstance(device, Cuda):
        return None
    lying = lying_on(one, table, old, new, device)
    return None if lying is None else _search(lying, held_nbytes, digest_old)


def _device_of(tensors: Mapping[str, Bits], entries: Sequence[Entry]) -> Device:
    """The device on which most elements of a group lie."""
    return device_for(tensors[entry.name] for entry in entries)


class LyingStates(NamedTuple):
    """Where parts of tensors lie in two states, each as rows on one device."""

    device: Device
    old: cpu.Spots
    new: cpu.Spots
    sizes: NDArray[np.int64]  # (parts,) elements of each
    itemsize: int
    cast: bool  # whether the new elements are float32, compared as bfloat16

    def compare(self, some: slice, *, most: int = 0, digest_old: bool) -> Found:
        """Find the changes of some parts, and what they do to the digest. most: as for `Device.find`."""
        clock = time.perf_counter()
        before, sizes = self.old.of(some), self.sizes[some]
        found = self.device.find(before, self.new.of(some), sizes, self.itemsize, most, cast=self.cast)
        base = self.device.digest(before, sizes, self.itemsize) if digest_old else 0
        changes, seconds = Changes(found.indices, found.values), time.perf_counter() - clock
        return Found(found.edges, changes, found.replaced, found.delta, seconds, base=base)


class _Rows(NamedTuple):
    """Where the segments of a group lie, each as rows on one device."""

    spots: cpu.Spots
    itemsize: int  # bytes of an element in memory


def lying_on(
    one: PatchSection, table: Sequence[Entry], old: Mapping[str, Bits], new: Mapping[str, Bits], device: Device
) -> LyingStates | None:
    """Where the segments of a group lie in both states; None unless all of it is rows on this device."""
    before, after = (derived(state, _rows_on, table, one, device) for state in (old, new))
    if before is None or after is None or before.itemsize != one.itemsize:
        return None
    sizes = np.repeat(one.group.sizes, len(one.entries))
    return LyingStates(device, before.spots, after.spots, sizes, one.itemsize, after.itemsize != one.itemsize)


def _rows_on(tensors: Mapping[str, Bits], table: Sequence[Entry], one: PatchSection, device: Device) -> _Rows | None:
    """None unless all of a group lies on this device, in elements of one width."""
    found = derived(derived(tensors, each_alone), locate, table, device)
    spots, itemsizes = found.spots.of(one.numbers), np.unique(found.stored[one.numbers])
    whole = (spots.addresses > 0).all() and (found.windows.runs[one.numbers] == cpu.WHOLE).all()
    return _Rows(spots, int(itemsizes[0])) if whole and len(itemsizes) == 1 else None


def _search(lying: LyingStates, held_nbytes: int, digest_old: bool) -> Iterator[Found]:
    searched = changed = at = 0
    ends = np.cumsum(lying.sizes)
    while at < len(ends):
        density = changed / searched if searched else 1 / SPARSE
        elements = min(AT_ONCE, int(held_nbytes / max(density * (4 + 2 * lying.itemsize), 1e-9)))
        end = max(at + 1, int(np.searchsorted(ends, searched + elements, "right")))
        most = 1024 + int((ends[end - 1] - searched) * min(1.0, 2 * density))
        found = lying.compare(slice(at, end), most=most, digest_old=digest_old)
        yield found
        searched, changed, at = int(ends[end - 1]), changed + len(found.replaced), end
