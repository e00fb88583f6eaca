"""The patch file: its layout and its limits, written and read.

A patch is a valid safetensors file. Its `__metadata__` is the header; its four U8 tensors are
  table    zstd(JSON): the tensors, which boxes of them the patch covers, and which further names are tied to them
  index    zstd: how many spans each block has, how many segments each span, and how many changes each segment; and the
           hash of each span
  shared   for each block, what its spans have in common
  payload  the spans, one after another, each coded by the codec that the header names
All but the payload is the *head*. It has a hash of its own, which covers the spans by their hashes. So a receiver that
holds a part of the weights reads the head, and of the payload only the spans that it needs. The other hash, of
the whole file, is in every version of the format, so that a reader of an older one can tell newer from damaged.

`docs/format.md` is the full description, also of format 1: there a block is one span, has before it what is shared, and
the head has no hash. Input is treated as hostile:
hashes are checked first, sizes are checked before memory is allocated, and the index must account for every byte.
Blocks are decoded in `apply`, not here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs.base import Codec, Read, Unit, Units, consecutive
from pulse_rl.codecs.choose import CODECS
from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import Count, Digest, decode_json
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import FormatError, PatchFormatError, printable, skew, translate
from pulse_rl.kernels.cpu.coding import Memory
from pulse_rl.patch.segments import Entry, Segment, Segments, groups_of
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, disjoint, whole
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import TensorSpec
from pulse_rl.weights.pieces import pieces_of
from pulse_rl.weights.segments import SEGMENT

FORMAT = "pulse-rl/patch"
FORMAT_VERSION = 2
STREAMS = ("table", "index", "shared", "payload")
STREAMS_1 = ("table", "index", "payload")  # of format 1
MAX_HEAD_NBYTES = 256 << 20
MAX_TABLE_NBYTES = 16 << 20  # 160,000 tensors of ordinary names; in memory it takes up to 17 times as much
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 41
MAX_BOXES = 1024  # of a tensor in one part; to check that they are disjoint takes 10 µs for each
MAX_SPANS = 1 << 20  # what is kept of them takes 0.5 GB; a patch of 10^12 elements has 30,000
MAX_BLOCK_NBYTES = 64 << 20  # of a block's decoded indices and values; the writer closes blocks far earlier
HASH_NBYTES = 16  # of a block: the first half of its BLAKE3, for which finding another block takes 2^128 attempts
TABLE_LEVEL = 19  # the table is a few KB and the same in every patch of a run: spend time, not bytes


class TensorInfo(TensorSpec, frozen=True):
    """One tensor of a patch.

    Attributes:
        name: The tensor's name.
        dtype: Its dtype as safetensors spells it, such as "BF16".
        shape: Its shape.
        changes: The number of its elements that change.
    """

    changes: int = 0


_Boxes: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and sizes of each


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, str, tuple[int, ...], _Boxes]]  # name, dtype, shape, boxes; no boxes for all of it
    tied: dict[str, str]  # further name → the name in `tensors` that stands for it


class _Table1(msgspec.Struct, forbid_unknown_fields=True):
    """The table of format 1."""

    tensors: list[tuple[str, str, tuple[int, ...]]]
    tied: dict[str, str]


class PatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `__metadata__` of a patch but its hash. In the file every value is a string."""

    format: str
    format_version: int
    codec: str
    base: Count
    target: Count
    base_digest: Digest  # of the whole weights, also in one of several parts
    target_digest: Digest
    elements: Count  # of what this part covers, as are the two counts below
    changes: Count
    full_nbytes: Count
    blocks: Count
    spans: Count = 0
    part: Count = 0  # of several, which are one patch together: each covers other elements
    parts: Count = 1


class Span(NamedTuple):
    """Consecutive segments, and where the bytes are that code their changes: what is read at once."""

    number: int
    segments: Segments
    start: int  # in the file
    stop: int
    hash: bytes | None  # None in format 1

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """Consecutive spans, and what they share."""

    segments: Segments
    spans: tuple[Span, ...]
    shared: memoryview | None  # None in format 1, where it precedes the only span


