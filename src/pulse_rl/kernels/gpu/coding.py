"""Many segments of the context codec on the device: their exponents counted, their changes coded and decoded.

The functions are those of `cpu.coding`, with its arguments and its results, of segments whose old bits lie on the
device. They run the source of `cpu.context` itself, so that both code the same bytes. A thread decodes a segment, and
two code one; segments are many, and each one's bits depend on the bits before. What is found by looking at every
element (hot elements, exponents) is found by whole blocks beforehand.

A batch of segments is coded at once. It takes memory on the device: at most SCRATCH bytes for contexts, columns, masks
and hot elements, if one segment takes no more, and some 25 bytes for each change.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, Field, UIntArray
from pulse_rl.kernels.cpu import context, moves, rangecoder
from pulse_rl.kernels.cpu.coding import Kind, MemoryRows, SegmentMoves, Starts, Streams
from pulse_rl.kernels.cpu.context import Changed, Place, Start
from pulse_rl.kernels.cpu.moves import Hot, Moves
from pulse_rl.kernels.cpu.rangecoder import EVENTS, SLACK
from pulse_rl.kernels.gpu.device import (
    THREADS,
    DeviceArray,
    device,
    download,
    empty,
    example,
    kernel,
    launch,
    twin,
    upload,
    zeros,
)
from pulse_rl.kernels.gpu.moves import HotElements, count_hot, find_hot
from pulse_rl.kernels.gpu.moves import count_exponents as count_in_regions
from pulse_rl.kernels.gpu.regions import Regions, element

SCRATCH = 1 << 28  # bytes that a batch of segments takes on the device at most, changes apart
HOT_NBYTES = 6  # of a hot element
HALVES = 2 * EVENTS  # words: events are coded in one half while those that follow are put into the other
WARP = 32  # threads that take one branch at a time, of which one codes: it waits for no other one's branches
# Bytes that a stream is given at first, and for each of its changes. A hot element takes a bit at most, but for few.
STREAM_NBYTES, CHANGE_NBYTES = 64, 8

_begin_telling, _tell, _code = twin(context.begin_telling), twin(context.tell), twin(context.code)
_start_encoder, _end_coding, _decode_stream = (
    twin(each) for each in (rangecoder.start_encoder, context.end_coding, context.decode_stream)
)
_undo_moves, _merge_runs = twin(moves.undo_moves), twin(moves.merge_runs)


class _Segments(NamedTuple):
    """Segments of a batch, (segments,) each, on the device."""

    bits: int  # of an element
    sizes: DeviceArray  # int64, elements
    strides: DeviceArray  # int64
    phases: DeviceArray  # int64
    classes: DeviceArray  # int64
    thresholds: DeviceArray  # (classes,) int64
    shares: DeviceArray  # (classes, E) int64
    states: DeviceArray  # (segments, contexts) int64, which the coder changes
    column_edges: DeviceArray  # (segments + 1,) int64: where the columns of each begin in leans
    leans: DeviceArray  # (columns,) int32, zeros at first


class _Coded(NamedTuple):
    """The streams of a batch's segments, on the device."""

    edges: DeviceArray  # (segments + 1,) int64, of their changes
    begins: DeviceArray  # (segments,) int64, where each stream begins
    ends: DeviceArray  # (segments,) int64
    data: DeviceArray  # uint8


class _Found(NamedTuple):
    """What decoding a batch fills in, on the device. `raw` to `moved` are in the order of the streams."""

    raw: DeviceArray  # (k,) uint32, indices
    ups: DeviceArray  # (k,) bool
    sizes: DeviceArray  # (k,) uint64
    moved: DeviceArray  # (k,) old bits, then new ones
    indices: DeviceArray  # (k,) uint32, ascending in each segment
    values: DeviceArray  # (k,)
    broken: DeviceArray  # (segments,) uint8


class _Changes(NamedTuple):
    """The changes of a batch's segments, on the device."""

    edges: DeviceArray  # (segments + 1,) int64
    indices: DeviceArray  # (k,) uint32
    moved: Moves


def _segments(kind: Kind, sizes: NDArray[np.int64], starts: Starts) -> _Segments:
    states = upload(starts.states)[upload(kind.classes)]
    columns = np.concatenate([[0], np.cumsum(kind.strides)])
    return _Segments(
        bits=8 * kind.itemsize,
        sizes=upload(sizes),
        strides=upload(kind.strides),
        phases=upload(kind.phases),
        classes=upload(kind.classes),
        thresholds=upload(starts.thresholds),
        shares=upload(starts.shares),
        states=states,
        column_edges=upload(columns),
        leans=zeros(int(columns[-1]), np.int32),
    )


@device
def _start(segments, s):
    """Place, start and columns of segment s."""
    number = segments.classes[s]
    return (
        Place(segments.sizes[s], segments.bits, segments.strides[s], segments.phases[s]),
        Start(segments.thresholds[number], segments.shares[number], segments.states[s]),
        segments.leans[segments.column_edges[s] : segments.column_edges[s + 1]],
    )


