"""Many segments of the context codec in one call: their exponents counted, their changes coded and decoded.

A call takes some 20 µs to unpack its arguments, which is as long as the changes of a small tile take. So one call takes
many segments of one dtype, and finds the old bits of each by their address. `context` codes a single segment.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, Field, UIntArray
from pulse_rl.kernels.cpu.arrays import buffer, copy_into, read_only
from pulse_rl.kernels.cpu.changes import gather_flat, gather_in_rows
from pulse_rl.kernels.cpu.compiled import kernel, part
from pulse_rl.kernels.cpu.context import Changed, Place, Start, decode_stream, encode_stream
from pulse_rl.kernels.cpu.moves import (
    Hot,
    Moves,
    count_flat,
    count_in_rows,
    every_in_rows,
    hot_flat,
    hot_in_rows,
    merge_runs,
    undo_moves,
)
from pulse_rl.kernels.cpu.rangecoder import SLACK


class Lies(NamedTuple):
    """Where the old bits of a segment lie: in rows of one length and distance."""

    address: int  # of the first element
    rows: int
    run: int  # elements in a row: LANES at least, if there are several rows
    apart: int  # bytes from row to row


class MemoryRows(NamedTuple):
    """Where the old bits of segments lie, (segments,) each, as `Lies`."""

    addresses: NDArray[np.uint64]
    rows: NDArray[np.int64]
    runs: NDArray[np.int64]
    apart: NDArray[np.int64]
    held: object  # what keeps the memory: an address does not

    def of(self, numbers: Sequence[int] | NDArray[np.int64]) -> "MemoryRows":
        """Those of some segments."""
        addresses, rows, runs, apart, held = self
        return MemoryRows(addresses[numbers], rows[numbers], runs[numbers], apart[numbers], held)

    def at(self, some: slice) -> "MemoryRows":
        """Those of consecutive segments, as views."""
        addresses, rows, runs, apart, held = self
        return MemoryRows(addresses[some], rows[some], runs[some], apart[some], held)


def memory_at(places: Sequence[Lies], held: object) -> MemoryRows:
    """held: what keeps the memory."""
    addresses, rows, runs, apart = np.array(places, np.int64).reshape(-1, 4).T.copy()
    return MemoryRows(addresses.view(np.uint64), rows, runs, apart, held)


def joined_memory(several: Sequence[MemoryRows]) -> MemoryRows:
    """That of segments one after another."""
    if len(several) == 1:
        return several[0]
    addresses, rows, runs, apart, held = zip(*several, strict=True)
    columns = [np.concatenate(each) for each in (addresses, rows, runs, apart)]
    return MemoryRows(columns[0], columns[1], columns[2], columns[3], held)


def memory_of(olds: Sequence[UIntArray]) -> MemoryRows:
    """olds: of one dtype, each as in `moves.count_exponents`."""
    held = [old if old.flags.aligned else old.copy() for old in olds]
    places = []
    for old in held:
        rows, run = old.shape if old.ndim == 2 else (1, old.size)
        places.append(Lies(old.ctypes.data, rows, run, old.strides[0]))
    return memory_at(places, held)


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


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """The memory at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), codegen


@part
def _flat(like, address, size):
    """The elements from an address on, of the dtype of `like`."""
    return numba.carray(_pointer(address), (size,), like.dtype)


@part
def _in_rows(like, address, rows, run, apart):
    first = numba.carray(_pointer(address), (1,), like.dtype)
    return np.lib.stride_tricks.as_strided(first, (rows, run), (apart, like.itemsize))


@kernel
def _count(like, addresses, rows, runs, apart, mask, shift, every, counts):
    for s in range(addresses.shape[0]):
        if rows[s] == 1:
            count_flat(_flat(like, addresses[s], runs[s]), mask, shift, every[s], counts[s])
        else:
            old = _in_rows(like, addresses[s], rows[s], runs[s], apart[s])
            count_in_rows(old, mask, shift, every[s], counts[s])


