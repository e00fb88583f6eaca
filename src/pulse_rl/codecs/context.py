"""The context codec: the bits that the receiver holds already say where changes are likely, and how large they are.

Whether a weight changes depends almost only on its magnitude, because the distance to its neighbours does; and the new
value is the old one moved by a few such distances. So every segment is coded as decisions of an adaptive binary range
coder, each in the context of the old value's exponent: one bit for every *hot* element (below a threshold) says whether
it changes, gaps lead to the few changes among the others, and each change has a direction and a number of steps. The
statistics that segments start from are sent once per block (`model`), so that segments decode independently.

What the segments of a block share is the *head*: their statistics, and the length of each segment's stream. A span is
the streams of its segments. `docs/format.md` describes every bit, `docs/codec.md` the reasons. The kernels that code
the bits of a segment are in `kernels.cpu.context`.

Where all old bits of a block lie on a device, that device counts and codes: it has kernels with the same bytes.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pulse_rl.codecs import model
from pulse_rl.codecs.base import OldBits, Read, Run, SegmentChanges, SegmentSpec, Unit, Units, consecutive, run_of
from pulse_rl.codecs.model import Counts, Ints, Model
from pulse_rl.dtypes import ITEMSIZES, UINTS, Field, UIntArray, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import coding, context, moves
from pulse_rl.kernels.cpu.coding import Starts
from pulse_rl.kernels.cpu.context import Start
from pulse_rl.kernels.cpu.rangecoder import decode_numbers, encode_numbers
from pulse_rl.parallel import batched, ordered_map
from pulse_rl.weights.changes import Changes, find_changes
from pulse_rl.weights.devices import HOST, Device

SAMPLED_SIZE = 1 << 16  # elements; in larger segments only every 64th run's exponents are counted
SAMPLED_EVERY = 64
SAMPLE = 32  # segments of a class whose contexts are counted
BATCH = 1 << 21  # elements of the segments that one call codes or decodes
READ_BATCH = 1 << 18  # elements where the old bits are read first, as those of a version under an overlay are
ALL = 1 << 62  # on a device, which codes segments one beside the other: it takes as many as it has memory for


class ContextCodec:
    """Adaptive binary range coder in contexts of the old values.

    price: what deciding about one hot element may cost above its savings, in 1/2048 bits, for the time that decoding it
    takes. It is the encoder's choice, which a decoder need not know.
    """

    name = "context"
    conditional = True
    block_nbytes = 4 << 20

    def __init__(self, *, price: int = 1) -> None:
        self._price = price

    def is_dense(self, spec: SegmentSpec) -> bool:
        return False  # decided for each segment while it is coded, and stated in the head

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        numbers: list[int] = []  # of the head
        kinds: list[int] = []
        streams = [b""] * sum(spans)
        groups: dict[str, list[tuple[int, Run]]] = {}  # by dtype, in order of first appearance
        first = 0  # segment of each run
        for run in runs:
            if len(run.replaced):
                groups.setdefault(run.dtype, []).append((first, run))
            first += len(run.sizes)
        for group in (_Group(dtype, members) for dtype, members in groups.items()):
            classes, models, coded = _encode_group(group, self._price)
            numbers += _group_numbers(group.field, group.changed, classes, models, coded)
            kinds += _kinds(group.field, len(group.numbers))
            for number, stream in zip(group.numbers.tolist(), coded, strict=True):
                streams[number] = stream
        head = encode_numbers(np.array(numbers, np.int64), np.array(kinds, np.uint8))
        return head, [b"".join(members) for members in consecutive(streams, spans)]

    def encode_block(self, segments: Sequence[SegmentChanges]) -> bytes:
        """Encode one block of one span as `u32 n | head of n bytes | span`."""
        head, (span,) = self.encode(list(map(run_of, segments)), [len(segments)])
        return struct.pack("<I", len(head)) + head + span

    def open_block(self, block: memoryview, specs: Sequence[SegmentSpec]) -> list[Unit]:
        """The units of what `encode_block` has made. Raises FormatError."""
        if len(block) < 4:
            raise FormatError(f"context block: expected at least 4 bytes, found {len(block)}")
        (nbytes,) = struct.unpack_from("<I", block)
        return self.open(block[4 : 4 + nbytes], specs, [len(specs)])[0](block[4 + nbytes :]).each()

    def open(
        self, shared: memoryview, specs: Sequence[SegmentSpec], spans: Sequence[int]
    ) -> list[Callable[[memoryview], Units]]:
        groups = _groups(specs)
        kinds = [kind for dtype, members in groups.items() for kind in _kinds(field_of(dtype), len(members))]
        numbers = decode_numbers(shared, np.array(kinds, np.uint8))
        if numbers is None:
            raise FormatError("context block: its head is broken")
        streams = [_Stream(0, None)] * len(specs)
        for dtype, members in groups.items():
            count = len(_kinds(field_of(dtype), len(members)))
            found = _read_group(numbers[:count], field_of(dtype), [specs[number] for number in members])
            for number, stream in zip(members, found, strict=True):
                streams[number] = stream
            numbers = numbers[count:]
        cut = zip(consecutive(specs, spans), consecutive(streams, spans), strict=True)
        return [partial(_units, *parts) for parts in cut]


def _units(specs: Sequence[SegmentSpec], streams: Sequence["_Stream"], payload: memoryview) -> Units:
    """The units of a span: its segments."""
    at = [0, *accumulate(stream.nbytes for stream in streams)]
    if at[-1] != len(payload):
        raise FormatError(f"context block: expected {at[-1]} bytes, found {len(payload)}")
    held = [_Held(spec, payload[a:b], stream) for spec, stream, a, b in zip(specs, streams, at, at[1:], strict=False)]
    return Units([1] * len(held), partial(_decode, held))


def _groups(specs: Sequence[SegmentSpec]) -> dict[str, list[int]]:
    """The numbers of the segments that change, by dtype, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        if spec.changed:
            groups.setdefault(spec.dtype, []).append(number)
    return groups


