"""Which elements change between two states of weights, in the order in which a patch codes them.

A group's tensors are compared where they lie, one run of memory after another, and their changes are then sorted into
tiles: this is as fast as memory allows. It holds the changes of a group. Where these would take more than a fixed
budget, and where tensors do not lie in one run, they are compared tile by tile. What lies on a device is compared
there, by `on_device`. What no kernel reaches is read, part by part.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.parallel import batched, ordered_map, sliced
from pulse_rl.patch.on_device import LyingStates, differing, lying_on
from pulse_rl.patch.overlay import PatchSection
from pulse_rl.patch.segments import CACHED_PLACES, CutGroup, Entry
from pulse_rl.weights import digests
from pulse_rl.weights.bits import ArrayCastBits, Bits, HostBits, lying_itemsize
from pulse_rl.weights.box_sets import BoxSet
from pulse_rl.weights.boxes import Box, Positions, runs
from pulse_rl.weights.changes import Changes, Found, find_changes, joined
from pulse_rl.weights.devices import HOST
from pulse_rl.weights.layout import derived
from pulse_rl.weights.pieces import place_view
from pulse_rl.weights.segments import SEGMENT

TOGETHER_NBYTES = 1 << 20  # of the changes of tiles that are handed on at once
HELD_NBYTES = 32 << 20  # of a group's changes: as much as is kept of a patch while it is proved


class _Part(NamedTuple):
    """A part of a tensor in both states."""

    seed: int  # of the tensor's digest
    at: Positions  # in the tensor
    old: Bits
    new: Bits
    start: int  # of the part in these
    stop: int


@dataclass
class Scan:
    """Compares two states of weights group by group.

    old, new: the same tensors, old in the same pieces as new or larger ones. table: of these.
    """

    old: Mapping[str, Bits]
    new: Mapping[str, Bits]
    table: Sequence[Entry]
    digest_old: bool  # whether to add up the digest of old too
    elements: int = 0  # that were compared
    nbytes: int = 0  # of all changes

    def find(self, one: PatchSection) -> Iterator[Found]:
        """The changes of all segments of a group, in order, of one or more at a time."""
        group, entries = one.group, one.entries
        elements = int(group.sizes.sum()) * len(entries)
        if elements == 0:
            return
        expected = elements * self.nbytes // max(1, self.elements)
        self.elements += elements
        several = differing(one, self.table, self.old, self.new, HELD_NBYTES, digest_old=self.digest_old)
        if several is None:
            found = self._in_runs(group, entries) if expected <= HELD_NBYTES else None
            several = self._in_tiles(one) if found is None else iter([found])
        for found in several:
            self.nbytes += found.nbytes
            yield found

    def _in_tiles(self, one: PatchSection) -> Iterator[Found]:
        """Compare tile by tile: many in a call where they lie in host memory."""
        compare: Callable[..., Found] = _compare
        work: Iterator[Any] = self._tiles(one)
        lying = lying_on(one, self.table, self.old, self.new, HOST)
        if lying is not None:
            compare, work = lying.compare, sliced(lying.sizes, SEGMENT)
        compared = ordered_map(partial(compare, digest_old=self.digest_old), work)
        yield from map(joined, batched(compared, lambda one: 1 + one.nbytes, TOGETHER_NBYTES))

    def _tiles(self, one: PatchSection) -> Iterator[_Part]:
        for place in one.group.places:
            at = place.positions(one.entries[0].shape)
            for entry in one.entries:
                old, new = place_view(self.old[entry.name], place), place_view(self.new[entry.name], place)
                yield _Part(_seed(entry), at, old, new, 0, new.size)

    def _in_runs(self, group: CutGroup, entries: Sequence[Entry]) -> Found | None:
        """Compare run by run. None where that is not possible, or takes too much memory."""
        shape, boxes = entries[0].shape, entries[0].boxes
        grids = _grids(group, boxes)
        if None in grids:
            return None
        before, after = (derived(state, _held, self.table, group) for state in (self.old, self.new))
        if not (before.contiguous and after.contiguous):
            return None
        cut = [list(runs(box, shape)) for box in boxes]
        compare: Callable[..., Found] = _compare
        work: Iterator[Any] = self._runs(entries, cut)
        near, far, itemsize = before.spots, after.spots, self.old[entries[0].name].itemsize
        if near is not None and far is not None and before.itemsize == itemsize:
            lying = LyingStates(HOST, near, far, before.sizes, itemsize, cast=after.itemsize != itemsize)
            compare, work = lying.compare, sliced(lying.sizes, SEGMENT)
        found: list[Found] = []
        nbytes = 0
        for compared in ordered_map(partial(compare, digest_old=self.digest_old), work):
            found.append(compared)
            nbytes += compared.nbytes
            if nbytes > HELD_NBYTES:
                return None
        return _sorted(found, [grid for grid in grids if grid is not None], cut, len(entries))

    def _runs(self, entries: Sequence[Entry], cut: Sequence[Sequence[tuple[int, int, Positions]]]) -> Iterator[_Part]:
        """The runs of each box, tensor by tensor. cut: those of one tensor."""
        for box, spans in zip(entries[0].boxes, cut, strict=True):
            for entry in entries:
                old, new = place_view(self.old[entry.name], box), place_view(self.new[entry.name], box)
                for start, stop, at in spans:
                    yield _Part(_seed(entry), at, old, new, start, stop)


class _Held(NamedTuple):
    """Where a group's tensors lie in one state."""

    contiguous: bool  # whether each box is one run of memory
    itemsize: int  # bytes of an element in memory, where spots are known
    spots: cpu.Spots | None  # of all runs, tensor by tensor of each box; None unless they are host memory, as rows
    sizes: NDArray[np.int64]  # (runs,) elements of each


