"""The naive twin of the `context` codec's decoder: plain Python over integers, written from docs/format.md alone.

One class or function for each heading of that page. It decodes a block from its payload, the segments as the patch's
index and table describe them, and the old bits. Only tests run it; a reader in another language can be compared with
it.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

ONE = 1 << 32  # probability 1
MANTISSAS = {"F8_E4M3": 3, "F8_E4M3FNUZ": 3, "F8_E5M2": 2, "F8_E5M2FNUZ": 2, "F16": 10, "BF16": 7, "F32": 23, "F64": 52}
SIGNED = {"I8", "I16", "I32", "I64"}


class Refused(ValueError):
    """The payload violates a rule of the page."""


class Segment(NamedTuple):
    """What a reader knows about a segment before it reads the block."""

    dtype: str  # as safetensors spells it
    width: int  # bytes per element
    row: int  # elements
    phase: int  # elements
    changed: int
    old: Sequence[int]  # bits of every element, unsigned


def exponents_of(dtype: str, bits: int) -> int:
    """The number of exponents of a dtype of this many bits."""
    return 1 << (bits - 1 - MANTISSAS[dtype]) if dtype in MANTISSAS else 1


def exponent(dtype: str, bits: int, element: int) -> int:
    return (element >> MANTISSAS[dtype]) % exponents_of(dtype, bits) if dtype in MANTISSAS else 0


def order(dtype: str, bits: int, element: int) -> int:
    """o(bits): neighbouring values get neighbouring numbers."""
    highest = 1 << (bits - 1)
    if dtype in MANTISSAS:
        return 2 * highest - 1 - element if element & highest else element | highest
    return element ^ highest if dtype in SIGNED else element


def unorder(dtype: str, bits: int, place: int) -> int:
    """The element at a place in the order."""
    highest = 1 << (bits - 1)
    if dtype in MANTISSAS:
        return place ^ highest if place & highest else 2 * highest - 1 - place
    return place ^ highest if dtype in SIGNED else place


@cache
def probability(q: int) -> int:
    """p(q), in units of 2^-32, of odds 2^(q / 4)."""
    a = 0  # the fourth root, from its highest bit
    for k in range(81, -1, -1):
        if (a | 1 << k) ** 4 <= 1 << (256 + q):
            a |= 1 << k
    return ONE * a // (a + (1 << 64))


@dataclass
class Context:
    """An adaptive probability of the bit 1."""

    p: int = ONE // 2
    seen: int = 0

    def learn(self, bit: int) -> None:
        step = (1 << 17) // (2 * self.seen + 3)
        if bit:
            self.p += (ONE - self.p) * step >> 16
        else:
            self.p -= self.p * step >> 16
        self.seen = min(self.seen + 1, 1023)


class Reader:
    """Reads bits from one coded string."""

    def __init__(self, data: bytes) -> None:
        self.rest = data
        self.code = self._take(8)
        self.width = (1 << 64) - 1

    def _take(self, n: int) -> int:
        taken, self.rest = self.rest[:n], self.rest[n:]
        return int.from_bytes(taken.ljust(n, b"\0"), "big")

    def _refill(self) -> None:
        if self.width < ONE:
            self.code = (self.code << 32) % (1 << 64) + self._take(4)
            self.width <<= 32

    def bit(self, context: Context) -> int:
        share = (self.width >> 20) * (context.p >> 12 | 1)
        if self.code < share:
            bit, self.width = 1, share
        else:
            bit, self.code, self.width = 0, self.code - share, self.width - share
        context.learn(bit)
        self._refill()
        return bit

    def raw(self, k: int) -> int:
        value = 0
        while k > 0:
            g = min(16, k)
            self.width >>= g
            part = min(self.code // self.width, (1 << g) - 1)
            self.code -= part * self.width
            self._refill()
            value, k = value << g | part, k - g
        return value

    def ones(self, contexts: Callable[[int], Context], limit: int, what: str) -> int:
        """The number of 1s before a 0, at most `limit`; `contexts(j)` is the context of the j-th bit."""
        count = 0
        while self.bit(contexts(count)):
            count += 1
            if count > limit:
                raise Refused(f"{what}: expected at most {limit} bits, found more")
        return count


class Head:
    """Reads the numbers of a block's head."""

    def __init__(self, data: bytes) -> None:
        self.reader, self.contexts = Reader(data), defaultdict[tuple[int, str, int], Context](Context)

    def number(self, kind: int) -> int:
        length = self.reader.ones(lambda j: self.contexts[kind, "length", j], 40, "a number of the head")
        z = 1
        if length >= 1:
            z = 2 + self.reader.bit(self.contexts[kind, "top", length])
            z = z << (length - 1) | self.reader.raw(length - 1)
        return z - 1

    def signed(self, kind: int) -> int:
        v = self.number(kind)
        return -(v + 1) // 2 if v % 2 else v // 2

    def columns(self, kind: int, rows: int, columns: int, first: list[list[int]] | None) -> list[list[int]]:
        """A table's columns: each entry minus the one above it, in a second model also minus the first model's."""
        table = []
        for c in range(columns):
            above, column = 0, []
            for r in range(rows):
                above += self.signed(kind)
                column.append(odds(above + (first[c][r] if first else 0)))
            table.append(column)
        return table