@device
def _hot(hot, s):
    """The hot elements of segment s."""
    a, b = hot.edges[s], hot.edges[s + 1]
    return Hot(hot.indices[a:b], hot.exponents[a:b])


@kernel
def _encode(segments, hot, changes, out, slots, nbytes):
    """A block codes a segment. A thread of one warp writes the next events; at the same time a thread of the other warp
    codes the events before them."""
    events, told = cuda.shared.array(HALVES, np.uint16), cuda.shared.array(2, np.int64)
    s, thread = cuda.blockIdx.x, cuda.threadIdx.x
    place, start, leans = _start(segments, s)
    a, b = changes.edges[s], changes.edges[s + 1]
    indices, hots = changes.indices[a:b], _hot(hot, s)
    moved = Moves(changes.moved.exponents[a:b], changes.moved.ups[a:b], changes.moved.sizes[a:b])
    stream = out[slots[s] : slots[s + 1]]
    coder, walk = _start_encoder(), _begin_telling(place, start, hots, moved)
    half = 0
    while True:
        mine = events[EVENTS * half : EVENTS * (half + 1)]
        if thread == 0:
            told[half], walk = _tell(mine, place, start, hots, indices, moved, leans, walk)
        cuda.syncthreads()
        if told[half] == 0:
            break
        if thread == WARP:
            coder = _code(coder, stream, start.states, mine, told[half])
        half = 1 - half
    if thread == WARP:
        nbytes[s] = _end_coding(coder, stream)


@kernel
def _decode(like, layout, segments, hot, coded, sign, floating, found):
    s = cuda.blockIdx.x
    if cuda.threadIdx.x == 0:
        place, start, leans = _start(segments, s)
        a, b = coded.edges[s], coded.edges[s + 1]
        changed = Changed(found.raw[a:b], found.ups[a:b], found.sizes[a:b])
        stream = coded.data[coded.begins[s] : coded.ends[s]]
        split = _decode_stream(stream, place, start, _hot(hot, s), leans, changed)
        found.broken[s] = 1
        if split >= 0:
            new = found.moved[a:b]
            for j in range(b - a):
                new[j] = element(like, layout, s, np.int64(changed.indices[j]))
            _undo_moves(changed.ups, changed.sizes, sign, floating, new)
            if _merge_runs(changed.indices, new, split, found.indices[a:b], found.values[a:b]):
                found.broken[s] = 0


@kernel
def _pack(out, slots, at, packed):
    """A block moves a segment's stream from its slot to its place among the streams."""
    s = cuda.blockIdx.x
    for j in range(cuda.threadIdx.x, at[s + 1] - at[s], THREADS):
        packed[at[s] + j] = out[slots[s] + j]


def count_exponents(memory: MemoryRows, field: Field, itemsize: int, every: NDArray[np.int64]) -> NDArray[np.int32]:
    """As `cpu.coding.count_exponents`."""
    return count_in_regions(Regions(memory, itemsize), field, every)


def _batches(memory: MemoryRows, kind: Kind, starts: Starts) -> Iterator[slice]:
    """The segments in runs that take at most SCRATCH bytes, or one of them."""
    elements = memory.rows * memory.runs
    others = SLACK + 8 * starts.states.shape[1] + 4 * kind.strides + elements * kind.itemsize // 8
    takes = others + HOT_NBYTES * elements
    if takes.sum() > SCRATCH:  # were all elements hot: few are
        takes = others + HOT_NBYTES * count_hot(
            Regions(memory, kind.itemsize), kind.field, starts.thresholds[kind.classes]
        )
    begun, held = 0, 0
    for s, nbytes in enumerate(takes.tolist()):
        if s > begun and held + nbytes > SCRATCH:
            yield slice(begun, s)
            begun, held = s, 0
        held += nbytes
    if begun < len(takes):
        yield slice(begun, len(takes))


class _Batch:
    """Segments that are coded at once."""

    def __init__(self, memory: MemoryRows, kind: Kind, starts: Starts, chosen: slice) -> None:
        field, itemsize, strides, phases, classes = kind
        self.kind = Kind(field, itemsize, strides[chosen], phases[chosen], classes[chosen])
        self.regions = Regions(memory.of(chosen), itemsize)
        self.segments = _segments(self.kind, self.regions.sizes, starts)
        self.hot: HotElements = find_hot(self.regions, field, starts.thresholds[self.kind.classes])

    def of(self, changes: SegmentMoves, first: int) -> _Changes:
        """Its part of the changes. first: the number of its first segment."""
        edges = changes.edges[first : first + len(self.regions) + 1]
        a, b = int(edges[0]), int(edges[-1])
        moved = Moves(*(upload(each[a:b]) for each in changes.moved))
        return _Changes(upload(edges - a), upload(changes.indices[a:b]), moved)


