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

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs import model
from pulse_rl.codecs.base import (
    Decoded,
    OldBits,
    OldReader,
    Run,
    Specs,
    Units,
    cut,
    joined_specs,
)
from pulse_rl.codecs.model import PLAIN, Ints, Model
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu import coding, context, moves
from pulse_rl.kernels.cpu.coding import Starts, Streams
from pulse_rl.kernels.cpu.context import Start
from pulse_rl.kernels.cpu.rangecoder import decode_numbers, encode_numbers
from pulse_rl.parallel import ordered_map, sliced
from pulse_rl.weights.changes import Changes, find_changes
from pulse_rl.weights.devices import HOST, Device

SAMPLED_SIZE = 1 << 9  # elements of a segment of which exponents are counted at least, if it has so many
SAMPLED_EVERY = 64  # runs of elements, of which one is counted in large segments
# Contexts are counted in so many elements of a class; in more, up to SAMPLE_MOST, where fewer changes are among them.
# All of SAMPLE_MOST would take a seventh more of the time of coding, for 0.1 % fewer bytes (SmolLM2-135M).
SAMPLE, SAMPLE_CHANGES, SAMPLE_MOST = 1 << 22, 1 << 11, 1 << 24
BATCH = 1 << 21  # elements of the segments that one call codes or decodes
READ_BATCH = 1 << 18  # elements where the old bits are read first, as those of a version under an overlay are
NONE = np.empty(0, np.int64)
# Coded and decoded, a decision takes some 20 ns: 1/128 bit on a link of 0.4 Mbit/s. Of models whose changes reach to
# large exponents, half the decisions and a third of the time for 1 % of bytes; of others nothing.
PRICE = 16
# The codes of a view change seldom, so a decision about one saves little, and there are many: 1/32 bit on a link of
# 1.6 Mbit/s. Of FP8 views, a fifth to a third of the time for 5 % of bytes.
ONE_BYTE_PRICE = 64
ALL = 1 << 62  # on a device, which codes segments one beside the other: it takes as many as it has memory for
COPIED = 1 << 26  # on a device, where the old bits are copied first: 128 MB of BF16, of a few calls at once


class ContextCodec:
    """Adaptive binary range coder in contexts of the old values.

    price: what deciding about one hot element has to save, in 1/2048 bits, for the time that it takes; of one-byte
    elements at least ONE_BYTE_PRICE. It is the encoder's choice, which a decoder need not know.
    """

    name = "context"
    conditional = True
    block_nbytes = 4 << 20

    def __init__(self, *, price: int = PRICE) -> None:
        self._price = price

    def is_dense(self, specs: Specs) -> NDArray[np.bool_]:
        # None is: that is decided for each segment while it is coded, and stated in the head.
        return np.zeros(specs.segments, np.bool_)

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        numbers, kinds = list[int](), b""  # of the head
        streams = [b""] * sum(spans)
        groups: dict[str, list[tuple[int, Run]]] = {}  # by dtype, in order of first appearance
        first = 0  # segment of each run
        for run in runs:
            if len(run.replaced):
                groups.setdefault(run.specs.dtype, []).append((first, run))
            first += run.segments
        for dtype, members in groups.items():
            group = _Group(dtype, members)
            price = max(self._price, ONE_BYTE_PRICE) if ITEMSIZES[dtype] == 1 else self._price
            classes, models, coded = _encode_group(group, price)
            numbers += model.group_numbers(group.field, group.changed, classes, models, coded)
            kinds += model.group_kinds(group.field, len(group.numbers))
            for number, stream in zip(group.numbers.tolist(), coded, strict=True):
                streams[number] = stream
        head = encode_numbers(np.array(numbers, np.int64), np.frombuffer(kinds, np.uint8))
        left = iter(streams)
        return head, [b"".join(islice(left, size)) for size in spans]

    def open(
        self, shared: memoryview, specs: Sequence[Specs], spans: Sequence[int]
    ) -> list[Callable[[Sequence[memoryview]], Units]]:
        groups: dict[str, list[NDArray[np.int64]]] = {}  # of those that change by dtype, in order of first appearance
        first = 0
        for each in specs:
            changing = np.flatnonzero(each.changed)
            if len(changing):
                groups.setdefault(each.dtype, []).append(first + changing)
            first += each.segments
        members = {dtype: np.concatenate(numbers) for dtype, numbers in groups.items()}
        kinds = [model.group_kinds(field_of(dtype), len(mine)) for dtype, mine in members.items()]
        numbers = decode_numbers(shared, np.frombuffer(b"".join(kinds), np.uint8))
        if numbers is None:
            raise FormatError("context block: its head is broken")
        sizes, changed = (np.concatenate([NONE, *(each[column] for each in specs)]) for column in (1, 2))
        classes, nbytes = np.full(first, PLAIN), np.zeros(first, np.int64)
        starts: dict[str, Starts] = {}
        for (dtype, mine), kind in zip(members.items(), kinds, strict=True):
            full = sizes[mine] * ITEMSIZES[dtype]
            found = model.read_group(numbers[: len(kind)], field_of(dtype), changed[mine], full)
            models, classes[mine], nbytes[mine] = found
            starts[dtype] = coding.starts_of([one.start() for one in models])
            numbers = numbers[len(kind) :]
        ends = np.cumsum(spans)
        return [
            partial(_units, members, starts, classes[a:b], nbytes[a:b])
            for members, a, b in zip(cut(specs, spans), ends - spans, ends, strict=True)
        ]