def odds(q: int) -> int:
    if not -64 <= q <= 64:
        raise Refused(f"odds: expected −64 to 64, found {q}")
    return q


class Model(NamedTuple):
    """The statistics that a segment starts from: the threshold and the odds, by table and column."""

    threshold: int
    levels: list[int]
    tables: dict[str, list[list[int]]]


def read_model(head: Head, exponents: int, first: Model | None) -> Model:
    threshold = head.number(0)
    if threshold > exponents:
        raise Refused(f"threshold: expected at most {exponents}, found {threshold}")
    model = Model(threshold, [odds(head.signed(1)) for _ in range(5)], {})
    shapes = {
        "activity": (exponents, 1),
        "unary": (exponents, 4),
        "scale": (exponents + 64, 1),
        "top": (exponents + 64, 3),
        "gap": (64, 1),
        "sign": (22, 1),
    }
    for kind, (name, (rows, columns)) in enumerate(shapes.items(), start=2):
        model.tables[name] = head.columns(kind, rows, columns, first.tables[name] if first else None)
    return model


class Contexts(dict[tuple[str, int, int], Context]):
    """A segment's contexts by table, row and column; each is made from the model's odds on first use."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __missing__(self, key: tuple[str, int, int]) -> Context:
        name, row, column = key
        if name == "active":
            q = min(64, max(-64, self.model.tables["activity"][0][row] + self.model.levels[column]))
        else:
            q = self.model.tables[name][column][row]
        return self.setdefault(key, Context(probability(q), 60))


def decode_block(payload: bytes, segments: Sequence[Segment]) -> list[tuple[list[int], list[int]]]:
    """A block's changes: for each segment the indices, ascending, and the new bits at them.

    Raises Refused for whatever a reader must refuse.
    """
    if len(payload) < 4:
        raise Refused(f"block: expected at least 4 bytes, found {len(payload)}")
    (n,) = struct.unpack_from("<I", payload)
    if 4 + n > len(payload):
        raise Refused(f"head: expected {n} bytes, found {len(payload) - 4}")
    head, streams = Head(payload[4 : 4 + n]), payload[4 + n :]
    models: dict[int, Model | None] = {}  # of each segment that changes; None for a plain one
    lengths: dict[int, int] = {}
    changing = [s for s, segment in enumerate(segments) if segment.changed]
    for dtype in dict.fromkeys(segments[s].dtype for s in changing):
        group = [s for s in changing if segments[s].dtype == dtype]
        exponents = exponents_of(dtype, 8 * segments[group[0]].width)
        group_models: list[Model] = []
        for _ in range(min(2, len(group))):
            group_models.append(read_model(head, exponents, group_models[0] if group_models else None))
        mean = head.number(10)
        for s in group:
            full = len(segments[s].old) * segments[s].width
            choice = head.number(8)
            if choice > len(group_models):
                raise Refused(f"class: expected at most {len(group_models)}, found {choice}")
            if choice < len(group_models):
                models[s] = group_models[choice]
                lengths[s] = head.signed(9) + segments[s].changed * mean // 256
            else:
                head.number(9)
                models[s], lengths[s] = None, full
            if not 0 <= lengths[s] <= full:
                raise Refused(f"stream: expected 0 to {full} bytes, found {lengths[s]}")
    if sum(lengths.values()) != len(streams):
        raise Refused(f"streams: expected {sum(lengths.values())} bytes, found {len(streams)}")
    changes: list[tuple[list[int], list[int]]] = []
    for s, segment in enumerate(segments):
        stream, streams = streams[: lengths.get(s, 0)], streams[lengths.get(s, 0) :]
        model = models.get(s)
        if not segment.changed:
            changes.append(([], []))
        elif model is None:
            changes.append(decode_plain(stream, segment))
        else:
            changes.append(Stream(stream, segment, model).decode())
    return changes


def decode_plain(stream: bytes, segment: Segment) -> tuple[list[int], list[int]]:
    w = segment.width
    new = [int.from_bytes(stream[i : i + w], "little") for i in range(0, len(stream), w)]
    indices = [i for i, (a, b) in enumerate(zip(segment.old, new, strict=True)) if a != b]
    if len(indices) != segment.changed:
        raise Refused(f"a plain segment: expected {segment.changed} changed elements, found {len(indices)}")
    return indices, [new[i] for i in indices]


class Stream:
    """Decodes one segment."""

    def __init__(self, data: bytes, segment: Segment, model: Model) -> None:
        self.reader, self.contexts = Reader(data), Contexts(model)
        self.segment, self.model = segment, model
        self.bits = 8 * segment.width
        self.leans: dict[int, int] = {}  # by column
        self.lean = 0  # of the row
        self.changes: dict[int, int] = {}

    def decode(self) -> tuple[list[int], list[int]]:
        if not self.decode_hot():
            self.decode_cold()
        return sorted(self.changes), [self.changes[i] for i in sorted(self.changes)]

    def done(self) -> bool:
        return len(self.changes) == self.segment.changed

    def decode_hot(self) -> bool:
        """Whether these were all changes."""
        dtype, row = self.segment.dtype, self.segment.row
        activity = self.model.tables["activity"][0]
        found = expected = 0
        for i, old in enumerate(self.segment.old):
            column = (self.segment.phase + i) % row
            if column == 0:
                found = expected = self.lean = 0
            e = exponent(dtype, self.bits, old)
            if e >= self.model.threshold:
                continue
            ratio = 32 * (found + 2) << 16, expected + (2 << 16)
            level = sum(ratio[0] >= step * ratio[1] for step in (19, 27, 38, 54))
            expected += probability(activity[e]) >> 16
            if self.reader.bit(self.contexts["active", e, level]):
                found += 1
                up = self.direction(column)
                self.move(i, up, self.size(e))
                if self.done():
                    return True
        return False

    def direction(self, column: int) -> bool:
        """Whether the change in this column goes up; the column and the row learn it."""
        lean, of_column = self.lean, self.leans.get(column, 0)
        g, h = grade(of_column), grade(lean)
        if g == 0:
            up = self.reader.bit(self.contexts["sign", 0, 0]) == 1
        else:
            up = (self.reader.bit(self.contexts["sign", 1 + 7 * (abs(g) - 1) + h + 3, 0]) == 1) == (g > 0)
        s, t, u = 1 if up else -1, 1 if lean >= 0 else -1, sign(of_column)
        self.leans[column] = fade(of_column, 230) + s * t * min(32, 8 + abs(lean))
        self.lean = fade(lean, 243) + 16 * s * u
        return up

    def size(self, e: int) -> int:
        read, contexts = self.reader, self.contexts
        length = read.ones(
            lambda j: contexts["unary", e, j] if j < 4 else contexts["scale", e + j, 0], self.bits - 1, "a size"
        )
        z = 1
        if length >= 1:
            z = z << 1 | read.bit(contexts["top", e + length, 0])
        if length >= 2:
            z = z << 1 | read.bit(contexts["top", e + length, 1 + (z & 1)])
        if length >= 3:
            z = z << (length - 2) | read.raw(length - 2)
        return z

    def move(self, index: int, up: bool, size: int) -> None:
        dtype, old = self.segment.dtype, self.segment.old[index]
        place = order(dtype, self.bits, old) + (size if up else -size)
        self.changes[index] = unorder(dtype, self.bits, place % (1 << self.bits))

    def decode_cold(self) -> None:
        segment = self.segment
        e = min(self.model.threshold, exponents_of(segment.dtype, self.bits) - 1)
        index = -1
        while not self.done():
            index += self.gap()
            if index >= len(segment.old):
                raise Refused(f"cold change: expected an index under {len(segment.old)}, found {index}")
            if index in self.changes:
                raise Refused(f"cold change: element {index} is among the hot ones already")
            up = self.reader.bit(self.contexts["sign", 0, 0]) == 1
            self.move(index, up, self.size(e))

    def gap(self) -> int:
        length = self.reader.ones(lambda j: self.contexts["gap", j, 0], 20, "a gap")
        gap = 1
        if length >= 1:
            gap = 2 + self.reader.bit(self.contexts["gap", 32 + length, 0])
            gap = gap << (length - 1) | self.reader.raw(length - 1)
        return gap


def sign(x: int) -> int:
    return (x > 0) - (x < 0)


def grade(x: int) -> int:
    return sign(x) * sum(step <= abs(x) for step in (16, 48, 96))


def fade(x: int, k: int) -> int:
    return sign(x) * (abs(x) * k >> 8)