def count_exponents(memory: MemoryRows, field: Field, itemsize: int, every: NDArray[np.int64]) -> NDArray[np.int32]:
    """Estimate how many elements of each segment have each exponent, (segments, E).

    every: (segments,), as in `moves.count_exponents`.
    """
    counts = np.zeros((len(every), field.exponents), np.int32)
    like: UIntArray = np.empty(0, UINTS[itemsize])
    _count(like, *map(read_only, memory[:4]), *_field(field, itemsize), read_only(every), counts)
    return counts


def _field(field: Field, itemsize: int) -> tuple[Any, Any]:
    """Mask and shift in the width of the elements."""
    kind = UINTS[itemsize].type
    return kind(field.mask), kind(field.shift)


class CodedSegments(NamedTuple):
    """Segments of one dtype, what they start from, and memory to code each in turn."""

    bounds: UIntArray  # (classes,) what old bits without their sign lie below that are hot
    addresses: NDArray[np.uint64]  # (segments,) this and the next three, as `MemoryRows`
    rows: NDArray[np.int64]
    runs: NDArray[np.int64]
    apart: NDArray[np.int64]
    mask: Any  # of the exponents' bits, in the width of the elements
    shift: Any
    strides: NDArray[np.int64]  # (segments,) this and the next two, as `Kind`
    phases: NDArray[np.int64]
    classes: NDArray[np.int64]
    thresholds: NDArray[np.int64]  # this and the next two, as `Starts`
    shares: NDArray[np.int64]
    states: NDArray[np.int64]
    hot_indices: NDArray[np.uint32]  # (n,) and the next one: n elements of the largest segment
    hot_exponents: NDArray[np.uint16]
    fresh: NDArray[np.int64]  # (Tables.size,) the states of a segment that is coded
    leans: NDArray[np.int32]  # (n,) n columns of the longest row


@part
def _find_hot(coded, s):
    """The hot elements of a segment."""
    address, rows, run, apart = coded.addresses[s], coded.rows[s], coded.runs[s], coded.apart[s]
    number, indices, exponents = coded.classes[s], coded.hot_indices, coded.hot_exponents
    if coded.thresholds[number] >= coded.shares.shape[1]:  # all are: their bound may not fit the element's width
        count = every_in_rows(
            _in_rows(coded.bounds, address, rows, run, apart), coded.mask, coded.shift, indices, exponents
        )
    elif rows == 1:
        old, bound = _flat(coded.bounds, address, run), coded.bounds[number]
        count = hot_flat(old, coded.mask, bound, coded.shift, indices, exponents)
    else:
        apart_rows, bound = _in_rows(coded.bounds, address, rows, run, apart), coded.bounds[number]
        count = hot_in_rows(apart_rows, coded.mask, bound, coded.shift, indices, exponents)
    return Hot(indices[:count], exponents[:count])


@kernel
def _encode(out, coded, edges, indices, all_moved, nbytes):
    used = 0
    for s in range(coded.addresses.shape[0]):
        number = coded.classes[s]
        threshold, share, states = coded.thresholds[number], coded.shares[number], coded.states[number]
        hot = _find_hot(coded, s)
        place = Place(coded.rows[s] * coded.runs[s], 8 * coded.bounds.itemsize, coded.strides[s], coded.phases[s])
        leans = coded.leans[: coded.strides[s]]
        leans[:] = 0
        a, b = edges[s], edges[s + 1]
        moved = Moves(all_moved.exponents[a:b], all_moved.ups[a:b], all_moved.sizes[a:b])
        if out is None:
            encode_stream(None, place, Start(threshold, share, states), hot, indices[a:b], moved, leans)
        else:
            copy_into(coded.fresh, states)
            most = used + place.size * coded.bounds.itemsize + SLACK
            start = Start(threshold, share, coded.fresh)
            nbytes[s] = encode_stream(out[used:most], place, start, hot, indices[a:b], moved, leans)
            used += max(0, nbytes[s])
    return used