def count_bits(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> None:
    """As `cpu.coding.count_bits`."""
    for chosen in _batches(memory, kind, starts):
        batch = _Batch(memory, kind, starts._replace(states=np.zeros_like(starts.states)), chosen)
        mine = batch.of(changes, chosen.start)
        _run_encode(batch, mine, np.zeros(len(batch.regions), np.int64))  # no memory for streams: it counts
        found = download(batch.segments.states)
        for number, counts in enumerate(starts.states):
            counts += found[batch.kind.classes == number].sum(0)


def encode_segments(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> list[bytes | None]:
    """As `cpu.coding.encode_segments`. Indices and moves may also be device arrays."""
    streams: list[bytes | None] = []
    for chosen in _batches(memory, kind, starts):
        streams += _encode_batch(memory, kind, starts, changes, chosen)
    return streams


def _encode_batch(
    memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves, chosen: slice
) -> list[bytes | None]:
    batch = _Batch(memory, kind, starts, chosen)
    mine = batch.of(changes, chosen.start)
    full = batch.regions.sizes * kind.itemsize
    counts, hot = np.diff(changes.edges[chosen.start : chosen.stop + 1]), np.diff(download(batch.hot.edges))
    most = np.minimum(full, STREAM_NBYTES + CHANGE_NBYTES * counts + hot // 8)
    coded = _coded(batch, mine, most)
    for s in [s for s, stream in enumerate(coded) if stream is None and most[s] < full[s]]:
        again = slice(chosen.start + s, chosen.start + s + 1)
        one = _Batch(memory, kind, starts, again)
        coded[s] = _coded(one, one.of(changes, again.start), full[s : s + 1])[0]
    return coded


def _run_encode(
    batch: _Batch, changes: _Changes, room: NDArray[np.int64]
) -> tuple[DeviceArray, DeviceArray, NDArray[np.int64]]:
    """Code, or count where there is no room. Returns the streams' memory, where each one's begins, and their bytes."""
    slots = upload(np.concatenate([[0], np.cumsum(room)]))
    out, nbytes = empty(int(room.sum()), np.uint8), empty(len(room), np.int64)
    launch(_encode, len(room), 2 * WARP, batch.segments, batch.hot, changes, out, slots, nbytes)
    return out, slots, download(nbytes)


def _coded(batch: _Batch, changes: _Changes, most: NDArray[np.int64]) -> list[bytes | None]:
    """Streams of at most these many bytes, (segments,); None for a longer one."""
    out, slots, nbytes = _run_encode(batch, changes, most + SLACK)
    at = np.concatenate([[0], np.cumsum(np.maximum(nbytes, 0))])
    packed = empty(int(at[-1]), np.uint8)
    launch(_pack, len(nbytes) if at[-1] else 0, THREADS, out, slots, upload(at), packed)
    data = download(packed).tobytes()
    return [None if n < 0 else data[a : a + n] for n, a in zip(nbytes.tolist(), at.tolist(), strict=False)]


def decode_segments(
    streams: Streams, memory: MemoryRows, kind: Kind, starts: Starts, edges: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], UIntArray] | int:
    """As `cpu.coding.decode_segments`."""
    indices, values = np.empty(int(edges[-1]), np.uint32), np.empty(int(edges[-1]), UINTS[kind.itemsize])
    for chosen in _batches(memory, kind, starts):
        mine = edges[chosen.start : chosen.stop + 1]
        found = _decode_batch(_Batch(memory, kind, starts, chosen), streams.of(chosen), mine - mine[0])
        broken = np.flatnonzero(download(found.broken))
        if len(broken):
            return int(chosen.start + broken[0])
        indices[mine[0] : mine[-1]], values[mine[0] : mine[-1]] = download(found.indices), download(found.values)
    return indices, values


def _decode_batch(batch: _Batch, streams: Streams, edges: NDArray[np.int64]) -> _Found:
    """Queue the decoding of a batch."""
    count, dtype = int(edges[-1]), UINTS[batch.kind.itemsize]
    first, last = int(streams.begins[0]), int(streams.ends[-1])  # they follow one another
    found = _Found(
        raw=empty(count, np.uint32),
        ups=empty(count, np.bool_),
        sizes=empty(count, np.uint64),
        moved=empty(count, dtype),
        indices=empty(count, np.uint32),
        values=empty(count, dtype),
        broken=empty(len(streams.ends), np.uint8),
    )
    begins, ends = upload(streams.begins - first), upload(streams.ends - first)
    coded = _Coded(upload(edges), begins, ends, upload(streams.data[first:last]))
    field = batch.kind.field
    known = example(batch.kind.itemsize), batch.regions.layout, batch.segments, batch.hot, coded
    launch(_decode, len(streams.ends), WARP, *known, np.uint64(field.sign), field.floating, found)
    return found
