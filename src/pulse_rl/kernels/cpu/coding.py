"""Many segments of the context codec in one call: their exponents counted, their changes coded and decoded.

A call takes some 20 µs to unpack its arguments, which is as long as the changes of a small tile take. So one call takes
many segments of one dtype, and finds the old bits of each by their address. `context` codes a single segment.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, Field, UIntArray
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu.arrays import buffer, copy_into, read_only
from pulse_rl.kernels.cpu.compiled import inlined, kernel, part
from pulse_rl.kernels.cpu.context import Changed, Place, Start, decode_stream, encode_stream
from pulse_rl.kernels.cpu.moves import SEGMENT, Hot, Moves, find_hot, merge_runs, undo_moves
from pulse_rl.kernels.cpu.rangecoder import EVENTS, SLACK
from pulse_rl.kernels.cpu.spots import load


class MemoryRows(NamedTuple):
    """Where the old bits of segments lie, (segments,) each: in rows of one length and distance."""

    addresses: NDArray[np.uint64]  # of the first element
    rows: NDArray[np.int64]
    runs: NDArray[np.int64]  # elements in a row: LANES at least, if there are several rows
    apart: NDArray[np.int64]  # bytes from row to row
    held: object  # what keeps the memory: an address does not

    def of(self, some: slice | NDArray[np.int64]) -> "MemoryRows":
        """Those of some segments: views, if they are a slice."""
        addresses, rows, runs, apart, held = self
        return MemoryRows(addresses[some], rows[some], runs[some], apart[some], held)


def memory_from(
    address: int, begins: NDArray[np.int64], sizes: NDArray[np.int64], itemsize: int, held: object
) -> MemoryRows:
    """Segments that lie from an address on, each in one row. begins, sizes: (segments,) in elements."""
    return MemoryRows(
        np.uint64(address) + (itemsize * begins).view(np.uint64), np.ones_like(sizes), sizes, itemsize * sizes, held
    )


def joined_memory(several: Sequence[MemoryRows]) -> MemoryRows:
    """That of segments one after another."""
    if len(several) == 1:
        return several[0]
    addresses, rows, runs, apart, held = zip(*several, strict=True)
    columns = [np.concatenate(each) for each in (addresses, rows, runs, apart)]
    return MemoryRows(columns[0], columns[1], columns[2], columns[3], held)


def memory_of(olds: Sequence[UIntArray]) -> MemoryRows:
    """olds: of one dtype, each as `codecs.base.Read` gives it."""
    shapes = (old.shape if old.ndim == 2 else (1, old.size) for old in olds)
    places = [(old.ctypes.data, *shape, old.strides[0]) for old, shape in zip(olds, shapes, strict=True)]
    addresses, rows, runs, apart = np.array(places, np.int64).reshape(-1, 4).T.copy()
    return MemoryRows(addresses.view(np.uint64), rows, runs, apart, olds)


class Kind(NamedTuple):
    """What segments are: the first two for all of them, then (segments,) each."""

    field: Field  # of their dtype
    itemsize: int
    strides: NDArray[np.int64]  # elements in a row of the tensor
    phases: NDArray[np.int64]  # column of the first element
    classes: NDArray[np.int64]  # which class's start they start from


class Streams(NamedTuple):
    """Where the streams of segments lie in bytes."""

    data: NDArray[np.uint8]
    begins: NDArray[np.int64]  # (segments,)
    ends: NDArray[np.int64]  # (segments,)

    def of(self, some: slice | NDArray[np.int64]) -> "Streams":
        """Those of some segments."""
        return Streams(self.data, self.begins[some], self.ends[some])


class Starts(NamedTuple):
    """`context.Start` of each class."""

    thresholds: NDArray[np.int64]  # (classes,)
    shares: NDArray[np.int64]  # (classes, E)
    states: NDArray[np.int64]  # (classes, Tables.size)


def starts_of(starts: Sequence[Start]) -> Starts:
    """starts: at least one."""
    thresholds, shares, states = zip(*starts, strict=True)
    return Starts(np.array(thresholds, np.int64), np.stack(shares), np.stack(states))


def _segments(memory: MemoryRows, **columns: NDArray[np.int64]) -> NDArray[np.void]:
    """(segments,) SEGMENT"""
    found = np.zeros(len(memory.rows), SEGMENT)
    lies = {"address": memory.addresses, "rows": memory.rows, "run": memory.runs, "apart": memory.apart}
    for name, column in {**lies, **columns}.items():
        found[name] = column
    return read_only(found)


def count_exponents(memory: MemoryRows, field: Field, itemsize: int, every: NDArray[np.int64]) -> NDArray[np.int32]:
    """Estimate how many elements of each segment have each exponent, (segments, E).

    every: (segments,), only every so many-th run of 64 elements is counted; 1 is exact.
    """
    counts = np.zeros((len(every), field.exponents), np.int32)
    like: UIntArray = np.empty(0, UINTS[itemsize])
    moves.count_in_segments(like, _segments(memory), *_field(field, itemsize), read_only(every), counts)
    return counts


def _field(field: Field, itemsize: int) -> tuple[Any, Any]:
    """Mask and shift in the width of the elements."""
    kind = UINTS[itemsize].type
    return kind(field.mask), kind(field.shift)


class CodedSegments(NamedTuple):
    """Segments of one dtype, what they start from, and memory to code each in turn."""

    segments: NDArray[np.void]  # (segments,) SEGMENT
    mosts: UIntArray  # (classes,) the largest bits of the exponent that are hot
    mask: Any  # of the exponents' bits, in the width of the elements
    shift: Any
    thresholds: NDArray[np.int64]  # this and the next two, as `Starts`
    shares: NDArray[np.int64]
    states: NDArray[np.int64]
    hot: moves.Hot  # n elements of the largest segment
    fresh: NDArray[np.int64]  # (Tables.size,) the states of a segment that is coded
    leans: NDArray[np.int32]  # (n,) n columns of the longest row


@part
def _begin(coded, mine):
    """Clear the columns, and find the hot elements of a segment. Returns how many there are."""
    for k in range(mine.stride):
        coded.leans[k] = 0
    if coded.thresholds[mine.number] == 0:
        return 0
    most, (indices, exponents) = coded.mosts[mine.number], coded.hot
    return find_hot(coded.mosts, mine, coded.mask, most, coded.shift, indices, exponents)


@inlined
def _place(coded, mine):
    return Place(mine.rows * mine.run, 8 * coded.mosts.itemsize, mine.stride, mine.phase)


@kernel
def _encode(out, events, coded, indices, all_moved, nbytes):
    used = 0
    for s in range(coded.segments.shape[0]):
        mine = coded.segments[s]
        hots, place = _begin(coded, mine), _place(coded, mine)
        hot = Hot(coded.hot.indices[:hots], coded.hot.exponents[:hots])
        states, most, number = coded.states[mine.number], 0, mine.number
        if out.shape[0] > 0:
            copy_into(coded.fresh, states)
            states, most = coded.fresh, used + place.size * coded.mosts.itemsize + SLACK
        a, b = mine.begin, mine.end
        moved = Moves(all_moved.exponents[a:b], all_moved.ups[a:b], all_moved.sizes[a:b])
        start = Start(coded.thresholds[number], coded.shares[number], states)
        nbytes[s] = encode_stream(out[used:most], events, place, start, hot, indices[a:b], moved, coded.leans)
        used += max(0, nbytes[s])
    return used


@kernel
def _decode(data, coded, sign, floating, each, moved, indices, values):
    for s in range(coded.segments.shape[0]):
        mine = coded.segments[s]
        hots, place = _begin(coded, mine), _place(coded, mine)
        hot = Hot(coded.hot.indices[:hots], coded.hot.exponents[:hots])
        copy_into(coded.fresh, coded.states[mine.number])
        a, b = mine.begin, mine.end
        count = b - a
        changed = Changed(each.indices[:count], each.ups[:count], each.sizes[:count])
        start = Start(coded.thresholds[mine.number], coded.shares[mine.number], coded.fresh)
        split = decode_stream(data[mine.stream : mine.stream_end], place, start, hot, coded.leans, changed)
        if split < 0:
            return s
        new, run = moved[:count], np.uint32(mine.run)
        for j in range(count):
            row = np.uint32(changed.indices[j] // run)  # a division of 32 bits takes a third of the time of one of 64
            column = np.int64(np.uint32(changed.indices[j] - row * run))
            new[j] = load(moved, mine.address + np.uint64(np.int64(row) * mine.apart), column)
        undo_moves(changed.ups, changed.sizes, sign, floating, new)
        if not merge_runs(changed.indices, new, split, indices[a:b], values[a:b]):
            return s
    return -1


def _coded(
    memory: MemoryRows, kind: Kind, starts: Starts, edges: NDArray[np.int64], **columns: NDArray[np.int64]
) -> CodedSegments:
    field, itemsize = kind.field, kind.itemsize
    mosts = ((starts.thresholds << field.shift) - 1).astype(UINTS[itemsize])
    of_kind = {"stride": kind.strides, "phase": kind.phases, "number": kind.classes}
    most = int((memory.rows * memory.runs).max(initial=0))
    return CodedSegments(
        _segments(memory, begin=edges[:-1], end=edges[1:], **of_kind, **columns),
        read_only(mosts),
        *_field(field, itemsize),
        read_only(starts.thresholds),
        read_only(starts.shares),
        starts.states,
        Hot(buffer("indices", most, np.uint32), buffer("exponents", most, np.uint16)),
        np.empty_like(starts.states[0]),
        np.empty(int(kind.strides.max(initial=0)), np.int32),
    )


class SegmentMoves(NamedTuple):
    """Segments' changes, of all of them one after another."""

    edges: NDArray[np.int64]  # (segments + 1,): where those of each begin, and the last one's end
    indices: NDArray[np.uint32]  # (k,), ascending in each segment
    moved: Moves  # (k,)


