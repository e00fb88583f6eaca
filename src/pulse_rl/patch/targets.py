"""Where a segment of a patch lies in live memory: in one place, or cut over several pieces.

A segment that lies within one piece is read and written as it is coded. Where a receiver's pieces cut a segment, each
target takes the changes that are its own; the others are another process's.

Most segments are rows in plain memory that kernels reach, or a part of one is. `spots_of` says where, so that one call
checks or writes many of them.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import OldBits
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu.coding import MemoryRows
from pulse_rl.patch.live import Copies, plain_pieces, shared_memory
from pulse_rl.patch.segments import CACHED_PLACES, Entry, Segments
from pulse_rl.weights import digests
from pulse_rl.weights.bits import ArrayCastBits, Bits, HostBits, TorchBits
from pulse_rl.weights.box_sets import BoxSet
from pulse_rl.weights.boxes import Box, Positions, Shape, rows_in
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.host_bits import Counter
from pulse_rl.weights.layout import derived
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of, place_view, within


class Target(NamedTuple):
    """Live memory that holds elements of a segment."""

    bits: Bits  # of this part alone
    place: Box  # of the part in its tensor
    cut: tuple[slice, ...] | None  # the part in the segment's box; None: it is all of the segment
    times: int  # that the digest counts it, as `Piece.times`

    def own(self, segment: Box, changes: Changes) -> Changes:
        """The changes of a segment that are in this part, with indices into the part."""
        if self.cut is None:
            return changes
        indices, chosen = within(changes.indices.astype(np.int64), segment.sizes, self.cut)
        return Changes(indices, changes.values[chosen])

    def positions(self, shape: tuple[int, ...]) -> Positions:
        """Where its elements lie in the tensor."""
        return self.place.positions(shape)


def targets(tensor: Bits, place: Box) -> list[Target]:
    """The memory of this process that holds elements of a segment; empty where it holds none."""
    if not isinstance(tensor, Pieces):
        return [Target(place_view(tensor, place), place, None, 1)]
    found = []
    for piece in tensor.touching(place):
        if place.inside(piece.box):
            found.append(Target(piece.bits.view(place.slices(piece.box)), place, None, piece.times))
            continue
        common = piece.box.intersect(place)
        if common is not None:
            bits = piece.bits.view(common.slices(piece.box))
            found.append(Target(bits, common, common.slices(place), piece.times))
    return found


def holds(tensor: Bits, place: Box) -> bool:
    """Whether this process holds an element of a segment."""
    if not isinstance(tensor, Pieces):
        return True
    return bool(tensor.touching(place))


def device_for(tensors: Iterable[Bits]) -> Device:
    """The device on which most elements of these tensors lie."""
    found: dict[Device, int] = {}
    for tensor in tensors:
        for _, bits, _ in pieces_of(tensor):
            device = bits.device if isinstance(bits, HostBits | TorchBits) else None
            if device is not None:
                found[device] = found.get(device, 0) + bits.size
    return max(found, key=found.__getitem__, default=HOST)


def device_of(live: Mapping[str, Copies]) -> Device:
    """The device on which most elements of live tensors lie."""
    pieces = derived(live, plain_pieces)
    if pieces is not None:
        return pieces.device
    return device_for(bits for copies in live.values() for bits in copies)


def spots_of(
    segments: Segments,
    roots: Sequence[int],
    live: Mapping[str, Copies],
    others: Container[str],
    device: Device = HOST,
) -> tuple[cpu.Spots, cpu.Windows, NDArray[np.int64]]:
    """Where the segments of a patch, or the parts that this process holds of them, lie in live memory; and which parts.

    The last is how many bytes an element takes there: four of float32 that is read as bfloat16. Those that do not lie
    on this device, in one place as rows, have the address 0. roots: the seed of each tensor's digest. others: names of
    tensors to leave out.
    """
    columns = [np.empty((12, 0), np.int64)]
    for group in segments.groups:
        alike: dict[tuple[Box, ...] | None, list[tuple[int, Sequence[Any]]]] = {}  # tensors by the boxes held
        for member, number in enumerate(group.tensors):
            entry = segments.table[number]
            pieces = None if entry.name in others else _pieces_on(entry, live.get(entry.name, ()), device)
            boxes = None if pieces is None else tuple([piece.box for piece in pieces])
            alike.setdefault(boxes, []).append((member, pieces or ()))
        found = np.empty((12, len(group.places), len(group.tensors)), np.int64)
        kept = isinstance(group.places, tuple) and len(group.places) <= CACHED_PLACES
        for boxes, tensors in alike.items():
            shape = segments.table[group.tensors[0]].shape
            start, held, *how = (_lying_and_kept if kept else _lying)(group.places, shape, boxes)
            members = [member for member, _ in tensors]
            # Of each tensor and piece; the last column, which −1 finds, is for what is not held.
            addresses = np.array([[*(bits.address for _, bits, _ in some), 0] for _, some in tensors], np.int64)
            times = np.array([[*(times for *_, times in some), 0] for _, some in tensors], np.int64)
            itemsizes = np.array([some[0].bits.stored_itemsize if some else 0 for _, some in tensors], np.int64)
            offsets = np.where(held < 0, 0, start)
            found[0][:, members] = (addresses[:, held] + itemsizes[:, None] * offsets).T
            for column, values in zip(found[1:9], how, strict=True):
                column[:, members] = values[:, None]
            found[10][:, members] = times[:, held].T
            found[11][:, members] = itemsizes
        found[9] = np.array([roots[number] for number in group.tensors], np.uint64).view(np.int64)
        columns.append(found.reshape(12, -1))
    addresses, apart, starts, strides, lengths, *windows, seeds, all_times, stored = np.concatenate(columns, axis=1)
    spots = cpu.Spots(addresses.view(np.uint64), apart, starts, strides, lengths, seeds.view(np.uint64), all_times)
    return spots, cpu.Windows(*windows), stored


class Located(NamedTuple):
    """Where the segments of a part lie in live memory, (segments,) each."""

    spots: cpu.Spots
    windows: cpu.Windows
    stored: NDArray[np.int64]  # bytes of an element there
    plain: NDArray[np.bool_]  # whether all of it lies there, as it is read
    old: OldBits  # the live tensors are to be kept while it is used
    held: NDArray[np.bool_]  # whether this process holds an element

    def known(self, changing: NDArray[np.bool_], some: slice | NDArray[np.int64] = slice(None)) -> bool:
        """Whether all that changes of some of them lies where spots say, as far as it is held."""
        lies = (self.spots.addresses[some] > 0) | (self.windows.rows[some] == 0)
        return bool((lies | ~changing[some]).all())


def locate(live: Mapping[str, Copies], table: Sequence[Entry], device: Device) -> Located:
    """Where the segments of a table lie on a device."""
    segments = Segments(table)
    shared = {name for pair in derived(live, shared_memory) for name in pair}
    spots, windows, stored = spots_of(segments, [digests.seed(*entry[:3]) for entry in table], live, shared, device)
    itemsizes = segments.change_nbytes() - 4
    rows = segments.sizes() // spots.runs
    aligned = spots.addresses.view(np.int64) % itemsizes == 0
    plain = (spots.addresses > 0) & (windows.runs == cpu.WHOLE) & (stored == itemsizes)
    usable = plain & aligned
    if device is HOST:  # whose kernels compare many lanes at once
        usable &= (rows == 1) | (spots.runs >= cpu.LANES)
    held = windows.rows > 0
    for number in np.flatnonzero(held & (spots.addresses == 0)).tolist():  # in memory that is not plain, or not in one
        tensor, place = segments.place(number)
        copies = live.get(table[tensor].name, ())
        held[number] = bool(copies) and holds(copies[0], place)
    return Located(
        spots,
        windows,
        stored,
        plain,
        OldBits(MemoryRows(spots.addresses, rows, spots.runs, itemsizes * spots.apart, None), device, usable),
        held,
    )


def counters_of(copies: Copies) -> Iterator[Counter]:
    """Who counts the writes to live tensors."""
    for bits in (piece.bits for copy in copies for piece in pieces_of(copy)):
        if isinstance(bits, HostBits | TorchBits) and bits.counter is not None:
            yield bits.counter


def _pieces_on(entry: Entry, copies: Copies, device: Device) -> Sequence[Piece] | None:
    """The pieces of a tensor; None unless the elements of each lie one after another, on this device, in one width."""
    if len(copies) > 1:
        return None
    pieces = pieces_of(copies[0]) if copies else ()
    for _, bits, _ in pieces:
        if (
            not isinstance(bits, HostBits | ArrayCastBits | TorchBits)
            or bits.device is not device
            or not bits.contiguous
            or bits.dtype != entry.dtype
            or bits.stored_itemsize != pieces[0].bits.stored_itemsize  # type: ignore[attr-defined]
        ):
            return None
    return pieces


def _lying(places: Sequence[Box], shape: Shape, boxes: tuple[Box, ...] | None) -> NDArray[np.int64]:
    """Where what is held of each place of a group lies in memory that holds these boxes of a tensor.

    boxes: None if that memory is not plain. Returns (10, places): where its rows start in the memory of a box, the
    number of the box (−1 for none), the distance of rows there, their start and distance in the tensor, and their
    length; and the columns of its `Windows`.
    """
    found = np.zeros((10, len(places)), np.int64)
    found[1], found[5], found[7], found[8], found[9] = -1, 1, cpu.WHOLE, cpu.WHOLE, 1
    held = BoxSet(boxes or ())
    for number, place in enumerate(places if boxes is not None else ()):
        assert boxes is not None
        around = held.touching(place)
        found[9, number] = bool(around)
        if len(around) != 1:
            continue
        common = place.intersect(boxes[around[0]])
        assert common is not None
        rows = rows_in(common, shape, boxes[around[0]])
        part = rows_in(common, shape, place)
        if rows is not None and part is not None:
            (position, stride, run), (memory, apart, _) = rows
            found[:6, number] = (memory, around[0], apart, position, stride, run)
            if common != place:
                start, distance, length = part[1]
                found[6:, number] = (start, distance, length, common.size // length)
    found.flags.writeable = False
    return found


_lying_and_kept = lru_cache(maxsize=64)(_lying)  # a model has few shapes


def boxes_of(tensor: Bits) -> tuple[Box, ...]:
    """What this process holds of a tensor."""
    return tuple(piece.box for piece in pieces_of(tensor))
