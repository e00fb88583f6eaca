"""The context codec: what the receiver holds already says where changes are likely, and how large.

Whether a weight changes depends almost only on its size, because the distance to its neighbours does; and the new
value is the old one moved by a few such distances. So every segment is coded as decisions of an adaptive binary
range coder, each in the context of the old value's exponent: a changed-or-not for every *hot* element (below a
threshold), gaps for the few changes among the others, and for each change a direction and a number of steps.
The statistics that segments start from are told once a block (`model`), so segments decode on their own.

A block is `u32 n | head of n bytes | the segments' streams`. `docs/format.md` describes all of it,
`docs/codec.md` why it is small.
"""

import struct
from collections.abc import Callable, Sequence

import numpy as np

from pulse_rl.codecs import model
from pulse_rl.codecs.base import Part, Piece, Read, SegmentSpec
from pulse_rl.codecs.model import Ints, Model
from pulse_rl.dtypes import UINTS, Field, UIntArray, field
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import context, moves
from pulse_rl.kernels.cpu.context import Start
from pulse_rl.kernels.cpu.rangecoder import decode_numbers, encode_numbers
from pulse_rl.parallel import ordered_map
from pulse_rl.weights.changes import Changes, find_changes

SAMPLED_SIZE = 1 << 16  # elements: larger segments have the exponents of every 64th run counted only
SAMPLED_EVERY = 64
SAMPLE = 32  # segments of a class whose contexts are counted


class ContextCodec:
    """Adaptive binary range coder in contexts of the old values.

    price: 1/2048 bits that deciding about one hot element may cost more than it saves, for the time that it takes to
    decode: the encoder's choice, which a decoder need not know.
    """

    name = "context"
    conditional = True
    block_nbytes = 4 << 20

    def __init__(self, *, price: int = 1) -> None:
        self._price = price

    def is_dense(self, spec: SegmentSpec) -> bool:
        return False  # decided for each segment when it is coded, and told in the head

    def encode(self, parts: Sequence[Part]) -> bytes:
        numbers: list[int] = []
        kinds: list[int] = []
        streams: dict[int, bytes] = {}
        for dtype, members in _groups([part.spec for part in parts]).items():
            mine = [parts[number] for number in members]
            classes, models, coded = _encode_group(field(dtype), mine, self._price)
            plain = classes == len(models)
            if plain.all():
                models = [model.blank(field(dtype))] * len(models)
            streams.update(zip(members, coded, strict=True))
            kinds += _kinds(field(dtype), len(members))
            for before, learned in zip([None, *models], models, strict=False):
                numbers += model.to_numbers(learned, before, field(dtype))
            lengths = np.array([len(stream) for stream in coded])
            changed = np.array([part.spec.changed for part in mine])
            mean = (int(lengths[~plain].sum()) << 8) // max(1, int(changed[~plain].sum()))
            residues = np.where(plain, 0, model.zigzag(lengths - ((changed * mean) >> 8)))
            numbers += [mean, *np.stack([classes, residues], axis=1).reshape(-1).tolist()]
        head = encode_numbers(np.array(numbers, np.int64), np.array(kinds, np.uint8))
        ordered = [streams[number] for number in sorted(streams)]
        return b"".join([struct.pack("<I", len(head)), head, *ordered])

    def open(self, payload: memoryview, specs: Sequence[SegmentSpec]) -> list[Piece]:
        if len(payload) < 4:
            raise FormatError(f"context block: expected at least 4 bytes, found {len(payload)}")
        (nbytes,) = struct.unpack_from("<I", payload)
        groups = _groups(specs)
        kinds = [kind for dtype, members in groups.items() for kind in _kinds(field(dtype), len(members))]
        numbers = decode_numbers(payload[4 : 4 + nbytes], np.array(kinds, np.uint8))
        if numbers is None:
            raise FormatError("context block: its head is broken")
        at = 0
        lengths = np.zeros(len(specs), np.int64)
        start_from: dict[int, Start | None] = {}
        for dtype, members in groups.items():
            width = len(model.kinds(field(dtype)))
            models: list[Model] = []
            for _ in range(min(model.CLASSES, len(members))):
                before = models[-1] if models else None
                models.append(model.from_numbers(numbers[at : at + width], before, field(dtype)))
                at += width
            starts = [told.start() for told in models]
            mean = int(numbers[at])
            classes, residues = numbers[at + 1 : at + 1 + 2 * len(members)].reshape(-1, 2).T
            at += 1 + 2 * len(members)
            for number, mine, residue in zip(members, classes.tolist(), model.unzigzag(residues).tolist(), strict=True):
                spec = specs[number]
                dense = spec.size * spec.itemsize
                length = dense if mine == len(models) else ((spec.changed * mean) >> 8) + residue
                if mine > len(models) or not 0 <= length <= dense:
                    raise FormatError(f"context block: a segment of {dense} bytes has class {mine} and {length} bytes")
                lengths[number] = length
                start_from[number] = starts[mine] if mine < len(starts) else None
        ends = 4 + nbytes + np.cumsum(lengths)
        total = int(ends[-1]) if len(specs) else 4 + nbytes
        if total != len(payload):
            raise FormatError(f"context block: expected {total} bytes, found {len(payload)}")
        return [
            Piece(1, _decoder(payload[int(end - length) : int(end)], spec, start_from.get(number)))
            for number, (spec, length, end) in enumerate(zip(specs, lengths, ends, strict=True))
        ]


