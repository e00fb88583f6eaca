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

from pulse_rl.codecs.base import Decoded, OldBits, OldReader, Units
from pulse_rl.dtypes import ITEMSIZES, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.patch.format import Joined, Patch, Span
from pulse_rl.patch.live import Copies, SharedMemory
from pulse_rl.patch.overlay import Laid, Older, Overlay
from pulse_rl.patch.scan import rows_of
from pulse_rl.patch.segments import Segments, Table
from pulse_rl.patch.targets import Located, counters_of, device_of, locate
from pulse_rl.weights import digests
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.host_bits import Counter
from pulse_rl.weights.layout import derived

TOGETHER = 1 << 16  # changes that are worth a task: with fewer, Python takes longer than the kernels
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

    part: Segments  # all of the part
    tensors: Sequence[Tensor]  # of the part
    span: Segments  # that they are from
    units: Units  # of the span
    numbers: NDArray[np.int64]  # which of the part's segments they are
    owners: NDArray[np.int64]  # (segments,) the tensor of each
    sizes: NDArray[np.int64]  # (segments,) elements of each
    changed: int  # how many elements change
    keep: bool  # whether the changes stay in memory from proof to write
    device: Device  # whose kernels reach live memory
    spots: cpu.Spots | None = None  # where what is held of all of them lies there, if that is known
    windows: cpu.Windows | None = None  # which parts of them that is, unless it is all
    old: OldBits | None = None  # the old bits of all of them, if they are used as they lie
    laid: Laid | None = None  # what counts as if memory held it already
    changes: list[Decoded] | None = None  # while they are in memory
    written: bool = False
    lock: Lock = field(default_factory=Lock)  # a repeated write waits for what still runs of the first

    def decode(self) -> list[Decoded]:
        """The changes."""
        reader = OldReader(self._read)
        if self.laid is not None and self.windows is None:
            reader = OldReader(self._read, self._copy, self.device)
        return self.units.decode(self.numbers - self.span.numbers.start, reader, self.old)

    def _read(self, place: int) -> UIntArray:
        number = int(self.numbers[place])
        tensor, box = self.part.place(number)
        rows = rows_of(self.tensors[tensor].before[0], box)
        return rows if self.laid is None else self.laid.over(number, rows)

    def _copy(self, places: NDArray[np.int64]) -> MemoryRows:
        """The old bits of some of them, of one dtype."""
        assert self.laid is not None
        assert self.spots is not None
        itemsize = ITEMSIZES[self.part.table[int(self.owners[places[0]])].dtype]
        laid = self.laid.of(self.numbers[places], itemsize)
        return self.device.copy_spots(self.spots.of(places), self.sizes[places], laid)

    def laid_at(self, some: slice, itemsize: int) -> cpu.Elements | None:
        """What counts as if memory held it already, of what is held of some of them, all of one width."""
        if self.laid is None:
            return None
        elements = self.laid.of(self.numbers[some], itemsize)
        return elements if self.windows is None else cpu.windowed(self.windows.of(some), *elements)

    def each(self, decoded: Sequence[Decoded]) -> Iterator[tuple[Tensor, Box, Changes]]:
        """The changes of each segment that changes, with its tensor and its place."""
        several = (changes for one in decoded for changes in one.each())
        for number, changes in zip(self.numbers.tolist(), several, strict=True):
            if len(changes.indices):
                tensor, place = self.part.place(number)
                yield self.tensors[tensor], place, changes

    def counted(self) -> Iterator[Counter]:
        """Who counts the writes to the tensors that change, while the changes are in memory."""
        if not self.changes:
            return
        changing = np.concatenate([found.counts for found in self.changes]) > 0
        for number in np.unique(self.owners[changing]).tolist():
            yield from counters_of(self.tensors[number].live)


def runs(works: Iterable[Work]) -> Iterator[list[Work]]:
    """Works that are checked, or written, at once: several on a device if they lie there; otherwise each alone.

    A patch has thousands of spans, and each call of a device's kernels has the host wait several times.
    """
    run, changed = list[Work](), 0
    for work in works:
        joins = work.device is not HOST and run and work.spots is not None and run[-1].spots is not None
        if run and not (joins and changed < ON_DEVICE):
            yield run
            run, changed = [], 0
        run.append(work)
        changed += work.changed
    if run:
        yield run


class Lying(NamedTuple):
    """Changes of one width, and where the segments that they are of lie."""

    spots: cpu.Spots
    counts: NDArray[np.int64]  # (segments,) of what is held of each
    indices: NDArray[np.uint32]  # (k,) of all
    values: UIntArray  # (k,)


class Parts(NamedTuple):
    """Segments of several works."""

    several: list[tuple[Work, slice]]

    def tensor(self, number: int) -> Tensor:
        """The tensor of one of them."""
        for work, some in self.several:
            if number < some.stop - some.start:
                return work.tensors[int(work.owners[some.start + number])]
            number -= some.stop - some.start
        raise IndexError(number)

    def sizes(self) -> NDArray[np.int64]:
        """Elements of what is held of each."""
        found = []
        for work, some in self.several:
            sizes = work.sizes[some]
            if work.windows is not None:
                windows = work.windows.of(some)
                sizes = np.where(windows.runs == cpu.WHOLE, sizes, windows.rows * windows.runs)
            found.append(sizes)
        return np.concatenate(found)

    def laid(self, itemsize: int) -> cpu.Elements | None:
        """What counts as if memory held it already; None for nothing. itemsize: of the elements."""
        found = [work.laid_at(some, itemsize) for work, some in self.several]
        several = [elements for elements in found if elements is not None]
        return cpu.Elements(*map(np.concatenate, zip(*several, strict=True))) if several else None