class Patch(NamedTuple):
    """A parsed patch: header, table and index are checked and the hashes are proved, but nothing is decoded."""

    header: PatchHeader
    table: tuple[Entry, ...]  # in canonical order
    tied: dict[str, str]  # further name → the name in `table` that stands for it
    segments: Segments
    blocks: tuple[Block, ...]
    head_nbytes: int
    nbytes: int  # of the file
    payloads: Mapping[int, memoryview]  # the spans that were read, by number

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, in canonical order."""
        changes = self.segments.per_tensor().tolist()
        return tuple(
            TensorInfo(name, dtype, shape, k) for (name, dtype, shape, _), k in zip(self.table, changes, strict=True)
        )

    def by_name(self) -> dict[str, Entry]:
        """The table by tensor name."""
        return {entry.name: entry for entry in self.table}

    @property
    def codec(self) -> Codec:
        return CODECS[self.header.codec]

    @property
    def spans(self) -> Iterator[Span]:
        """All spans, in order."""
        return (span for block in self.blocks for span in block.spans)

    def units(self) -> Iterator[tuple[Sequence[Segment], Unit]]:
        """The runs of segments that can be decoded alone, in order, of all spans that were read. Raises as `opened`."""
        for _, segments, units in self.opened():
            at = 0
            for unit in units.each():
                yield segments[at : at + unit.segments], unit
                at += unit.segments

    def opened(self) -> Iterator[tuple[Span, list[Segment], Units]]:
        """Each span that was read, in order, its segments and its units.

        Raises PatchFormatError for a span that no encoder wrote; so does `decode` of units.
        """
        for block in self.blocks:
            if any(span.number in self.payloads for span in block.spans):
                yield from self._opened(block)

    def _opened(self, block: Block) -> Iterator[tuple[Span, list[Segment], Units]]:
        with translate(FormatError, to=PatchFormatError):
            shared, payloads = block.shared, self.payloads
            if shared is None:
                shared, payload = self.codec.split(payloads[block.spans[0].number])
                payloads = {block.spans[0].number: payload}
            segments = list(block.segments)
            sizes = [len(span.segments) for span in block.spans]
            opened = self.codec.open(shared, [segment.spec for segment in segments], sizes)
        for span, members, units in zip(block.spans, consecutive(segments, sizes), opened, strict=True):
            if span.number not in payloads:
                continue
            with translate(FormatError, to=PatchFormatError):
                found = units(payloads[span.number])
            yield span, list(members), found._replace(decode=partial(_decode, found))

    def with_spans(self, payloads: Mapping[int, memoryview]) -> "Patch":
        """The same patch with these spans read. Raises PatchFormatError for one that its hash does not fit."""
        for span in self.spans:
            payload = payloads.get(span.number)
            if payload is not None and (len(payload) != span.nbytes or _span_hash(payload) != span.hash):
                raise PatchFormatError(f"the patch is corrupt: the hash of span {span.number} does not match its bytes")
        return self._replace(payloads=dict(payloads))


def _decode(units: Units, numbers: Sequence[int], reads: Sequence[Read], memory: Memory | None) -> list[Changes]:
    with translate(FormatError, to=PatchFormatError):
        return units.decode(numbers, reads, memory)


def decoded_nbytes(segments: Sequence[Segment]) -> int:
    """Memory that the decoded changes of these segments may take, bytes."""
    return sum(segment.spec.decoded_nbytes for segment in segments)


def check_version(what: str, value: int) -> None:
    """Raise ValueError unless value is a version: a whole number that fits 63 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what}: expected a whole number from 0 to 2^63 − 1, found {value!r}")


# Writing


def entries_of(tensors: Mapping[str, Bits]) -> tuple[Entry, ...]:
    """The table of these tensors: the boxes that this process owns of each; those that it owns nothing of are left out.

    tensors: in canonical order.
    """
    found = []
    for name, tensor in tensors.items():
        boxes = tuple(sorted(piece.box for piece in pieces_of(tensor) if piece.owned and piece.box.size))
        if not tensor.size:
            boxes = (whole(tensor.shape),)
        if boxes:
            found.append(Entry(name, tensor.dtype, tuple(tensor.shape), boxes))
    return tuple(found)