def _units(
    specs: Sequence[Specs], starts: dict[str, Starts], classes: Ints, nbytes: Ints, payloads: Sequence[memoryview]
) -> Units:
    """The units of spans: their segments."""
    ends, payload = np.cumsum(nbytes), payloads[0] if len(payloads) == 1 else b"".join(payloads)
    if nbytes.sum() != len(payload):
        raise FormatError(f"context block: expected {nbytes.sum()} bytes, found {len(payload)}")
    streams = Streams(np.frombuffer(payload, np.uint8), ends - nbytes, ends)
    return Units(np.ones(len(nbytes), np.int64), partial(_decode, _Span(specs, streams, classes, starts)))


# Encoding


def _encode_group(group: "_Group", price: int) -> tuple[Ints, list[Model], list[bytes]]:
    """Code segments of one dtype, with what is learned from them.

    Returns the class of each segment (len(models) for a plain one), the models, and the streams.
    """
    field, batches = group.field, group.batches()
    # 1. Count exponents, of all elements and of those that change, and part the segments into classes by them.
    counted = model.join(list(ordered_map(group.measure, batches)))
    classes, activities = model.classify(counted, field.exponents)
    thresholds = [
        model.threshold(*counted.all_of(classes == number, field.exponents), activity, price)
        for number, activity in enumerate(activities)
    ]
    # 2. Count every context's bits in a sample of each class, and learn its model from the counts.
    nothing = np.zeros(context.tables(field.exponents).size, np.int64)
    blank = [
        Start(threshold, model.share(activity), nothing)
        for threshold, activity in zip(thresholds, activities, strict=True)
    ]
    counts = np.zeros((len(blank), len(nothing)), np.int64)
    sampled = group.batches(_sample(classes, group.sizes, group.changed))
    for found in ordered_map(partial(group.count, classes=classes, starts=blank), sampled):
        counts += found
    models = [
        model.learn(field, thresholds[number], activity, counts[number], counts.sum(0))
        for number, activity in enumerate(activities)
    ]
    # 3. Code every segment from its model; one that would take more bytes than its elements is written plain.
    starts = coding.starts_of([learned.start() for learned in models])
    several = ordered_map(partial(group.code, classes=classes, starts=starts), batches)
    streams = [stream for coded in several for stream in coded]
    classes[[number for number, stream in enumerate(streams) if stream is None]] = len(models)
    return classes, models, [group.plain(at) if stream is None else stream for at, stream in enumerate(streams)]


