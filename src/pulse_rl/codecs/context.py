"""The context codec: the bits that the receiver holds already say where changes are likely, and how large they are.

Whether a weight changes depends almost only on its magnitude, because the distance to its neighbours does; and the new
value is the old one moved by a few such distances. So every segment is coded as decisions of an adaptive binary range
coder, each in the context of the old value's exponent: one bit for every *hot* element (below a threshold) says whether
it changes, gaps lead to the few changes among the others, and each change has a direction and a number of steps. The
statistics that segments start from are sent once per block (`model`), so that segments decode independently.

What the segments of a block share is the *head*: their statistics, and the length of each segment's stream. A span is
the streams of its segments. `docs/format.md` describes every bit, `docs/codec.md` the reasons. The kernels that code
the bits of a segment are in `kernels.cpu.context`.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs import model
from pulse_rl.codecs.base import Read, SegmentChanges, SegmentSpec, Unit, consecutive
from pulse_rl.codecs.model import Ints, Model
from pulse_rl.dtypes import UINTS, Field, UIntArray, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import context, moves
from pulse_rl.kernels.cpu.context import Start
from pulse_rl.kernels.cpu.moves import Moves
from pulse_rl.kernels.cpu.rangecoder import decode_numbers, encode_numbers
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.changes import Changes, find_changes

SAMPLED_SIZE = 1 << 16  # elements; in larger segments only every 64th run's exponents are counted
SAMPLED_EVERY = 64
SAMPLE = 32  # segments of a class whose contexts are counted


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

    def encode(self, segments: Sequence[SegmentChanges], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        numbers: list[int] = []  # of the head
        kinds: list[int] = []
        streams = [b""] * len(segments)
        for dtype, members in _groups([one.spec for one in segments]).items():
            group = [segments[number] for number in members]
            classes, models, coded = _encode_group(field_of(dtype), group, self._price)
            numbers += _group_numbers(field_of(dtype), group, classes, models, coded)
            kinds += _kinds(field_of(dtype), len(members))
            for number, stream in zip(members, coded, strict=True):
                streams[number] = stream
        head = encode_numbers(np.array(numbers, np.int64), np.array(kinds, np.uint8))
        return head, [b"".join(members) for members in consecutive(streams, spans)]

    def encode_block(self, segments: Sequence[SegmentChanges]) -> bytes:
        """Encode one block of one span as `u32 n | head of n bytes | span`."""
        head, (span,) = self.encode(segments, [len(segments)])
        return struct.pack("<I", len(head)) + head + span

    def split(self, block: memoryview) -> tuple[memoryview, memoryview]:
        if len(block) < 4:
            raise FormatError(f"context block: expected at least 4 bytes, found {len(block)}")
        (nbytes,) = struct.unpack_from("<I", block)
        return block[4 : 4 + nbytes], block[4 + nbytes :]

    def open(
        self, shared: memoryview, specs: Sequence[SegmentSpec], spans: Sequence[int]
    ) -> list[Callable[[memoryview], list[Unit]]]:
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
        paired = list(zip(specs, streams, strict=True))
        return [partial(_units, members) for members in consecutive(paired, spans)]


def _units(segments: Sequence[tuple[SegmentSpec, "_Stream"]], payload: memoryview) -> list[Unit]:
    """The units of a span: its segments."""
    expected = sum(stream.nbytes for _, stream in segments)
    if expected != len(payload):
        raise FormatError(f"context block: expected {expected} bytes, found {len(payload)}")
    units, at = [], 0
    for spec, stream in segments:
        units.append(Unit(1, _decoder(payload[at : at + stream.nbytes], spec, stream.start)))
        at += stream.nbytes
    return units


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
    field: Field, parts: Sequence[SegmentChanges], classes: Ints, models: list[Model], streams: Sequence[bytes]
) -> list[int]:
    """The numbers of a group. A stream's length is stated as the difference from what the mean predicts."""
    plain = classes == len(models)
    if plain.all():
        models = [model.blank(field)] * len(models)
    numbers: list[int] = []
    for before, learned in zip([None, *models], models, strict=False):
        numbers += model.to_numbers(learned, before, field)
    lengths = np.array([len(stream) for stream in streams])
    changed = np.array([part.spec.changed for part in parts])
    mean = (int(lengths[~plain].sum()) << 8) // max(1, int(changed[~plain].sum()))
    residues = np.where(plain, 0, model.zigzag(lengths - ((changed * mean) >> 8)))
    return [*numbers, mean, *np.stack([classes, residues], axis=1).reshape(-1).tolist()]


class _Stream(NamedTuple):
    """What the head says of a segment's stream."""

    nbytes: int
    start: Start | None  # None for a plain stream


def _read_group(numbers: Ints, field: Field, specs: Sequence[SegmentSpec]) -> list[_Stream]:
    """The inverse of `_group_numbers`. Raises FormatError for a class or a length out of range."""
    width = len(model.kinds(field))
    models: list[Model] = []
    for place in range(min(model.CLASSES, len(specs))):
        before = models[-1] if models else None
        models.append(model.from_numbers(numbers[place * width : (place + 1) * width], before, field))
    starts = [one.start() for one in models]
    mean, *rest = numbers[len(models) * width :].tolist()
    streams = []
    for spec, number, residue in zip(specs, rest[::2], model.unzigzag(np.array(rest[1::2])).tolist(), strict=True):
        full = spec.size * spec.itemsize
        nbytes = full if number == len(models) else ((spec.changed * mean) >> 8) + residue
        if number > len(models) or not 0 <= nbytes <= full:
            raise FormatError(f"context block: a segment of {full} bytes has class {number} and {nbytes} bytes")
        streams.append(_Stream(nbytes, starts[number] if number < len(starts) else None))
    return streams