@kernel
def _decode(streams, coded, edges, sign, floating, each, moved, indices, values):
    for s in range(coded.addresses.shape[0]):
        number = coded.classes[s]
        hot = _find_hot(coded, s)
        place = Place(coded.rows[s] * coded.runs[s], 8 * coded.bounds.itemsize, coded.strides[s], coded.phases[s])
        leans = coded.leans[: coded.strides[s]]
        leans[:] = 0
        copy_into(coded.fresh, coded.states[number])
        a, b = edges[s], edges[s + 1]
        count = b - a
        changed = Changed(each.indices[:count], each.ups[:count], each.sizes[:count])
        start = Start(coded.thresholds[number], coded.shares[number], coded.fresh)
        stream = streams.data[streams.begins[s] : streams.ends[s]]
        split = decode_stream(stream, place, start, hot, leans, changed)
        if split < 0:
            return s
        new = moved[:count]
        address, rows, run = coded.addresses[s], coded.rows[s], coded.runs[s]
        if rows == 1:
            gather_flat(_flat(coded.bounds, address, run), changed.indices, new)
        else:
            gather_in_rows(_in_rows(coded.bounds, address, rows, run, coded.apart[s]), changed.indices, new)
        undo_moves(changed.ups, changed.sizes, sign, floating, new)
        if not merge_runs(changed.indices, new, split, indices[a:b], values[a:b]):
            return s
    return -1


def _coded(memory: MemoryRows, kind: Kind, starts: Starts) -> CodedSegments:
    field, itemsize = kind.field, kind.itemsize
    bounds = (starts.thresholds << field.shift).astype(UINTS[itemsize])
    most, (mask, shift) = int((memory.rows * memory.runs).max(initial=0)), _field(field, itemsize)
    return CodedSegments(
        read_only(bounds),
        read_only(memory.addresses),
        read_only(memory.rows),
        read_only(memory.runs),
        read_only(memory.apart),
        mask,
        shift,
        read_only(kind.strides),
        read_only(kind.phases),
        read_only(kind.classes),
        read_only(starts.thresholds),
        read_only(starts.shares),
        starts.states,
        buffer("indices", most, np.uint32),
        buffer("exponents", most, np.uint16),
        np.empty_like(starts.states[0]),
        np.empty(int(kind.strides.max(initial=0)), np.int32),
    )


class SegmentMoves(NamedTuple):
    """Segments' changes, of all of them one after another."""

    edges: NDArray[np.int64]  # (segments + 1,): where those of each begin, and the last one's end
    indices: NDArray[np.uint32]  # (k,), ascending in each segment
    moved: Moves  # (k,)

    def read_only(self) -> "tuple[NDArray[np.int64], NDArray[np.uint32], Moves]":
        """As kernels take it."""
        return read_only(self.edges), read_only(self.indices), Moves(*map(read_only, self.moved))


def count_bits(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> None:
    """Count what coding would take: `starts.states`, zeros at first, become ones << 32 | bits of each context."""
    _encode(None, _coded(memory, kind, starts), *changes.read_only(), np.empty(0, np.int64))


def encode_segments(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> list[bytes | None]:
    """Code each segment's changes. None for one whose stream would take more bytes than its elements."""
    nbytes = np.empty(len(kind.classes), np.int64)
    most = kind.itemsize * int((memory.rows * memory.runs).sum()) + SLACK
    out = buffer("out", most, np.uint8)
    used = _encode(out, _coded(memory, kind, starts), *changes.read_only(), nbytes)
    data, at = out[:used].tobytes(), 0
    streams: list[bytes | None] = []
    for size in nbytes.tolist():
        streams.append(None if size < 0 else data[at : at + size])
        at += max(0, size)
    return streams


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
    broken = _decode(
        Streams(read_only(streams.data), read_only(streams.begins), read_only(streams.ends)),
        _coded(memory, kind, starts),
        read_only(edges),
        np.uint64(field.sign),
        field.floating,
        each,
        np.empty(most, dtype),
        indices,
        values,
    )
    return (indices, values) if broken < 0 else int(broken)
