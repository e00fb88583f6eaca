"""What changed since an older version, from the overlay that holds what was overwritten since.

It stands in for `scan.Scan` where the newest bits lie in plain host memory and the overlay is cut as a patch of them:
then nothing else is looked at.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import OldReader, Read
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.parallel import ordered_map, sliced
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import Laid, Overlay
from pulse_rl.patch.scan import Found
from pulse_rl.patch.segments import CutGroup, Entry, Segments, groups_of
from pulse_rl.patch.table import entries_of
from pulse_rl.patch.targets import locate
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST
from pulse_rl.weights.layout import Layout, derived

AT_ONCE = 1 << 18  # changes that are looked at together


class _Compared(NamedTuple):
    found: Found
    delta: int  # new digest minus old digest
    diff_s: float


class Since:
    """Finds what changed group by group, in the order of a patch of the newest version; adds up what it finds."""

    base, read_s = 0, 0.0  # it looks at no more of the older version than what changed

    def __init__(self, laid: Laid, spots: cpu.Spots) -> None:
        self._laid, self._spots = laid, spots
        self._at = 0  # the first segment of the next group
        self.delta = 0  # new digest minus old digest
        self.diff_s = 0.0  # summed over threads

    @classmethod
    def of(cls, overlay: Overlay, newest: Layout) -> "Since | None":
        """overlay: what the older version held, over the newest. None where only a `Scan` can find what changed."""
        table = derived(newest, entries_of)
        groups = groups_of(table)
        spots, windows = derived(derived(newest, each_alone), locate, table, groups, HOST)[:2]
        plain = bool(((spots.addresses > 0) & (windows.runs == cpu.WHOLE)).all())
        laid = overlay.on([Segments(table, groups)]) if plain else None
        return None if laid is None else cls(laid[0], spots._replace(times=np.ones_like(spots.times)))

    def older(self, group: CutGroup, first: int, read: Read) -> OldReader:
        """Reads the bits of a group's segments in the older version.

        first: the number of the group's first segment. read: reads the newest bits of one of them.
        """
        itemsize = ITEMSIZES[group.dtype]

        def copy(numbers: NDArray[np.int64]) -> MemoryRows:
            sizes, own = group.sizes[numbers // len(group.tensors)], first + numbers
            return self._laid.copy(own, self._spots.of(own), sizes, itemsize)

        return OldReader(lambda number: self._laid.over(first + number, read(number)), copy)

    def find(self, group: CutGroup, entries: Sequence[Entry]) -> Iterator[Found]:
        """The changes of all segments of the next group, in order, of some at a time. entries: its tensors."""
        numbers = np.arange(self._at, self._at + len(group.places) * len(entries))
        self._at += len(numbers)
        held = self._laid.of(numbers, ITEMSIZES[group.dtype])
        for compared in ordered_map(partial(self._compare, numbers, held), sliced(held.counts, AT_ONCE)):
            self.delta += compared.delta
            self.diff_s += compared.diff_s
            yield compared.found

    def _compare(self, numbers: NDArray[np.int64], held: cpu.Elements, some: slice) -> _Compared:
        """Look at some of the segments of these numbers. held: what the older version held of all of them."""
        clock = time.perf_counter()
        begin, counts = int(held.counts[: some.start].sum()), held.counts[some]
        edges = np.append(0, np.cumsum(counts))
        part = slice(begin, begin + int(edges[-1]))
        indices, old = held.indices[part], held.values[part]
        new = np.empty_like(old)
        gained = cpu.spots_delta(self._spots.of(numbers[some]), counts, indices, old, before=new)
        changed = new != old  # an element may have its older bits again
        if not changed.all():
            edges = np.append(0, np.cumsum(changed))[edges]
            indices, old, new = indices[changed], old[changed], new[changed]
        return _Compared(Found(edges, Changes(indices, new), old), -gained, time.perf_counter() - clock)