def encode_table(table: Sequence[Entry], tied: Mapping[str, str]) -> bytes:
    """The table stream. Raises ValueError for a name that readers refuse."""
    safetensors_header.check_names([*(entry.name for entry in table), *tied])
    rows: list[tuple[str, str, tuple[int, ...], _Boxes]] = [
        (name, dtype, shape, [] if boxes == (whole(shape),) else [(box.offset, box.sizes) for box in boxes])
        for name, dtype, shape, boxes in table
    ]
    encoded = msgspec.json.encode(_Table(rows, dict(sorted(tied.items()))))
    if len(encoded) > MAX_TABLE_NBYTES:
        raise ValueError(
            f"tensor names: expected a table of at most {MAX_TABLE_NBYTES} bytes, found {len(encoded)}: "
            "too many tensors"
        )
    return _compressed(encoded)


def check_table(table: Sequence[Entry], tied: Mapping[str, str]) -> None:
    """Raise ValueError or PatchFormatError for tensors that no patch can describe."""
    groups_of(_read_table(memoryview(encode_table(table, tied)), FORMAT_VERSION)[0], format_version=FORMAT_VERSION)


@lru_cache(maxsize=2)
def _compressed(table: bytes) -> bytes:
    """Kept from patch to patch, because a run's tables are equal and take a few ms to compress."""
    return zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(table)


def _span_hash(payload: bytes | memoryview) -> bytes:
    return blake3(payload).digest(HASH_NBYTES)


class CodedBlock(NamedTuple):
    """A block to be written: what its spans share, and of each span the number of its segments and its bytes."""

    shared: bytes
    spans: list[tuple[int, bytes]]


def pack(header: PatchHeader, table: bytes, counts: Sequence[int], blocks: Sequence[CodedBlock]) -> tuple[bytes, int]:
    """Put a patch file together. counts: changes of each segment, in order. Returns it, and the bytes of its head."""
    spans = [span for block in blocks for span in block.spans]
    numbers = [number for block in blocks for number in (len(block.spans), len(block.shared))]
    numbers += [number for size, payload in spans for number in (size, len(payload))]
    hashes = b"".join(_span_hash(payload) for _, payload in spans)
    raw = np.array([*numbers, *counts], "<u4").tobytes() + hashes
    index = zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(raw)
    head = [table, index, b"".join(block.shared for block in blocks)]
    metadata = {key: str(value) for key, value in msgspec.structs.asdict(header).items()}
    metadata["head_blake3"] = _hash(metadata, head)
    payload = [coded for _, coded in spans]
    metadata["blake3"] = _hash(metadata, [*head, *payload])
    sizes = (*map(len, head), sum(map(len, payload)))
    described = ((name, "U8", (size,)) for name, size in zip(STREAMS, sizes, strict=True))
    head = [safetensors_header.header_bytes(described, metadata), *head]
    return b"".join([*head, *payload]), sum(map(len, head))


def _hash(metadata: Mapping[str, str], data: Sequence[bytes | memoryview]) -> str:
    """BLAKE3 over the header's lines (key=value, sorted, without the hash) and the data after them."""
    hasher = blake3("".join(f"{k}={v}\n" for k, v in sorted(metadata.items()) if k != "blake3").encode())
    for part in data:
        hasher.update(part)
    return hasher.hexdigest()


# Reading


def unpack(data: bytes | bytearray | memoryview, source: str | None = None) -> Patch:
    """Parse a patch and prove all its hashes. Nothing is decoded and nothing of the model's size is allocated.

    source: where the bytes come from, for the error. Raises PatchFormatError, and VersionSkewError for a newer format.
    """
    view = memoryview(data).cast("B")
    with translate(FormatError, to=partial(PatchFormatError, source=source)):
        patch = _unpack(view, source, None)
        payloads = {span.number: view[span.start : span.stop] for span in patch.spans}
        if patch.header.format_version == 1:
            return patch._replace(payloads=payloads)
        return patch.with_spans(payloads)