def _held(state: Mapping[str, Bits], table: Sequence[Entry], group: CutGroup) -> _Held:
    entries = [table[number] for number in group.tensors]
    (_, _, shape, boxes), seeds = entries[0], np.array(list(map(_seed, entries)), np.uint64)
    pieces = [[place_view(state[entry.name], box) for entry in entries] for box in boxes]
    itemsizes = {lying_itemsize(bits) for tensors in pieces for bits in tensors}
    cut = [list(runs(box, shape)) for box in boxes]
    rows = [[_row(at) for _, _, at in spans] for spans in cut]
    itemsize, *more = itemsizes
    if itemsize is None or more or any(None in each for each in rows):
        contiguous = all(bits.contiguous for tensors in pieces for bits in tensors)
        return _Held(contiguous, 0, None, np.empty(0, np.int64))
    columns = []
    for tensors, spans, places in zip(pieces, cut, rows, strict=True):
        addresses = np.array([bits.address for bits in tensors], np.int64)  # type: ignore[attr-defined]
        starts, stops = (np.array([span[i] for span in spans], np.int64) for i in range(2))
        at = addresses[:, None] + starts * itemsize
        each = np.broadcast_to(np.array(places, np.int64).T[:, None], (3, *at.shape))
        own = np.broadcast_to(seeds.view(np.int64)[:, None], at.shape)
        columns.append(np.stack([at, *each, np.broadcast_to(stops - starts, at.shape), own]).reshape(6, -1))
    at, starts, strides, lengths, sizes, own = np.ascontiguousarray(np.concatenate(columns, axis=1))
    spots = cpu.Spots(at.view(np.uint64), lengths, starts, strides, lengths, own.view(np.uint64), np.ones_like(sizes))
    return _Held(True, itemsize, spots, sizes)


def _row(at: Positions) -> tuple[int, int, int] | None:
    """The start, the distance and the length of rows of a tensor; None where they are not of one distance."""
    apart = np.diff(at.starts)
    if len(apart) and (apart != apart[0]).any():
        return None
    return int(at.starts[0]), int(apart[0]) if len(apart) else at.run, at.run


def _seed(entry: Entry) -> int:
    return digests.seed(entry.name, entry.dtype, entry.shape)


def _compare(part: _Part, *, digest_old: bool) -> Found:
    """Find one part's changes and what they do to the digest."""
    seed, at, old, new, start, stop = part
    clock = time.perf_counter()
    after = _read(new, start, stop)
    read_s = time.perf_counter() - clock
    before = old.read(start, stop)
    changes = find_changes(before, after)
    replaced = np.empty_like(changes.values)
    cpu.gather(before, changes.indices, replaced)
    delta = digests.delta(seed, at, changes.indices, replaced, changes.values)
    base = digests.part(seed, at, before) if digest_old else 0
    edges = np.array([0, len(replaced)], np.int64)
    return Found(edges, changes, replaced, delta, time.perf_counter() - clock - read_s, read_s, base)