# Encoding


def _encode_group(field: Field, parts: Sequence[SegmentChanges], price: int) -> tuple[Ints, list[Model], list[bytes]]:
    """Code segments of one dtype, with what is learned from them.

    Returns the class of each segment (len(models) for a plain one), the models, and the streams.
    """
    # 1. Count exponents, of all elements and of those that change, and part the segments into classes by them.

    def measure(part: SegmentChanges) -> tuple[Moves, Ints, Ints]:
        old = part.read()
        before = _gathered(old, part.changes.indices) if part.replaced is None else part.replaced
        moved = moves.find_moves(before, part.changes.values, field)
        changes = np.bincount(moved.exponents, minlength=field.exponents)
        every = SAMPLED_EVERY if old.size > SAMPLED_SIZE else 1
        return moved, np.maximum(moves.count_exponents(old, field, every), changes), changes

    all_moved, all_elements, all_changes = zip(*ordered_map(measure, parts), strict=True)
    elements, changes = np.stack(all_elements), np.stack(all_changes)
    members = list(zip(parts, all_moved, strict=True))
    classes, activities = model.classify(elements, changes)
    thresholds = [
        model.threshold(elements[classes == number].sum(0), changes[classes == number].sum(0), activity, price)
        for number, activity in enumerate(activities)
    ]
    # 2. Count every context's bits in a sample of each class, and learn its model from the counts.
    size = context.tables(field.exponents).size
    shares = [model.share(activity) for activity in activities]

    def count(item: tuple[int, _Member]) -> tuple[int, Ints]:
        number, member = item
        counts = np.zeros(size, np.int64)
        _encode_segment(field, member, Start(thresholds[number], shares[number], counts), None)
        return number, counts

    counted = np.zeros((len(activities), size), np.int64)
    for number, counts in ordered_map(count, _sample(classes, members)):
        counted[number] += counts
    models = [
        model.learn(field, thresholds[number], activity, counted[number], counted.sum(0))
        for number, activity in enumerate(activities)
    ]
    # 3. Code every segment from its model; one that would take more bytes than its elements is written plain.
    starts = [learned.start() for learned in models]

    def code(item: tuple[int, _Member]) -> bytes | None:
        number, member = item
        fresh = starts[number]._replace(states=starts[number].states.copy())
        return _encode_segment(field, member, fresh, member[0].spec.size * member[0].spec.itemsize)

    streams = []
    for place, stream in enumerate(ordered_map(code, zip(classes.tolist(), members, strict=True))):
        if stream is None:
            classes[place] = len(models)
            stream = _plain(parts[place])
        streams.append(stream)
    return classes, models, streams


_Member: TypeAlias = tuple[SegmentChanges, Moves]


def _sample(classes: Ints, members: Sequence[_Member]) -> list[tuple[int, _Member]]:
    """Up to SAMPLE segments of each class, evenly spaced, each with its class."""
    chosen = []
    for number in range(int(classes.max()) + 1):
        mine = np.flatnonzero(classes == number)
        chosen += [(number, members[i]) for i in mine[:: -(-len(mine) // SAMPLE) or 1].tolist()]
    return chosen


def _encode_segment(field: Field, member: _Member, start: Start, limit: int | None) -> bytes | None:
    """Code one segment; start's states are changed. limit: as in the kernel."""
    part, moved = member
    hot = moves.find_hot(part.read(), field, start.threshold)
    return context.encode_segment(_place(part.spec), start, hot, part.changes.indices, moved, limit)


def _place(spec: SegmentSpec) -> context.Place:
    return context.Place(spec.size, 8 * spec.itemsize, spec.stride, spec.phase)


def _gathered(old: UIntArray, indices: NDArray[np.uint32]) -> UIntArray:
    values = np.empty(len(indices), old.dtype)
    (cpu.gather if old.ndim == 1 else cpu.gather_rows)(old, indices, values)
    return values


def _plain(part: SegmentChanges) -> bytes:
    """All new elements of a segment."""
    new = part.read().flatten()
    cpu.scatter(new, part.changes.indices, part.changes.values)
    return new.tobytes()


# Decoding


def _decoder(stream: memoryview, spec: SegmentSpec, start: Start | None) -> Callable[[Sequence[Read]], list[Changes]]:
    def decode(reads: Sequence[Read]) -> list[Changes]:
        if not spec.changed:
            return [Changes(np.empty(0, np.uint32), np.empty(0, UINTS[spec.itemsize]))]
        old = reads[0]()
        if start is None:
            changes = find_changes(old.reshape(-1), np.frombuffer(bytes(stream), UINTS[spec.itemsize]))
            if len(changes.indices) != spec.changed:
                raise FormatError(f"context segment: expected {spec.changed} changes, found {len(changes.indices)}")
            return [changes]
        fresh = start._replace(states=start.states.copy())
        decoded = context.decode_segment(stream, _place(spec), fresh, old, field_of(spec.dtype), spec.changed)
        if decoded is None:
            raise FormatError(
                f"context segment: a stream of {len(stream)} bytes does not hold {spec.changed} changes of "
                f"{spec.size} elements"
            )
        return [Changes(*decoded)]

    return decode
