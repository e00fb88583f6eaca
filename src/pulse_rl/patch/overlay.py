"""An older version of weights, read as the newest bits with the overwritten elements laid over them.

A publisher holds the newest bits only, and keeps what each publish overwrites in an overlay. Of an element that is
overwritten several times the oldest value stays, so an older version can be read segment by segment and a patch be made
from it. An overlay lies in unlinked temporary files, mapped: the system can take their memory back when it runs short.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.disk import map_open_file
from pulse_rl.dtypes import ITEMSIZES, UINTS, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.patch.laid_over import laid_over
from pulse_rl.patch.segments import CutGroup, Entry, Segments
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes, SectionChanges
from pulse_rl.weights.layout import Layout, derived

MERGED = 1 << 20  # elements of overlays that are merged at once, in memory


class Replaced(NamedTuple):
    """Elements of one part of a tensor that were overwritten, with the bits that they held before."""

    name: str  # of the tensor
    place: Box  # the part, which the indices count in
    old: Changes


class Older(NamedTuple):
    """Weights as they were, or will be: live ones with elements laid over them.

    overlay: gives these elements; None where they are not known in one, or lie in memory that was added.
    by_name: gives the tensors, to be read only, wherever they lie.
    """

    overlay: Callable[[], "Overlay | None"]
    by_name: Callable[[], Mapping[str, Sequence[Bits]]]


class Section(NamedTuple):
    """Parts of tensors: the same places of each, place by place, and of each place tensor by tensor."""

    names: tuple[str, ...]
    places: Sequence[Box]


class PatchSection(NamedTuple):
    """A section that is a group of a patch's segments, in their order."""

    group: CutGroup
    first: int  # the number of its first segment
    section: Section
    entries: Sequence[Entry]  # of its tensors

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZES[self.group.dtype]

    @property
    def numbers(self) -> slice:
        """Which of the patch's segments are its own."""
        return slice(self.first, self.first + len(self.section.names) * len(self.section.places))


def sections_of(table: Sequence[Entry]) -> list[PatchSection]:
    """The groups of a patch that have segments."""
    return derived(table, _sections)


def _sections(table: Sequence[Entry]) -> list[PatchSection]:
    found = []
    for first, group in Segments(table).each_group():
        entries = [table[at] for at in group.tensors]
        found.append(PatchSection(group, first, Section(tuple([one.name for one in entries]), group.places), entries))
    return found


class Laid(NamedTuple):
    """What an overlay holds of the segments of a patch, or of a part of one."""

    columns: Mapping[int, tuple[NDArray[np.int64], NDArray[np.uint32], UIntArray]]  # by width; edges: (segments + 1,)

    def of(self, numbers: NDArray[np.int64], itemsize: int) -> cpu.Elements:
        """What it holds of some segments, ascending, of elements of one width."""
        if itemsize not in self.columns:
            return cpu.Elements(0 * numbers, np.empty(0, np.uint32), np.empty(0, UINTS[itemsize]))
        edges, indices, values = self.columns[itemsize]
        begins = edges[numbers]
        counts = edges[numbers + 1] - begins
        at: slice | NDArray[np.int64] = slice(0, 0)
        if len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1:
            at = slice(begins[0], begins[-1] + counts[-1])
        elif len(numbers):
            at = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return cpu.Elements(counts, indices[at], values[at])

    def over(self, number: int, rows: UIntArray) -> UIntArray:
        """The elements of a segment with what it holds of them. rows: as `codecs.base.Read` gives them. (size,)"""
        _, indices, values = self.of(np.array([number]), rows.itemsize)
        if len(indices):
            rows = rows.flatten()
            cpu.scatter(rows, indices, values)
        return rows


class _Column(NamedTuple):
    """All elements of one width that an overlay holds, part by part."""

    sections: list[Section]
    edges: NDArray[np.int64]  # (parts + 1,): where those of each part begin, and the last one's end
    indices: NDArray[np.uint32]
    values: UIntArray

    def parts(self) -> Iterator[Replaced]:
        edges = self.edges.tolist()
        parts = ((name, place) for names, places in self.sections for place in places for name in names)
        for (name, place), a, b in zip(parts, edges, edges[1:], strict=False):
            yield Replaced(name, place, Changes(self.indices[a:b], self.values[a:b]))


class Recorder:
    """Makes an overlay of what is added to it, in temporary files. To be entered, and left.

    A full disk fails no call but `overlay`. most_nbytes: of elements and indices; an overlay that takes more is none.
    """

    def __init__(self, most_nbytes: float = math.inf) -> None:
        self._left = most_nbytes
        self._files = ExitStack()
        self._widths: dict[int, _Files] = {}
        self._failed: OSError | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what a full disk did not take is written once more here
            self._files.close()

    def add(self, sections: Sequence[Section], counts: NDArray[np.int64], old: Changes) -> None:
        """Add the elements of parts: counts of each part, then all of them. Parts come in the order of all sections.

        Each part of a tensor is added at most once.
        """
        self._left -= old.indices.nbytes + old.values.nbytes
        if self._failed is not None or self._left < 0:
            return
        try:
            files = self._widths.get(old.values.itemsize)
            if files is None:
                enter = self._files.enter_context
                files = _Files(enter(_temporary()), enter(_temporary()), [], [])
                self._widths[old.values.itemsize] = files
            files.indices.write(old.indices.data)
            files.values.write(old.values.data)
            files.sections.extend(sections)
            files.counts.append(counts)
        except OSError as error:
            self._failed = error

    def overlay(self) -> "Overlay | None":
        """What was added; None if it is too much. Raises OSError if there was no room for it."""
        return Overlay(self.columns()) if self._left >= 0 else None

    def columns(self) -> Mapping[int, _Column]:
        """What was added, by the width of elements. Raises OSError if there was no room for it."""
        if self._failed is not None:
            raise self._failed
        return {width: files.column(UINTS[width]) for width, files in self._widths.items()}