def _groups(specs: Sequence[SegmentSpec]) -> dict[str, list[int]]:
    """The numbers of the segments that change, by dtype, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        if spec.changed:
            groups.setdefault(spec.dtype, []).append(number)
    return groups


def _kinds(kind: Field, members: int) -> list[int]:
    """The kinds of the head's numbers for a group of so many segments."""
    return model.kinds(kind) * min(model.CLASSES, members) + [model.MEAN] + [model.CLASS, model.LENGTH] * members


def _encode_group(kind: Field, parts: Sequence[Part], price: int) -> tuple[Ints, list[Model], list[bytes]]:
    """Learn and code segments of one dtype: each one's class (len(models): plain), the models, the streams."""

    def measure(part: Part) -> tuple[Ints, Ints]:
        old = part.read()
        exponents = moves.find_moves(_gathered(old, part.changes), part.changes.values, kind).exponents
        changes = np.bincount(exponents, minlength=kind.exponents)
        every = SAMPLED_EVERY if len(old) > SAMPLED_SIZE else 1
        return np.maximum(moves.count_exponents(old, kind, every), changes), changes

    measured = list(ordered_map(measure, parts))
    elements, changes = (np.stack(counts) for counts in zip(*measured, strict=True))
    classes, activities = model.classify(elements, changes)
    thresholds = [
        model.threshold(elements[classes == number].sum(0), changes[classes == number].sum(0), activity, price)
        for number, activity in enumerate(activities)
    ]
    size = context.tables(kind.exponents).size
    shares = [model.share(activity) for activity in activities]

    def count(item: tuple[int, Part]) -> tuple[int, Ints]:
        number, part = item
        counts = np.zeros(size, np.int64)
        _encode_segment(kind, part, Start(thresholds[number], shares[number], counts), None)
        return number, counts

    counted = np.zeros((len(activities), size), np.int64)
    for number, counts in ordered_map(count, _sample(classes, parts)):
        counted[number] += counts
    models = [
        model.learn(kind, thresholds[number], activity, counted[number], counted.sum(0))
        for number, activity in enumerate(activities)
    ]

    starts = [learned.start() for learned in models]

    def code(item: tuple[int, Part]) -> bytes | None:
        number, part = item
        fresh = starts[number]._replace(states=starts[number].states.copy())
        return _encode_segment(kind, part, fresh, part.spec.size * part.spec.itemsize)

    streams = []
    for place, stream in enumerate(ordered_map(code, zip(classes.tolist(), parts, strict=True))):
        if stream is None:
            classes[place] = len(models)
            stream = _plain(parts[place])
        streams.append(stream)
    return classes, models, streams


def _sample(classes: Ints, parts: Sequence[Part]) -> list[tuple[int, Part]]:
    """Up to SAMPLE segments of each class, evenly spread."""
    chosen = []
    for number in range(int(classes.max()) + 1):
        members = np.flatnonzero(classes == number)
        chosen += [(number, parts[i]) for i in members[:: -(-len(members) // SAMPLE) or 1].tolist()]
    return chosen


def _encode_segment(kind: Field, part: Part, start: Start, limit: int | None) -> bytes | None:
    """Code one segment; start's states are changed. limit: as the kernel's."""
    old = part.read()
    moved = moves.find_moves(_gathered(old, part.changes), part.changes.values, kind)
    hot = moves.find_hot(old, kind, start.threshold)
    return context.encode_segment(_segment(part.spec), start, hot, part.changes.indices, moved, limit)


def _segment(spec: SegmentSpec) -> context.Segment:
    return context.Segment(spec.size, 8 * spec.itemsize, spec.stride, spec.phase)


def _gathered(old: UIntArray, changes: Changes) -> UIntArray:
    values = np.empty(len(changes.indices), old.dtype)
    cpu.gather(old, changes.indices, values)
    return values


def _plain(part: Part) -> bytes:
    """A segment's new values, whole: for one that would take more bytes coded."""
    new = part.read().copy()
    cpu.scatter(new, part.changes.indices, part.changes.values)
    return new.tobytes()


def _decoder(stream: memoryview, spec: SegmentSpec, start: Start | None) -> Callable[[Sequence[Read]], list[Changes]]:
    def decode(reads: Sequence[Read]) -> list[Changes]:
        if not spec.changed:
            return [Changes(np.empty(0, np.uint32), np.empty(0, UINTS[spec.itemsize]))]
        old = reads[0]()
        if start is None:
            changes = find_changes(old, np.frombuffer(bytes(stream), UINTS[spec.itemsize]))
            if len(changes.indices) != spec.changed:
                raise FormatError(f"context segment: expected {spec.changed} changes, found {len(changes.indices)}")
            return [changes]
        fresh = start._replace(states=start.states.copy())
        decoded = context.decode_segment(stream, _segment(spec), fresh, old, field(spec.dtype), spec.changed)
        if decoded is None:
            raise FormatError(
                f"context segment: a stream of {len(stream)} bytes does not hold {spec.changed} changes of "
                f"{spec.size} elements"
            )
        return [Changes(*decoded)]

    return decode