def unpack_head(data: bytes | bytearray | memoryview, nbytes: int, source: str | None = None) -> Patch:
    """Parse the head of a patch and prove its hash; no span is read yet.

    nbytes: of the whole file. Raises as `unpack`, and PatchFormatError for format 1, which cannot be read in parts.
    """
    with translate(FormatError, to=partial(PatchFormatError, source=source)):
        patch = _unpack(memoryview(data).cast("B"), source, nbytes)
        if patch.header.format_version == 1:
            raise PatchFormatError("a patch of format 1 can only be read whole")
        return patch


def _unpack(view: memoryview, source: str | None, nbytes: int | None) -> Patch:
    """nbytes: of the file, of which view is the head; None if it is all of it."""
    header, streams, start = _read_header(view, source, nbytes)
    table, tied = _read_table(streams["table"], header.format_version)
    if header.parts == 1 and (unknown := set(tied.values()) - {entry.name for entry in table}):
        raise PatchFormatError(f"table: tensors are tied to {sorted(unknown)[:8]}, which it does not have")
    segments = Segments(table, groups_of(table, format_version=header.format_version))
    index = _read_index(streams["index"], header, table, segments)
    _check_totals(header, table, segments)
    end = len(view) if nbytes is None else nbytes
    spans = list(_cut_spans(index, segments, start, end))
    blocks = tuple(_cut_blocks(index, segments, spans, streams.get("shared")))
    return Patch(header, table, tied, segments, blocks, start, end, {})