# The head: for each group its models, the mean, and class and length of each segment


def _kinds(field: Field, members: int) -> list[int]:
    """The kinds of the head's numbers for a group of this many segments."""
    return model.kinds(field) * min(model.CLASSES, members) + [model.MEAN] + [model.CLASS, model.LENGTH] * members


def _group_numbers(
    field: Field, changed: Ints, classes: Ints, models: list[Model], streams: Sequence[bytes]
) -> list[int]:
    """The numbers of a group. A stream's length is stated as the difference from what the mean predicts."""
    plain = classes == len(models)
    if plain.all():
        models = [model.blank(field)] * len(models)
    numbers: list[int] = []
    for before, learned in zip([None, *models], models, strict=False):
        numbers += model.to_numbers(learned, before, field)
    lengths = np.array([len(stream) for stream in streams])
    mean = (int(lengths[~plain].sum()) << 8) // max(1, int(changed[~plain].sum()))
    residues = np.where(plain, 0, model.zigzag(lengths - ((changed * mean) >> 8)))
    return [*numbers, mean, *np.stack([classes, residues], axis=1).reshape(-1).tolist()]


class _Stream(NamedTuple):
    """What the head says of a segment's stream."""

    nbytes: int
    starts: Starts | None  # of its group; None for a plain stream, and where nothing changes
    number: int = 0  # of its class


def _read_group(numbers: Ints, field: Field, specs: Sequence[SegmentSpec]) -> list[_Stream]:
    """The inverse of `_group_numbers`. Raises FormatError for a class or a length out of range."""
    width = len(model.kinds(field))
    models: list[Model] = []
    for place in range(min(model.CLASSES, len(specs))):
        before = models[-1] if models else None
        models.append(model.from_numbers(numbers[place * width : (place + 1) * width], before, field))
    starts = coding.starts_of([one.start() for one in models])
    mean, *rest = numbers[len(models) * width :].tolist()
    streams = []
    for spec, number, residue in zip(specs, rest[::2], model.unzigzag(np.array(rest[1::2])).tolist(), strict=True):
        full = spec.size * spec.itemsize
        nbytes = full if number == len(models) else ((spec.changed * mean) >> 8) + residue
        if number > len(models) or not 0 <= nbytes <= full:
            raise FormatError(f"context block: a segment of {full} bytes has class {number} and {nbytes} bytes")
        streams.append(_Stream(nbytes, starts if number < len(models) else None, number))
    return streams


# Encoding