class _Group:
    """Segments of one dtype that change, to be coded together in batches: ascending numbers of some of them.

    runs: those that hold them, each with the number of its first segment in the block.
    """

    def __init__(self, dtype: str, runs: Sequence[tuple[int, Run]]) -> None:
        self.field, self._itemsize = field_of(dtype), ITEMSIZES[dtype]
        chosen = [np.flatnonzero(run.specs.changed) for _, run in runs]
        columns = [(first + some, *run.specs.of(some)[1:]) for (first, run), some in zip(runs, chosen, strict=True)]
        joined = map(np.concatenate, zip(*columns, strict=True))
        self.numbers, self.sizes, self.changed, self._strides, self._phases = joined
        self._edges = np.concatenate([[0], np.cumsum(self.changed)])
        self._indices, self._values, self._replaced = (
            np.concatenate(each) for each in zip(*((*run.changes, run.replaced) for _, run in runs), strict=True)
        )
        self._moved = moves.no_moves(int(self._edges[-1]))  # filled in by `measure`
        self._runs = [run for _, run in runs]
        self._run = np.repeat(np.arange(len(runs)), [len(some) for some in chosen])  # of each segment
        self._place = np.concatenate(chosen)  # of each segment in its run
        # Kernels use the old bits that lie on one device, or copies of them.
        lying = [run.lying.of(some) for run, some in zip(self._runs, chosen, strict=True) if run.lying is not None]
        known = len(lying) == len(runs)
        whole = known and all(one.usable.all() for one in lying)
        devices = {one.device for one in lying} if whole else {run.old.device for run in self._runs}
        self._device = devices.pop() if len(devices) == 1 else HOST
        self._usable = np.zeros(len(self.sizes), np.bool_)
        if known:
            self._usable = np.concatenate([one.usable & (one.device is self._device) for one in lying])
            self._lies = coding.joined_memory([one.memory for one in lying])

    def batches(self, numbers: Ints | None = None) -> list[Ints]:
        """Some of the segments, or all, in the runs that one call takes."""
        chosen = np.arange(len(self.sizes)) if numbers is None else numbers
        most = _batch(self._device, bool(self._usable.all()))
        return [chosen[some] for some in sliced(self.sizes[chosen], most)]

    def measure(self, batch: Ints) -> model.ExponentCounts:
        """How many elements of each segment have each exponent, and of those that change."""
        every = np.clip(self.sizes[batch] // SAMPLED_SIZE, 1, SAMPLED_EVERY)
        with self._device.coder() as coder:
            elements = coder.count_exponents(self._memory(batch), self.field, self._itemsize, every)
        edges = self._edges[batch[0] : batch[-1] + 2]
        here = slice(edges[0], edges[-1])
        mine = self._moved.at(here)
        moves.find_moves(self._replaced[here], self._values[here], self.field, mine)
        width = self.field.exponents
        which = np.repeat(np.arange(len(batch)) * width, np.diff(edges)) + mine.exponents
        changes = np.bincount(which, minlength=len(batch) * width).reshape(-1, width)
        exponents = np.flatnonzero(elements.any(0) | changes.any(0))  # most are those of no element
        of_changes = changes[:, exponents]
        # Of a sample, there may be fewer elements than changes.
        return model.ExponentCounts(exponents, np.maximum(elements[:, exponents], of_changes), of_changes)

    def count(self, batch: Ints, *, classes: Ints, starts: Sequence[Start]) -> Ints:
        """Count the bits of a batch, (classes, contexts)."""
        counts = coding.starts_of(starts)
        with self._device.coder() as coder:
            coder.count_bits(*self._given(batch, classes), counts, self._changes(batch))
        return counts.states

    def code(self, batch: Ints, *, classes: Ints, starts: Starts) -> list[bytes | None]:
        """Each segment's stream; None for one that would be too long."""
        with self._device.coder() as coder:
            return coder.encode_segments(*self._given(batch, classes), starts, self._changes(batch))

    def _given(self, batch: Ints, classes: Ints) -> tuple[coding.MemoryRows, coding.Kind]:
        strides, phases = self._strides[batch], self._phases[batch]
        return self._memory(batch), coding.Kind(self.field, self._itemsize, strides, phases, classes[batch])

    def _memory(self, batch: Ints) -> coding.MemoryRows:
        """The old bits, read where they cannot be used as they lie."""
        if self._usable[batch].all():
            return self._lies.of(batch)
        runs, places = self._run[batch], self._place[batch]
        several = [self._runs[run].old.several(places[runs == run]) for run in np.unique(runs).tolist()]
        return coding.joined_memory(several)

    def _changes(self, batch: Ints) -> coding.SegmentMoves:
        counts = self.changed[batch]
        edges = np.concatenate([[0], np.cumsum(counts)])
        if len(batch) == batch[-1] - batch[0] + 1:
            here = slice(self._edges[batch[0]], self._edges[batch[-1] + 1])
            return coding.SegmentMoves(edges, self._indices[here], self._moved.at(here))  # views
        chosen = np.arange(edges[-1]) + np.repeat(self._edges[batch] - edges[:-1], counts)
        return coding.SegmentMoves(edges, self._indices[chosen], self._moved.at(chosen))

    def plain(self, number: int) -> bytes:
        """All new elements of a segment."""
        run = self._runs[int(self._run[number])]
        return run.every(int(self._place[number])).tobytes()


def _batch(device: Device, lying: bool) -> int:
    """Elements of the segments that one call takes. device: where the old bits lie, or copies of them are made."""
    if device is not HOST:
        return ALL if lying else COPIED
    return BATCH if lying else READ_BATCH


def _sample(classes: Ints, sizes: Ints, changed: Ints) -> Ints:
    """Segments of each class that are enough for its statistics, evenly spaced, ascending."""
    chosen = list[Ints]()
    for number in range(int(classes.max()) + 1):
        mine = np.flatnonzero(classes == number)
        size, changes = (max(1, int(each[mine].sum())) for each in (sizes, changed))
        most = min(SAMPLE_MOST, max(SAMPLE, size * SAMPLE_CHANGES // changes))
        count = min(len(mine), -(-len(mine) * most // size))
        chosen.append(mine[(np.arange(count) * len(mine) + len(mine) // 2) // max(1, count)])
    return np.sort(np.concatenate(chosen))


# Decoding


class _Span(NamedTuple):
    """A span to be decoded."""

    specs: Sequence[Specs]
    streams: Streams  # of each segment
    classes: Ints  # (segments,) of the starts, or PLAIN
    starts: dict[str, Starts]  # by dtype


def _decode(span: _Span, numbers: NDArray[np.int64], read: OldReader, old: OldBits | None) -> list[Decoded]:
    """The changes of some segments of a span."""
    chosen, first = list[tuple[Specs, NDArray[np.int64]]](), 0  # of each run, and their places among all
    for specs in span.specs:
        begun, end = np.searchsorted(numbers, [first, first + specs.segments])
        if begun < end:
            chosen.append((specs.of(numbers[begun:end] - first), np.arange(begun, end)))
        first += specs.segments
    changes: dict[str, Changes] = {}  # of each dtype
    for dtype in dict.fromkeys(specs.dtype for specs, _ in chosen):
        runs, where = zip(*(run for run in chosen if run[0].dtype == dtype), strict=True)
        alike, places = joined_specs(runs), np.concatenate(where)
        changes[dtype] = Changes(np.empty(0, np.uint32), np.empty(0, UINTS[alike.itemsize]))
        changing = np.flatnonzero(alike.changed)
        if len(changing):
            mine = numbers[places[changing]]
            streams, classes = span.streams.of(mine), span.classes[mine]
            some = _Segments(alike.of(changing), streams, classes, span.starts[dtype], places[changing], read, old)
            changes[dtype] = some.decode()
    found = list[Decoded]()
    for specs, _ in chosen:
        (indices, values), size = changes[specs.dtype], int(specs.changed.sum())
        found.append(Decoded(specs.changed, Changes(indices[:size], values[:size])))
        changes[specs.dtype] = Changes(indices[size:], values[size:])
    return found


class _Segments(NamedTuple):
    """Segments of one dtype and block that change."""

    specs: Specs
    streams: Streams
    classes: Ints
    starts: Starts
    places: NDArray[np.int64]  # of each among those whose old bits are known
    read: OldReader
    old: OldBits | None

    @property
    def _device(self) -> Device:
        return self.read.device if self.old is None else self.old.device

    def decode(self) -> Changes:
        """Their changes."""
        plain = self.classes == PLAIN
        apart = [self._plain(number) for number in np.flatnonzero(plain).tolist()]
        coded, least = np.flatnonzero(~plain), _batch(self._device, self.old is not None)
        found = [self._coded(coded[some]) for some in sliced(self.specs.sizes[coded], least)]
        if not apart:
            return _joined(found)
        order = np.argsort(np.repeat(plain, self.specs.changed), kind="stable")  # those that are not plain come first
        joined = _joined([*found, *apart])
        indices, values = map(np.empty_like, joined)
        indices[order], values[order] = joined
        return Changes(indices, values)

    def _coded(self, some: NDArray[np.int64]) -> Changes:
        """Of segments of which none is plain."""
        dtype, sizes, changed, strides, phases = self.specs.of(some)
        kind = coding.Kind(field_of(dtype), ITEMSIZES[dtype], strides, phases, self.classes[some])
        streams, places = self.streams.of(some), self.places[some]
        edges = np.concatenate([[0], np.cumsum(changed)])
        with self._device.coder() as coder:
            memory = self.read.several(places) if self.old is None else self.old.memory.of(places)
            decoded = coder.decode_segments(streams, memory, kind, self.starts, edges)
        if isinstance(decoded, int):
            raise FormatError(
                f"context segment: a stream of {streams.ends[decoded] - streams.begins[decoded]} bytes does not hold "
                f"{changed[decoded]} changes of {sizes[decoded]} elements"
            )
        return Changes(*decoded)

    def _plain(self, number: int) -> Changes:
        data, begins, ends = self.streams
        old, expected = self.read.one(int(self.places[number])).reshape(-1), self.specs.changed[number]
        new = data[begins[number] : ends[number]].tobytes()
        changes = find_changes(old, np.frombuffer(new, UINTS[self.specs.itemsize]))
        if len(changes.indices) != expected:
            raise FormatError(f"context segment: expected {expected} changes, found {len(changes.indices)}")
        return changes


def _joined(several: Sequence[Changes]) -> Changes:
    return several[0] if len(several) == 1 else Changes(*map(np.concatenate, zip(*several, strict=True)))
