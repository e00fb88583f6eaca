"""The work of a patch: segments that are decoded together, where they lie in live memory, and which of them are kept.

Only what touches live memory is decoded. `plan` finds that out without decoding; `apply` proves and writes it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import OldBits, Units, consecutive
from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.patch.format import Patch, Span
from pulse_rl.patch.live import Copies, SharedMemory, shared_memory
from pulse_rl.patch.scan import rows_of
from pulse_rl.patch.segments import Group, Segment, Segments, Table
from pulse_rl.patch.targets import device_of, holds, lines, spots_of
from pulse_rl.weights import digests
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.layout import derived

ON_DEVICE = 1 << 20  # changes after which a device is called: each call takes the host about a millisecond


class Tensor(NamedTuple):
    """A tensor of the patch and the live memory behind it."""

    name: str
    shape: tuple[int, ...]
    seed: int  # of its digest
    live: Copies
    before: Copies  # the same tensors as they are when the patch is written


@dataclass(slots=True)
class Work:
    """Segments that are decoded together: decoded to be proved, then decoded again to be written, unless kept."""

    segments: list[Segment]
    tensors: Sequence[Tensor]  # of the part, by its segments' numbers
    units: Units  # of the span that they are from
    numbers: list[int]  # of these units, which of them
    keep: bool  # whether the changes stay in memory from proof to write
    device: Device  # whose kernels reach live memory
    spots: cpu.Spots | None = None  # where what is held of all of them lies there, if that is known
    windows: cpu.Windows | None = None  # which parts of them that is, unless it is all
    old: OldBits | None = None  # the old bits of all of them, if they are used as they lie
    changes: list[Changes] | None = None  # of each segment, while they are in memory
    written: bool = False
    lock: Lock = field(default_factory=Lock)  # a repeated write waits for what still runs of the first

    def decode(self) -> list[Changes]:
        """The changes of each segment."""
        reads = [partial(self._read, segment) for segment in self.segments]
        return self.units.decode(self.numbers, reads, self.old)

    def _read(self, segment: Segment) -> UIntArray:
        return rows_of(self.tensors[segment.tensor].before[0], segment.place)

    def joined(self, changes: Sequence[Changes]) -> tuple[NDArray[np.int64], NDArray[np.uint32], UIntArray]:
        """The changes of what is held as one: how many there are of each segment, all indices, and all values."""
        counts = np.array([len(one.indices) for one in changes], np.int64)
        indices, values = zip(*changes, strict=True)
        found = counts, np.concatenate(indices), np.concatenate(values)
        return found if self.windows is None else cpu.windowed(self.windows, *found)

    @property
    def width(self) -> int | None:
        """Bytes of an element, if all lie plainly."""
        return None if self.spots is None else self.segments[0].spec.itemsize

    @property
    def changed(self) -> int:
        """How many elements change."""
        return sum(segment.spec.changed for segment in self.segments)


def runs(works: Iterable[Work]) -> Iterator[list[Work]]:
    """Works that one call checks, or writes: several on a device if they lie there in one width; otherwise each alone.

    A patch has thousands of spans, and each call of a device's kernels has the host wait several times.
    """
    run, changed = list[Work](), 0
    for work in works:
        joins = work.device is not HOST and run and work.width is not None and work.width == run[-1].width
        if run and not (joins and changed < ON_DEVICE):
            yield run
            run, changed = [], 0
        run.append(work)
        changed += work.changed
    if run:
        yield run


def joined(
    run: Sequence[Work], decoded: Sequence[Sequence[Changes]]
) -> tuple[cpu.Spots, NDArray[np.int64], NDArray[np.uint32], UIntArray]:
    """Where the segments of a run lie, and their changes as `Work.joined` gives them."""
    spots = [work.spots for work in run if work.spots is not None]
    counts, indices, values = zip(
        *(work.joined(changes) for work, changes in zip(run, decoded, strict=True)), strict=True
    )
    if len(run) == 1:
        return spots[0], counts[0], indices[0], values[0]
    where = cpu.Spots(*map(np.concatenate, zip(*spots, strict=True)))
    return where, np.concatenate(counts), np.concatenate(indices), np.concatenate(values)


def plan(
    parts: Sequence[Patch],
    live: Mapping[str, Copies],
    before: Mapping[str, Copies],
    keep_nbytes: float,
    shared: SharedMemory,
    *,
    overlapping: bool,
) -> Iterator[Work]:
    """The spans of a patch in order; those whose changes fit into the budget are kept.

    live, before, keep_nbytes: as for `Application`. shared, overlapping: of the live tensors.
    """
    budget = keep_nbytes
    device = derived(live, device_of)
    for part in parts:
        tensors = derived(live, _tensors, part.table) if before is live else _tensors(live, part.table, before)
        # A unit decodes against old bits that are gone once another name of the same memory is written: keep all.
        keep_all = bool(part.codec.conditional and (shared or overlapping))
        counts, change_nbytes = part.segments.counts, part.segments.change_nbytes()
        lying = None
        if before is live:
            lying = derived(live, _lying, part.table, part.segments.groups, device)._replace(counts=counts)
        together = device is not HOST and part.codec.conditional  # a device decodes as many at once as it can
        for span, segments, units in part.opened(lying.joined if lying and together else None):
            work = Work([], tensors, units, [], keep_all, device)
            held: list[int] = []
            at = span.segments.numbers.start
            for number, members in enumerate(consecutive(segments, units.sizes)):
                if any(_holds(tensors[segment.tensor], segment) for segment in members):
                    work.numbers.append(number)
                    work.segments += members
                    held += range(at, at + len(members))
                at += len(members)
            if not held:
                continue
            widths, mine = change_nbytes[held], counts[held]
            budget -= int((mine * widths).sum())
            work.keep |= budget >= 0
            if lying is not None:
                spots, windows = lying.spots.of(held), lying.windows.of(held)
                if (widths == widths[0]).all() and ((spots.addresses > 0) | (windows.rows == 0) | (mine == 0)).all():
                    work.spots = spots
                    work.windows = None if (windows.runs == cpu.WHOLE).all() and windows.rows.all() else windows
                if lying.usable[held].all():
                    work.old = lying.old.of(held)
            yield work


class _Lying(NamedTuple):
    """Where the segments of a part lie in live memory."""

    spots: cpu.Spots
    windows: cpu.Windows
    old: OldBits
    usable: NDArray[np.bool_]  # (segments,) whether kernels use the old bits as they lie
    widths: NDArray[np.int64]  # (segments,) bytes of a change; 0 where none is held
    counts: NDArray[np.uint32]  # (segments,) changes

    def joined(self, one: Span, other: Span) -> bool:
        """Whether two spans are decoded together: all that they change lies so, and has one width."""
        at = slice(one.segments.numbers.start, other.segments.numbers.stop)
        widths = np.where(self.counts[at] > 0, self.widths[at], 0)
        changes = widths > 0
        return len(set(widths[changes].tolist())) == 1 and bool(self.usable[at][changes].all())


def _tensors(live: Mapping[str, Copies], table: Table, before: Mapping[str, Copies] | None = None) -> list[Tensor]:
    before = live if before is None else before
    return [
        Tensor(name, shape, digests.seed(name, dtype, shape), live.get(name, ()), before.get(name, ()))
        for name, dtype, shape, _ in table
    ]


def _lying(live: Mapping[str, Copies], table: Table, groups: Sequence[Group], device: Device) -> _Lying:
    segments = Segments(table, groups)
    shared = {name for pair in derived(live, shared_memory) for name in pair}
    spots, windows = spots_of(segments, [digests.seed(*entry[:3]) for entry in table], live, shared, device)
    nbytes = segments.change_nbytes()
    memory, usable = lines(spots, windows, segments.sizes(), nbytes - 4, device, None)  # `Work.tensors` keep it
    return _Lying(
        spots, windows, OldBits(memory, device), usable, np.where(windows.rows > 0, nbytes, 0), segments.counts
    )


def _holds(tensor: Tensor, segment: Segment) -> bool:
    return bool(segment.spec.changed and tensor.live) and holds(tensor.live[0], segment.place)