def _temporary() -> BinaryIO:
    return tempfile.TemporaryFile(prefix="pulse-rl-")


class _Files(NamedTuple):
    """What was added of one width."""

    indices: BinaryIO
    values: BinaryIO
    sections: list[Section]
    counts: list[NDArray[np.int64]]

    def column(self, dtype: np.dtype[np.unsignedinteger]) -> _Column:
        self.indices.flush()
        self.values.flush()
        edges = np.concatenate([[0], np.cumsum(np.concatenate(self.counts))])
        indices = np.frombuffer(map_open_file(self.indices), np.uint32)
        return _Column(self.sections, edges, indices, np.frombuffer(map_open_file(self.values), dtype))


class Overlay:
    """The bits that elements held at some older version, for all that changed since.

    Takes 4 bytes for each element's index, and the element. columns: what a Recorder has, by the width of elements.
    """

    def __init__(self, columns: Mapping[int, _Column]) -> None:
        self._columns = columns

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(column.indices.nbytes + column.values.nbytes for column in self._columns.values())

    def and_later(self, *later: "Overlay") -> "Overlay":
        """This overlay and later ones, in order, as one: where several hold an element, the oldest bits stay.

        Raises OSError if there is no room for the files.
        """
        overlays = [self, *later]
        with Recorder() as recorder:
            for width in dict.fromkeys(width for overlay in overlays for width in overlay._columns):
                first, *others = [one._columns[width] for one in overlays if width in one._columns]
                if others:
                    _add_union(recorder, [first, *others])
                else:
                    recorder.add(first.sections, np.diff(first.edges), Changes(first.indices, first.values))
            return Overlay(recorder.columns())

    def replaced(self) -> Iterator[Replaced]:
        """All elements that it holds, part by part."""
        for column in self._columns.values():
            yield from column.parts()

    def sections(self) -> Iterator[SectionChanges]:
        """The same, section by section."""
        for sections, edges, indices, values in self._columns.values():
            at = 0
            for names, places in sections:
                end = at + len(names) * len(places)
                own = slice(edges[at], edges[end])
                changes = Changes(indices[own], values[own])
                yield SectionChanges(names, places, np.diff(edges[at : end + 1]), changes)
                at = end

    def on(self, several: Sequence[Segments]) -> list[Laid] | None:
        """What it holds by the segments of the parts of a patch; None where these are cut otherwise."""
        found: list[dict[int, tuple[NDArray[np.int64], NDArray[np.uint32], UIntArray]]] = [{} for _ in several]
        for width, (sections, edges, indices, values) in self._columns.items():
            left, counts, at = iter(sections), np.diff(edges), 0
            for segments, columns in zip(several, found, strict=True):
                begun, own = edges[at], np.zeros(len(segments.counts), np.int64)
                for one in sections_of(segments.table):
                    if one.itemsize == width:
                        if next(left, None) != one.section:
                            return None
                        mine = own[one.numbers]
                        mine[:] = counts[at : at + len(mine)]
                        at += len(mine)
                columns[width] = np.append(begun, begun + np.cumsum(own)), indices, values
            if next(left, None) is not None:
                return None
        return [Laid(columns) for columns in found]

    def over(self, newest: Layout) -> Layout:
        """The older version, as a view of the newest one, which must not change while the view is in use."""
        by_name: dict[str, dict[Box, Changes]] = {}
        for name, place, old in self.replaced():
            if len(old.indices):
                by_name.setdefault(name, {})[place] = old
        return Layout((name, laid_over(tensor, by_name.get(name, {}))) for name, tensor in newest.items())


def _add_union(recorder: Recorder, columns: Sequence[_Column]) -> None:
    """Add the elements that any of some columns holds, some at a time; of each those of the first that holds it."""
    columns = _alike(columns)
    sections, totals = columns[0].sections, np.sum([column.edges for column in columns], axis=0)
    at = 0
    while at < len(totals) - 1:
        end = max(at + 1, int(np.searchsorted(totals, totals[at] + MERGED, "right")) - 1)
        (_, edges, indices, values), *others = columns
        found = edges[at : end + 1], indices, values
        for _, more_edges, *more in others:
            found = cpu.unions(*found, more_edges[at : end + 1], *more)
        recorder.add(sections, np.diff(found[0]), Changes(*found[1:]))
        sections, at = [], end


def _alike(columns: Sequence[_Column]) -> Sequence[_Column]:
    """Columns with the same parts. Of a model that does not change, all of them have."""
    if all(column.sections == columns[0].sections for column in columns):
        return columns
    held = [{(name, place): old for name, place, old in column.parts()} for column in columns]
    keys = list(dict.fromkeys(key for by_part in held for key in by_part))
    nothing = Changes(columns[0].indices[:0], columns[0].values[:0])
    found = []
    for by_part in held:
        parts = [by_part.get(key, nothing) for key in keys]
        edges = np.cumsum([0, *(len(part.indices) for part in parts)])
        indices, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        found.append(_Column([Section((name,), (place,)) for name, place in keys], edges, indices, values))
    return found
