"""What changed, where it is known which elements may have: then nothing else is looked at.

Both classes stand in for `scan.Scan`, where the newest bits lie in plain memory of one device. `Since` finds what
changed since an older version, whose bits only the overlay holds that was kept of what was overwritten since. `Known`
finds what changed since a version whose bits lie in other memory, as those of a view's baseline.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import OldReader, Read
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.parallel import ordered_map, sliced
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import Laid, Overlay, PatchSection
from pulse_rl.patch.scan import Scan
from pulse_rl.patch.segments import CutGroup, Segments
from pulse_rl.patch.table import entries_of
from pulse_rl.patch.targets import device_of, locate
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes, Found, SectionChanges
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.layout import Layout, derived

AT_ONCE = 1 << 18  # changes that are looked at together
ON_DEVICE = 1 << 22  # the same on a device: each call takes the host some milliseconds


class Since:
    """Finds what changed group by group, in the order of a patch of the newest version."""

    def __init__(self, laid: Laid, lying: "_Lying") -> None:
        self._laid, self._lying = laid, lying

    @classmethod
    def of(cls, overlay: Overlay, newest: Layout) -> "Since | None":
        """overlay: what the older version held, over the newest. None where only a `Scan` can find what changed."""
        table, lying = derived(newest, entries_of), _lying(newest)
        laid = overlay.on([Segments(table)]) if lying is not None else None
        return None if laid is None or lying is None else cls(laid[0], lying)

    def older(self, group: CutGroup, first: int, read: Read) -> OldReader:
        """Reads the bits of a group's segments in the older version.

        first: the number of the group's first segment. read: reads the newest bits of one of them.
        """
        itemsize = ITEMSIZES[group.dtype]

        def copy(numbers: NDArray[np.int64]) -> MemoryRows:
            sizes, own = group.sizes[numbers // len(group.tensors)], first + numbers
            return self._lying.device.copy_spots(self._lying.spots.of(own), sizes, self._laid.of(own, itemsize))

        return OldReader(lambda number: self._laid.over(first + number, read(number)), copy, self._lying.device)

    def find(self, one: PatchSection) -> Iterator[Found]:
        """The changes of all segments of a group, in order, of some at a time."""
        held = self._laid.of(np.arange(one.numbers.start, one.numbers.stop), one.itemsize)
        return self._lying.of(one).compare(held)


class _Lying(NamedTuple):
    """Where segments of a patch are."""

    spots: cpu.Spots
    device: Device

    def of(self, one: PatchSection) -> "_Lying":
        return self._replace(spots=self.spots.of(one.numbers))

    def compare(self, held: cpu.Elements) -> Iterator[Found]:
        """Look at elements of which it is known what an older version held, of some segments at a time."""

        def compare(some: slice) -> Found:
            clock = time.perf_counter()
            begin, counts = int(held.counts[: some.start].sum()), held.counts[some]
            edges = np.append(0, np.cumsum(counts))
            part = slice(begin, begin + int(edges[-1]))
            indices, old = held.indices[part], held.values[part]
            new = np.empty_like(old)
            gained = self.device.spots_delta(self.spots.of(some), counts, indices, old, before=new)
            changed = new != old  # an element may have its older bits again
            if not changed.all():
                edges = np.append(0, np.cumsum(changed))[edges]
                indices, old, new = indices[changed], old[changed], new[changed]
            return Found(edges, Changes(indices, new), old, -gained, time.perf_counter() - clock)

        return ordered_map(compare, sliced(held.counts, AT_ONCE if self.device is HOST else ON_DEVICE))


def _lying(tensors: Layout) -> _Lying | None:
    """Where the segments of a patch of these tensors lie; None unless all of them are plain memory of one device."""
    table, live = derived(tensors, entries_of), derived(tensors, each_alone)
    device = derived(live, device_of)
    found = derived(live, locate, table, device)
    spots = found.spots._replace(times=np.ones_like(found.spots.times))
    return _Lying(spots, device) if found.plain.all() else None


class Known(Scan):
    """Compares two states of weights as a Scan does, but where it is known which elements may differ only these.

    known: of some sections, what old holds of these elements.
    """

    def __init__(self, old: Mapping[str, Bits], new: Layout, known: Sequence[SectionChanges]) -> None:
        super().__init__(old, new, derived(new, entries_of), digest_old=False)
        self._lying = _lying(new)
        self._known = {(one.names, one.places): cpu.Elements(one.counts, *one.changes) for one in known}

    def find(self, one: PatchSection) -> Iterator[Found]:
        held = self._known.get((one.section.names, one.section.places))
        if held is None or self._lying is None:
            return super().find(one)
        return self._lying.of(one).compare(held)