def _encode_group(group: "_Group", price: int) -> tuple[Ints, list[Model], list[bytes]]:
    """Code segments of one dtype, with what is learned from them.

    Returns the class of each segment (len(models) for a plain one), the models, and the streams.
    """
    field, batches = group.field, group.batches()
    # 1. Count exponents, of all elements and of those that change, and part the segments into classes by them.
    counted = list(ordered_map(group.measure, batches))
    elements, changes = (np.concatenate(each) for each in zip(*counted, strict=True))
    np.maximum(elements, changes, out=elements)  # of a sample, there may be fewer
    classes, activities = model.classify(elements, changes)
    thresholds = [
        model.threshold(elements[classes == number].sum(0), changes[classes == number].sum(0), activity, price)
        for number, activity in enumerate(activities)
    ]
    # 2. Count every context's bits in a sample of each class, and learn its model from the counts.
    nothing = np.zeros(context.tables(field.exponents).size, np.int64)
    blank = [
        Start(threshold, model.share(activity), nothing)
        for threshold, activity in zip(thresholds, activities, strict=True)
    ]
    counts = np.zeros((len(blank), len(nothing)), np.int64)
    sampled = group.batches(_sample(classes))
    for found in ordered_map(partial(group.count, classes=classes, starts=blank), sampled):
        counts += found
    models = [
        model.learn(field, thresholds[number], activity, counts[number], counts.sum(0))
        for number, activity in enumerate(activities)
    ]
    # 3. Code every segment from its model; one that would take more bytes than its elements is written plain.
    starts = coding.starts_of([learned.start() for learned in models])
    streams = list[bytes]()
    for coded in ordered_map(partial(group.code, classes=classes, starts=starts), batches):
        for stream in coded:
            if stream is None:
                classes[len(streams)] = len(models)
                stream = group.plain(len(streams))
            streams.append(stream)
    return classes, models, streams