def _read(bits: Bits, start: int, stop: int) -> UIntArray:
    """Elements that are done with before this thread calls this again.

    What is cast goes to the same memory each time. New memory for each run would be taken from between the changes that
    are kept, and the process would hold many times what it uses.
    """
    if isinstance(bits, ArrayCastBits):
        return bits.read_into(cpu.buffer("read", stop - start, np.uint64), start, stop)
    return bits.read(start, stop)


def rows_of(tensor: Bits, place: Box) -> UIntArray:
    """The elements of a part of a tensor: its rows where they lie apart in host memory, as `Read` wants, else flat."""
    view = place_view(tensor, place)
    rows = view.rows if isinstance(view, HostBits) and not view.contiguous else None
    if rows is None or rows.shape[1] < cpu.LANES or rows.strides[1] != rows.itemsize:
        return view.read(0, view.size)
    return rows


class _Grid(NamedTuple):
    """How a box is cut into tiles."""

    grid: cpu.Grid
    numbers: NDArray[np.int64]  # of each tile of the grid: its number in the group


def _grids(group: CutGroup, boxes: tuple[Box, ...]) -> Sequence[_Grid | None]:
    """The tiles of each box as a grid; None where their rows are not next to each other."""
    kept = isinstance(group.places, tuple) and len(group.places) <= CACHED_PLACES
    return (_grids_of_and_kept if kept else _grids_of)(group.places, boxes)


def _grids_of(places: Sequence[Box], boxes: tuple[Box, ...]) -> list[_Grid | None]:
    tiles: list[list[tuple[int, Box]]] = [[] for _ in boxes]
    here = BoxSet(boxes)
    for number, place in enumerate(places):
        for box in here.touching(place):
            tiles[box].append((number, place))
    return [_grid(found, box) for found, box in zip(tiles, boxes, strict=True)]


_grids_of_and_kept = lru_cache(maxsize=512)(_grids_of)  # a model has few shapes


def _grid(places: Sequence[tuple[int, Box]], box: Box) -> _Grid | None:
    """places: the tiles of the box, and their numbers in the group.

    A column of the grid is an index of the last dimension that is cut, with all elements of the dimensions after it.
    """
    ranges: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # of columns → rows and number of each tile
    cut = max((d for _, place in places for d, n in enumerate(box.sizes) if place.sizes[d] < n), default=0)
    inner, columns, deep = box.sizes[:cut], math.prod(box.sizes[cut:]), math.prod(box.sizes[cut + 1 :])
    for number, place in places:
        offset = tuple(a - b for a, b in zip(place.offset, box.offset, strict=True))
        at = Box(offset[:cut], place.sizes[:cut]).positions(inner)
        if len(at.starts) != 1:
            return None
        first, width = (deep * offset[cut], deep * place.sizes[cut]) if offset else (0, 1)
        ranges.setdefault((first, width), []).append((int(at.starts[0]), int(at.starts[0]) + at.run, number))
    in_order = sorted(ranges)
    tiles = [tile for key in in_order for tile in sorted(ranges[key])]
    firsts = np.cumsum([0, *(len(ranges[key]) for key in in_order[:-1])])
    edges = np.array([*(first for first, _ in in_order), columns], np.int64)
    starts, stops, numbers = (np.array([tile[i] for tile in tiles], np.int64) for i in range(3))
    return _Grid(cpu.Grid(columns, edges, firsts, starts, stops), numbers)


def _sorted(
    compared: Sequence[Found],
    grids: Sequence[_Grid],
    cut: Sequence[list[tuple[int, int, Positions]]],
    tensors: int,
) -> Found:
    """The changes of each segment of a group.

    compared: of each box, tensor by tensor, run by run, of one or more. cut: the runs of each box.
    """
    clock = time.perf_counter()
    found = joined(compared)
    counts = np.diff(found.edges)
    cuts, at = [], 0
    for (grid, numbers), spans in zip(grids, cut, strict=True):
        begins = np.array([start for start, _, _ in spans], np.int64)
        cuts.append(cpu.Cut(grid, numbers, begins, counts[at : at + tensors * len(spans)]))
        at += tensors * len(spans)
    edges, indices, values, replaced = cpu.split(*found.changes, found.replaced, cuts, tensors)
    seconds = found.diff_s + time.perf_counter() - clock
    return found._replace(edges=edges, changes=Changes(indices, values), replaced=replaced, diff_s=seconds)