def _encoded(
    out: NDArray[np.uint8], memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves
) -> tuple[int, NDArray[np.int64]]:
    """How many bytes of `out` were used in all, and of each segment's stream; −1 for one that would be too long."""
    nbytes, events = np.empty(len(kind.classes), np.int64), buffer("events", EVENTS, np.uint16)
    moved = Moves(*map(read_only, changes.moved))
    coded = _coded(memory, kind, starts, changes.edges)
    return int(_encode(out, events, coded, read_only(changes.indices), moved, nbytes)), nbytes


def count_bits(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> None:
    """Count what coding would take: `starts.states`, zeros at first, become ones << 32 | bits of each context."""
    _encoded(np.empty(0, np.uint8), memory, kind, starts, changes)


def encode_segments(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> list[bytes | None]:
    """Code each segment's changes. None for one whose stream would take more bytes than its elements."""
    out = buffer("out", kind.itemsize * int((memory.rows * memory.runs).sum()) + SLACK, np.uint8)
    used, nbytes = _encoded(out, memory, kind, starts, changes)
    data, ends = out[:used].tobytes(), np.cumsum(np.maximum(nbytes, 0)).tolist()
    each = zip(nbytes.tolist(), [0, *ends], ends, strict=False)
    return [None if size < 0 else data[begin:end] for size, begin, end in each]


def decode_segments(
    streams: Streams, memory: MemoryRows, kind: Kind, starts: Starts, edges: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], UIntArray] | int:
    """The inverse. edges: where the changes of each segment begin and end.

    Returns the indices (k,), ascending and in range in each segment, and the new values (k,); the number of the first
    segment whose stream is broken, if one is.
    """
    field, total = kind.field, int(edges[-1])
    most = int(np.diff(edges).max(initial=0))
    dtype = UINTS[kind.itemsize]
    indices, values = np.empty(total, np.uint32), np.empty(total, dtype)
    each = Changed(np.empty(most, np.uint32), np.empty(most, np.bool_), np.empty(most, np.uint64))
    coded = _coded(memory, kind, starts, edges, stream=streams.begins, stream_end=streams.ends)
    sign, moved = np.uint64(field.sign), np.empty(most, dtype)
    broken = _decode(read_only(streams.data), coded, sign, field.floating, each, moved, indices, values)
    return (indices, values) if broken < 0 else int(broken)
