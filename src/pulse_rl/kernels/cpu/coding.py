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


@part
def _find_hot(bounds, number, every, address, rows, run, apart, mask, shift, indices, exponents):
    """The hot elements of a segment. every: whether all of them are. indices, exponents: memory for all of them."""
    if every:  # their bound may not fit the element's width
        count = every_in_rows(_in_rows(bounds, address, rows, run, apart), mask, shift, indices, exponents)
    elif rows == 1:
        count = hot_flat(_flat(bounds, address, run), mask, bounds[number], shift, indices, exponents)
    else:
        old = _in_rows(bounds, address, rows, run, apart)
        count = hot_in_rows(old, mask, bounds[number], shift, indices, exponents)
    return Hot(indices[:count], exponents[:count])


@kernel
def _encode(
    out, bounds, addresses, rows, runs, apart, mask, shift, strides, phases, classes, thresholds, shares, states,
    hot_indices, hot_exponents, fresh, all_leans, edges, indices, exponents, ups, sizes, nbytes,
):  # fmt: skip
    used = 0
    for s in range(addresses.shape[0]):
        number = classes[s]
        threshold, share = thresholds[number], shares[number]
        hot = _find_hot(
            bounds, number, threshold >= share.shape[0], addresses[s], rows[s], runs[s], apart[s], mask, shift,
            hot_indices, hot_exponents,
        )  # fmt: skip
        place = Place(rows[s] * runs[s], 8 * bounds.itemsize, strides[s], phases[s])
        a, b = edges[s], edges[s + 1]
        moved = Moves(exponents[a:b], ups[a:b], sizes[a:b])
        leans = all_leans[: strides[s]]
        leans[:] = 0
        if out is None:
            encode_stream(None, place, Start(threshold, share, states[number]), hot, indices[a:b], moved, leans)
        else:
            copy_into(fresh, states[number])
            most = used + place.size * bounds.itemsize + SLACK
            start = Start(threshold, share, fresh)
            nbytes[s] = encode_stream(out[used:most], place, start, hot, indices[a:b], moved, leans)
            used += max(0, nbytes[s])
    return used


@kernel
def _decode(
    data, bounds, addresses, rows, runs, apart, mask, shift, strides, phases, classes, thresholds, shares, states,
    hot_indices, hot_exponents, fresh, all_leans, begins, ends, edges, sign, floating, raw, ups, sizes, moved, indices,
    values,
):  # fmt: skip
    for s in range(addresses.shape[0]):
        number = classes[s]
        threshold, share = thresholds[number], shares[number]
        hot = _find_hot(
            bounds, number, threshold >= share.shape[0], addresses[s], rows[s], runs[s], apart[s], mask, shift,
            hot_indices, hot_exponents,
        )  # fmt: skip
        place = Place(rows[s] * runs[s], 8 * bounds.itemsize, strides[s], phases[s])
        leans = all_leans[: strides[s]]
        leans[:] = 0
        copy_into(fresh, states[number])
        a, b = edges[s], edges[s + 1]
        count = b - a
        changed = Changed(raw[:count], ups[:count], sizes[:count])
        stream = data[begins[s] : ends[s]]
        split = decode_stream(stream, place, Start(threshold, share, fresh), hot, leans, changed)
        if split < 0:
            return s
        new = moved[:count]
        if rows[s] == 1:
            gather_flat(_flat(bounds, addresses[s], runs[s]), changed.indices, new)
        else:
            gather_in_rows(_in_rows(bounds, addresses[s], rows[s], runs[s], apart[s]), changed.indices, new)
        undo_moves(changed.ups, changed.sizes, sign, floating, new)
        if not merge_runs(changed.indices, new, split, indices[a:b], values[a:b]):
            return s
    return -1


def _given(memory: MemoryRows, kind: Kind, starts: Starts) -> tuple[Any, ...]:
    """What both kernels take, from `bounds` to `all_leans`."""
    field, itemsize = kind.field, kind.itemsize
    bounds = (starts.thresholds << field.shift).astype(UINTS[itemsize])
    most = int((memory.rows * memory.runs).max(initial=0))
    return (
        read_only(bounds),
        *map(read_only, memory[:4]),
        *_field(field, itemsize),
        *map(read_only, (kind.strides, kind.phases, kind.classes, starts.thresholds, starts.shares)),
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


def _changed(changes: SegmentMoves) -> list[Any]:
    """What `_encode` takes of changes."""
    exponents, ups, sizes = changes.moved
    return [read_only(each) for each in (changes.edges, changes.indices, exponents, ups, sizes)]


def count_bits(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> None:
    """Count what coding would take: `starts.states`, zeros at first, become ones << 32 | bits of each context."""
    _encode(None, *_given(memory, kind, starts), *_changed(changes), np.empty(0, np.int64))


def encode_segments(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> list[bytes | None]:
    """Code each segment's changes. None for one whose stream would take more bytes than its elements."""
    nbytes = np.empty(len(kind.classes), np.int64)
    most = kind.itemsize * int((memory.rows * memory.runs).sum()) + SLACK
    out = buffer("out", most, np.uint8)
    used = _encode(out, *_given(memory, kind, starts), *_changed(changes), nbytes)
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
    raw, ups, sizes = np.empty(most, np.uint32), np.empty(most, np.bool_), np.empty(most, np.uint64)
    broken = _decode(
        read_only(streams.data),
        *_given(memory, kind, starts),
        read_only(streams.begins),
        read_only(streams.ends),
        read_only(edges),
        np.uint64(field.sign),
        field.floating,
        raw,
        ups,
        sizes,
        np.empty(most, dtype),
        indices,
        values,
    )
    return (indices, values) if broken < 0 else int(broken)