class _Group:
    """Segments of one dtype that change, to be coded together in batches: ascending numbers of some of them.

    runs: those that hold them, each with the number of its first segment in the block.
    """

    def __init__(self, dtype: str, runs: Sequence[tuple[int, Run]]) -> None:
        self.field, self._itemsize = field_of(dtype), ITEMSIZES[dtype]
        chosen = [np.flatnonzero(run.counts) for _, run in runs]
        columns = [
            (first + some, run.sizes[some], run.strides[some], run.phases[some], run.counts[some], run.usable[some])
            for (first, run), some in zip(runs, chosen, strict=True)
        ]
        joined = map(np.concatenate, zip(*columns, strict=True))
        self.numbers, self._sizes, self._strides, self._phases, self.changed, usable = joined
        self._edges = np.concatenate([[0], np.cumsum(self.changed)])
        self._indices, self._values, self._replaced = (
            np.concatenate(each) for each in zip(*((*run.changes, run.replaced) for _, run in runs), strict=True)
        )
        self._moved = moves.no_moves(int(self._edges[-1]))  # filled in by `measure`
        self._where = [(run, int(at)) for (_, run), some in zip(runs, chosen, strict=True) for at in some]
        # Kernels use the old bits that lie on one device.
        devices = {run.device for _, run in runs} if usable.all() else {HOST}
        self._device = devices.pop() if len(devices) == 1 else HOST
        here = zip((run for _, run in runs), chosen, strict=True)
        places = [(*run.memory.of(some)[:4], np.full(len(some), run.device is self._device)) for run, some in here]
        *lies, there = map(np.concatenate, zip(*places, strict=True))
        self._lies, self._usable = coding.Memory(lies[0], lies[1], lies[2], lies[3], runs), usable & there

    def batches(self, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """Some of the segments, or all, in the runs that one call takes."""
        chosen = range(len(self._sizes)) if numbers is None else numbers
        least = _batch(self._device if self._usable.all() else None)
        return list(batched(chosen, self._sizes.tolist().__getitem__, least))

    def measure(self, batch: Sequence[int]) -> tuple[Counts, Counts]:
        """How many elements of each segment have each exponent, and of those that change; (segments, E) each."""
        every = np.where(self._sizes[batch] > SAMPLED_SIZE, SAMPLED_EVERY, 1)
        with self._device.coder() as coder:
            elements = coder.count_exponents(self._memory(batch), self.field, self._itemsize, every)
        edges = self._edges[batch[0] : batch[-1] + 2]
        here = slice(edges[0], edges[-1])
        mine = self._moved.at(here)
        moves.find_moves(self._replaced[here], self._values[here], self.field, mine)
        width = self.field.exponents
        which = np.repeat(np.arange(len(batch)) * width, np.diff(edges)) + mine.exponents
        changes = np.bincount(which, minlength=len(batch) * width).reshape(-1, width)
        return elements, changes.astype(np.int32)

    def count(self, batch: Sequence[int], *, classes: Ints, starts: Sequence[Start]) -> Ints:
        """Count the bits of a batch, (classes, contexts)."""
        counts = coding.starts_of(starts)
        with self._device.coder() as coder:
            coder.count_bits(*self._given(batch, classes), counts, self._changes(batch))
        return counts.states

    def code(self, batch: Sequence[int], *, classes: Ints, starts: Starts) -> list[bytes | None]:
        """Each segment's stream; None for one that would be too long."""
        with self._device.coder() as coder:
            return coder.encode_segments(*self._given(batch, classes), starts, self._changes(batch))

    def _given(self, batch: Sequence[int], classes: Ints) -> tuple[coding.Memory, coding.Kind]:
        strides, phases = self._strides[batch], self._phases[batch]
        return self._memory(batch), coding.Kind(self.field, self._itemsize, strides, phases, classes[batch])

    def _memory(self, batch: Sequence[int]) -> coding.Memory:
        """The old bits, read where they cannot be used as they lie."""
        if self._usable[batch].all():
            return self._lies.of(batch)
        return coding.memory_of([run.read(at) for run, at in (self._where[number] for number in batch)])

    def _changes(self, batch: Sequence[int]) -> coding.Coded:
        edges = np.concatenate([[0], np.cumsum(self.changed[batch])])
        if len(batch) == batch[-1] - batch[0] + 1:
            here = slice(self._edges[batch[0]], self._edges[batch[-1] + 1])
            return coding.Coded(edges, self._indices[here], self._moved.at(here))  # views
        chosen = np.concatenate([np.arange(*self._edges[number : number + 2]) for number in batch])
        return coding.Coded(edges, self._indices[chosen], self._moved.at(chosen))

    def plain(self, number: int) -> bytes:
        """All new elements of a segment."""
        run, at = self._where[number]
        new, here = run.read(at).flatten(), slice(*self._edges[number : number + 2])
        cpu.scatter(new, self._indices[here], self._values[here])
        return new.tobytes()


def _batch(device: Device | None) -> int:
    """Elements of the segments that one call takes. device: where the old bits lie; None where they are read first."""
    if device is None:
        return READ_BATCH
    return BATCH if device is HOST else ALL


def _sample(classes: Ints) -> list[int]:
    """Up to SAMPLE segments of each class, evenly spaced, ascending."""
    chosen: list[int] = []
    for number in range(int(classes.max()) + 1):
        mine = np.flatnonzero(classes == number)
        chosen += mine[:: -(-len(mine) // SAMPLE) or 1].tolist()
    return sorted(chosen)


# Decoding


class _Held(NamedTuple):
    """A segment that can be decoded."""

    spec: SegmentSpec
    data: memoryview
    stream: _Stream


def _decode(span: Sequence[_Held], numbers: Sequence[int], reads: Sequence[Read], old: OldBits | None) -> list[Changes]:
    """The changes of some segments of a span."""
    segments = [span[number] for number in numbers]
    found: list[Changes | None] = [None] * len(segments)
    by_dtype: dict[str, list[int]] = {}
    for number, (spec, _, stream) in enumerate(segments):
        if not spec.changed:
            found[number] = Changes(np.empty(0, np.uint32), np.empty(0, UINTS[spec.itemsize]))
        elif stream.starts is None:
            found[number] = _decode_plain(segments[number], reads[number]())
        else:
            by_dtype.setdefault(spec.dtype, []).append(number)
    for members in by_dtype.values():
        for batch in batched(members, lambda number: segments[number].spec.size, _batch(old.device if old else None)):
            here = old.of(batch) if old else OldBits(coding.memory_of([reads[number]() for number in batch]), HOST)
            decoded = _decode_batch([segments[number] for number in batch], here)
            for number, changes in zip(batch, decoded, strict=True):
                found[number] = changes
    return [changes for changes in found if changes is not None]


def _decode_batch(segments: Sequence[_Held], old: OldBits) -> Iterator[Changes]:
    """Decode segments of one dtype and block."""
    specs, streams, held = zip(*segments, strict=True)
    dtype, starts = specs[0].dtype, held[0].starts
    _, _, changed, strides, phases = zip(*specs, strict=True)
    kind = coding.Kind(
        field_of(dtype),
        ITEMSIZES[dtype],
        np.array(strides, np.int64),
        np.array(phases, np.int64),
        np.array([one.number for one in held], np.int64),
    )
    edges = np.concatenate([[0], np.cumsum(changed)])
    with old.device.coder() as coder:
        decoded = coder.decode_segments(streams, old.memory, kind, starts, edges)
    if isinstance(decoded, int):
        broken, spec = streams[decoded], specs[decoded]
        raise FormatError(
            f"context segment: a stream of {len(broken)} bytes does not hold {spec.changed} changes of "
            f"{spec.size} elements"
        )
    indices, values = decoded
    at = edges.tolist()
    return (Changes(indices[a:b], values[a:b]) for a, b in zip(at, at[1:], strict=False))


def _decode_plain(segment: _Held, old: UIntArray) -> Changes:
    spec, data, _ = segment
    changes = find_changes(old.reshape(-1), np.frombuffer(bytes(data), UINTS[spec.itemsize]))
    if len(changes.indices) != spec.changed:
        raise FormatError(f"context segment: expected {spec.changed} changes, found {len(changes.indices)}")
    return changes