def _read_header(
    view: memoryview, source: str | None, nbytes: int | None
) -> tuple[PatchHeader, dict[str, memoryview], int]:
    """The header, the streams of the head by name, and where the payload begins.

    The hash, of the file or of its head, is proved before the header's values are looked at.
    """
    metadata, entries, offset = safetensors_header.parse(view, nbytes=nbytes)
    if metadata.get("format") != FORMAT:
        raise PatchFormatError(f"not a pulse-rl patch: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    if nbytes is None and _hash(metadata, [view[offset:]]) != metadata.get("blake3"):
        raise PatchFormatError("the patch is corrupt: its BLAKE3 hash does not match its bytes")
    metadata.pop("blake3", None)  # of a head alone it proves nothing
    version = metadata.get("format_version", "")
    if version.isascii() and version.isdigit() and len(version) < 10 and int(version) > FORMAT_VERSION:
        raise skew("the patch", int(version), FORMAT_VERSION, written_by=metadata.get("software"), source=source)
    if version not in ("1", "2"):
        raise PatchFormatError(f"patch format version: expected 1 or 2, found {printable(version)}")
    streams = STREAMS_1 if version == "1" else STREAMS
    if [(n, e.dtype, len(e.shape)) for n, e in entries.items()] != [(name, "U8", 1) for name in streams]:
        raise PatchFormatError(f"streams: expected {', '.join(streams)}, found {', '.join(map(printable, entries))}")
    start = offset + entries["payload"].start
    if version == "2":
        promised = metadata.pop("head_blake3", None)
        if promised != _hash(metadata, [view[offset:start]]):
            raise PatchFormatError("the patch is corrupt: the BLAKE3 hash of its head does not match its bytes")
    elif metadata.pop("segment", None) != str(SEGMENT):
        raise PatchFormatError(f"segment: expected {SEGMENT} elements, found another number")
    added = {"spans", "part", "parts"}
    if added & metadata.keys() != (added if version == "2" else set()):
        raise PatchFormatError(
            f"patch header: expected keys of format {version}, found {sorted(added & metadata.keys())}"
        )
    with translate(msgspec.ValidationError, to=lambda text: PatchFormatError(f"patch header: {text}")):
        header = msgspec.convert(metadata, PatchHeader, strict=False)
    if header.codec not in CODECS:
        raise PatchFormatError(
            f"codec: expected one of {', '.join(CODECS)}, found {header.codec!r}: upgrade pulse-rl to read one "
            "that was added later"
        )
    if header.part >= header.parts:
        raise PatchFormatError(f"part: expected less than {header.parts}, found {header.part}")
    head = {name: view[offset + entries[name].start : offset + entries[name].stop] for name in streams[:-1]}
    return header, head, start


def _read_table(stream: memoryview, format_version: int) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The tensors and their ties, checked: names in canonical order, supported dtypes, sizes within the limits."""
    data = decompress(stream, MAX_TABLE_NBYTES, "table")
    if format_version == 1:
        old = decode_json(data, _Table1, "broken table")
        table = _Table([(*row, []) for row in old.tensors], old.tied)
    else:
        table = decode_json(data, _Table, "broken table")
    if len(table.tensors) > MAX_TENSORS:
        raise PatchFormatError(f"table: expected at most {MAX_TENSORS} tensors, found {len(table.tensors)}")
    names = [row[0] for row in table.tensors]
    if any(a >= b for a, b in zip(names, names[1:], strict=False)):
        raise PatchFormatError("table: expected names in ascending order, each once")
    for name in [*names, *table.tied]:
        if not name or len(name.encode()) > safetensors_header.MAX_NAME_NBYTES:
            raise PatchFormatError(f"table: expected names of 1 to {safetensors_header.MAX_NAME_NBYTES} bytes")
    total = 0
    entries = []
    for name, dtype, shape, rows in table.tensors:
        if (
            dtype not in ITEMSIZES
            or len(shape) > safetensors_header.MAX_DIMENSIONS
            or any(not 0 <= n <= MAX_ELEMENTS for n in shape)
        ):
            raise PatchFormatError(f"table: tensor {name!r} has an impossible dtype or shape: {dtype} {shape}")
        total += math.prod(shape)
        if total > MAX_ELEMENTS:
            raise PatchFormatError(f"table: expected at most {MAX_ELEMENTS} elements, found more")
        boxes = tuple(Box(*row) for row in rows) or (whole(shape),)
        if rows:
            _check_boxes(name, shape, boxes)
        entries.append(Entry(name, dtype, shape, boxes))
    known = set(names)
    for alias, owner in table.tied.items():
        if alias in known or owner in table.tied:
            raise PatchFormatError(f"table: {alias!r} is tied to {owner!r}, which does not stand for it")
    return tuple(entries), table.tied


def _check_boxes(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise PatchFormatError unless these are boxes of a tensor as a writer lists them."""
    if len(boxes) > MAX_BOXES:
        raise PatchFormatError(f"table: tensor {name!r}: expected at most {MAX_BOXES} boxes, found {len(boxes)}")
    if (
        any(len(box.offset) != len(shape) or len(box.sizes) != len(shape) for box in boxes)
        or any(min((*box.offset, *box.sizes), default=0) < 0 or not box.inside(whole(shape)) for box in boxes)
        or not disjoint(boxes)
    ):
        raise PatchFormatError(f"table: tensor {name!r}: expected disjoint boxes of a tensor of shape {list(shape)}")
    if any(a > b for a, b in zip(boxes, boxes[1:], strict=False)):
        raise PatchFormatError(f"table: tensor {name!r}: expected boxes in ascending order")
    if whole(shape).size and not all(box.size for box in boxes):
        raise PatchFormatError(f"table: tensor {name!r}: expected boxes that are not empty")


class _Index(NamedTuple):
    blocks: list[tuple[int, int]]  # spans of each, and bytes that they share
    spans: list[tuple[int, int]]  # segments and bytes of each
    hashes: list[bytes | None]  # of each span


def _read_index(stream: memoryview, header: PatchHeader, table: Sequence[Entry], segments: Segments) -> _Index:
    """The index, of the length that header and table imply. Sets the segments' changes: no more than elements."""
    blocks, spans, hashed = header.blocks, header.spans, HASH_NBYTES
    if header.format_version == 1:
        blocks, spans, hashed = 0, header.blocks, 0  # each span is a block
    most = min(len(segments), MAX_SPANS)
    if not blocks <= spans <= most:
        raise PatchFormatError(f"index: expected at most {most} spans, found {spans} in {blocks} blocks")
    count = 2 * blocks + 2 * spans + len(segments)
    nbytes = 4 * count + hashed * spans
    words = decompress(stream, nbytes, "index")
    if len(words) != nbytes:
        raise PatchFormatError(f"index: expected {nbytes} bytes, found {len(words)}")
    numbers = np.frombuffer(words, "<u4", count)
    counts = numbers[2 * blocks + 2 * spans :]
    sizes = segments.sizes()
    over = np.flatnonzero(counts > sizes)
    if len(over):
        name = table[segments[int(over[0])].tensor].name
        raise PatchFormatError(f"tensor {name!r}: {counts[over[0]]} changes in a segment of {sizes[over[0]]} elements")
    segments.counts = counts
    pairs = [(int(a), int(b)) for a, b in numbers[: 2 * blocks + 2 * spans].reshape(-1, 2).tolist()]
    hashes: list[bytes | None] = [None] * spans
    if hashed:
        hashes = [bytes(words[at : at + hashed]) for at in range(4 * count, nbytes, hashed)]
        return _Index(pairs[:blocks], pairs[blocks:], hashes)
    return _Index([(1, 0)] * spans, pairs, hashes)


def _check_totals(header: PatchHeader, table: Sequence[Entry], segments: Segments) -> None:
    sizes = [(sum(box.size for box in entry.boxes), ITEMSIZES[entry.dtype]) for entry in table]
    totals = (
        ("elements", header.elements, sum(size for size, _ in sizes)),
        ("changes", header.changes, int(segments.counts.sum(dtype=np.int64))),
        ("full_nbytes", header.full_nbytes, sum(size * itemsize for size, itemsize in sizes)),
    )
    for what, declared, actual in totals:
        if declared != actual:
            raise PatchFormatError(f"{what}: the header says {declared}, the streams hold {actual}")


def _cut_spans(index: _Index, segments: Segments, start: int, end: int) -> Iterator[Span]:
    """Divide the segments and the payload, the bytes [start, end) of the file, into spans that cover both exactly."""
    at, taken = start, 0
    for number, (segment_count, nbytes) in enumerate(index.spans):
        if segment_count == 0 or taken + segment_count > len(segments) or at + nbytes > end:
            raise PatchFormatError("index: a span reaches past the segments or the payload")
        yield Span(number, segments[taken : taken + segment_count], at, at + nbytes, index.hashes[number])
        taken += segment_count
        at += nbytes
    if taken != len(segments) or at != end:
        raise PatchFormatError(
            f"index: the spans cover {taken} of {len(segments)} segments and {at - start} of {end - start} bytes"
        )


def _cut_blocks(index: _Index, segments: Segments, spans: Sequence[Span], shared: memoryview | None) -> Iterator[Block]:
    """Divide the spans, and what they share, into blocks that cover both exactly."""
    decoded: NDArray[np.int64] = segments.counts * segments.change_nbytes()
    first = at = taken = 0
    for count, nbytes in index.blocks:
        members = tuple(spans[first : first + count])
        size = sum(len(span.segments) for span in members)
        if count == 0 or len(members) != count or (shared is not None and at + nbytes > len(shared)):
            raise PatchFormatError("index: a block reaches past the spans or what they share")
        if decoded[taken : taken + size].sum() > MAX_BLOCK_NBYTES:
            raise PatchFormatError(f"index: a block decodes to more than {MAX_BLOCK_NBYTES} bytes")
        yield Block(segments[taken : taken + size], members, None if shared is None else shared[at : at + nbytes])
        first, at, taken = first + count, at + nbytes, taken + size
    if first != len(spans) or (shared is not None and at != len(shared)):
        raise PatchFormatError(f"index: the blocks cover {first} of {len(spans)} spans, or not all that they share")