def joined(run: Sequence[Work], decoded: Sequence[Sequence[Decoded]]) -> list[tuple[Lying, Parts]]:
    """The changes of works whose spots are known, by width."""
    found: dict[int, tuple[list[Lying], list[tuple[Work, slice]]]] = {}
    for work, several in zip(run, decoded, strict=True):
        at = 0
        for counts, changes in several:
            some, held = slice(at, at + len(counts)), (counts, *changes)
            assert work.spots is not None
            if work.windows is not None:
                held = cpu.windowed(work.windows.of(some), *held)
            lying, parts = found.setdefault(changes.values.itemsize, ([], []))
            lying.append(Lying(work.spots.of(some), *held))
            parts.append((work, some))
            at = some.stop
    return [(_as_one(lying), Parts(parts)) for lying, parts in found.values()]


def _as_one(several: Sequence[Lying]) -> Lying:
    if len(several) == 1:
        return several[0]
    spots, *changes = zip(*several, strict=True)
    return Lying(
        cpu.Spots._make(map(np.concatenate, zip(*spots, strict=True))), *(np.concatenate(each) for each in changes)
    )


def plan(
    parts: Sequence[Patch],
    live: Mapping[str, Copies],
    before: Older | None,
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
    overlay = before.overlay() if before is not None and not shared and not overlapping else None
    several = None if overlay is None else overlay.on([part.segments for part in parts])
    for number, part in enumerate(parts):
        laid = None if several is None else several[number]
        # A unit decodes against old bits that are gone once another name of the same memory is written: keep all.
        keep_all = bool(part.codec.conditional and (shared or overlapping))
        counts, sizes, owners = part.segments.counts, part.segments.sizes(), part.segments.tensors()
        nbytes = counts * part.segments.change_nbytes()
        lying = derived(live, locate, part.table, device)
        changing = counts > 0
        # Where the old bits are: in live memory, but for what is laid over it.
        here = before is None or (laid is not None and lying.known(changing))
        if here:
            tensors = derived(live, _tensors, part.table)
        else:
            assert before is not None
            tensors, laid = _tensors(live, part.table, before.by_name()), None
        joined: Joined | None = partial(_few, lying.held & changing, counts)
        if part.codec.conditional:  # a device decodes as many at once as it can
            joined = partial(_usable, lying, changing) if here and device is not HOST else None
        for span, units in part.opened(joined):
            first, stop = span.numbers.start, span.numbers.stop
            here_too = lying.held[first:stop] & changing[first:stop]
            needed = np.logical_or.reduceat(here_too, np.cumsum(units.sizes) - units.sizes)
            numbers = first + np.flatnonzero(np.repeat(needed, units.sizes))
            if not len(numbers):
                continue
            some = slice(first, stop) if len(numbers) == stop - first else numbers
            budget -= int(nbytes[some].sum())
            changed = int(counts[some].sum(dtype=np.int64))
            work = Work(
                part=part.segments,
                tensors=tensors,
                span=span,
                units=units,
                numbers=numbers,
                owners=owners[some],
                sizes=sizes[some],
                changed=changed,
                keep=keep_all or budget >= 0,
                device=device,
                laid=laid,
            )
            if here:
                windows = lying.windows.of(some)
                if lying.known(changing, some):
                    work.spots = lying.spots.of(some)
                    work.windows = None if (windows.runs == cpu.WHOLE).all() and windows.rows.all() else windows
                if laid is None and lying.old.usable[some].all():
                    work.old = lying.old.of(some)
            yield work


def held_of(
    overlay: Overlay, parts: Sequence[Patch], live: Mapping[str, Copies]
) -> list[tuple[Lying, NDArray[np.int64]]] | None:
    """What an overlay of the parts of a patch has of live memory: of each width, with the elements of each segment.

    None where it is cut otherwise, or where a process holds less than a whole segment of it, or not in plain memory.
    """
    several, device = overlay.on([part.segments for part in parts]), derived(live, device_of)
    if several is None or device is not HOST:
        return None
    found: list[tuple[Lying, NDArray[np.int64]]] = []
    for part, laid in zip(parts, several, strict=True):
        lying = derived(live, locate, part.table, device)
        whole = (lying.windows.runs == cpu.WHOLE) & (lying.spots.addresses > 0)
        for width, (edges, *_) in laid.columns.items():
            numbers = np.flatnonzero((edges[1:] > edges[:-1]) & (lying.windows.rows > 0))
            if not whole[numbers].all():
                return None
            changes = Lying(lying.spots.of(numbers), *laid.of(numbers, width))
            found.append((changes, part.segments.sizes()[numbers]))
    return found


def _few(changing: NDArray[np.bool_], counts: NDArray[np.uint32], run: Sequence[Span], other: Span) -> bool:
    """Whether a span is decoded with those before it: these have few changes, and both some.

    changing: which segments change in what is held.
    """
    first, last, after = run[0].segments.numbers, run[-1].segments.numbers, other.segments.numbers
    few = counts[first.start : last.stop].sum() < TOGETHER
    return bool(few and all(changing[each.start : each.stop].any() for each in (last, after)))


def _usable(lying: Located, changing: NDArray[np.bool_], run: Sequence[Span], other: Span) -> bool:
    """Whether a span is decoded with those before it: kernels use the old bits of all that they change as they lie."""
    at = slice(run[-1].segments.numbers.start, other.segments.numbers.stop)
    return bool(lying.old.usable[at][lying.held[at] & changing[at]].all())


def _tensors(live: Mapping[str, Copies], table: Table, before: Mapping[str, Copies] | None = None) -> list[Tensor]:
    before = live if before is None else before
    return [
        Tensor(name, shape, digests.seed(name, dtype, shape), live.get(name, ()), before.get(name, ()))
        for name, dtype, shape, _ in table
    ]
