"""The patch file: its layout and its limits, written and read.

A patch is a valid safetensors file. Its `__metadata__` is the header; its two U8 tensors are
  head     the bytes of the first two of these, two u32, then
           table   zstd(JSON): the tensors, which boxes of them the patch covers, and which names are tied to them
           index   zstd: how many spans each block has, how many segments each span, and how many changes each segment;
                   and the hash of each span
           shared  for each block, what its spans have in common
  payload  the spans, one after another, each coded by the codec that the header names
The file's hash is that of the header and the head, which has the hash of each span. So a receiver that holds a part of
the weights reads the payload's spans that it needs, and proves them. The hash covers the same in every version of the
format, so that a reader of an older one can tell newer from damaged.

`docs/format.md` is the full description. Input is treated as hostile: hashes are checked first, sizes before memory is
allocated, and the index must account for every byte. Blocks are decoded in `apply`, not here.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs.base import Codec, Decoded, OldBits, OldReader, Units
from pulse_rl.codecs.choose import CODECS
from pulse_rl.documents import Count, Digest, convert
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import FormatError, PatchFormatError, printable, skew, translate
from pulse_rl.patch.index import CodedBlock, Index, encode_index, read_index, span_hash
from pulse_rl.patch.segments import Entry, Segments, Table, groups_of
from pulse_rl.patch.table import encode_table, read_table
from pulse_rl.weights.layout import TensorSpec, derived

FORMAT = "pulse-rl/patch"
FORMAT_VERSION = 1
STREAMS = ("head", "payload")
_SIZES = struct.Struct("<II")  # of the table and the index
HASH_DIGITS = 32  # of BLAKE3, hexadecimal: the first half of it, as of a span's
MAX_HEAD_NBYTES = 256 << 20
MAX_BLOCK_NBYTES = 64 << 20  # of a block's decoded indices and values; the writer closes blocks far earlier


class TensorInfo(TensorSpec, frozen=True):
    """One tensor of a patch.

    Attributes:
        name: The tensor's name.
        dtype: Its dtype as safetensors spells it, such as "BF16".
        shape: Its shape.
        changes: The number of its elements that change.
    """

    changes: int = 0


class PatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `__metadata__` of a patch but its hash. In the file every value is a string."""

    format: str
    format_version: int
    codec: str
    base: Count
    target: Count
    base_digest: Digest  # of the whole weights, also in one of several parts
    target_digest: Digest
    blocks: Count  # of this part
    spans: Count
    part: Count  # of several, which are one patch together: each covers other elements
    parts: Count


class Span(NamedTuple):
    """Consecutive segments, and where the bytes are that code their changes: what is read at once."""

    number: int
    segments: Segments
    start: int  # in the file
    stop: int
    hash: bytes

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Joined: TypeAlias = Callable[[Sequence[Span], Span], bool]  # whether a span is opened with those before it


class Block(NamedTuple):
    """Consecutive spans, and what they share."""

    segments: Segments
    spans: tuple[Span, ...]
    shared: memoryview


class Patch(NamedTuple):
    """A parsed patch: header, table and index are checked and the hashes are proved, but nothing is decoded."""

    header: PatchHeader
    table: Table
    tied: dict[str, str]  # further name → the name in `table` that stands for it
    segments: Segments
    blocks: tuple[Block, ...]
    head_nbytes: int
    nbytes: int  # of the file
    payloads: Mapping[int, memoryview]  # the spans that were read, by number

    @property
    def elements(self) -> int:
        """How many elements it covers."""
        return derived(self.table, covered)[0]

    @property
    def full_nbytes(self) -> int:
        """The bytes of these elements."""
        return derived(self.table, covered)[1]

    @property
    def changes(self) -> int:
        """How many of them change."""
        return int(self.segments.counts.sum(dtype=np.int64))

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All tensors, in canonical order."""
        changes = self.segments.per_tensor().tolist()
        return tuple(
            TensorInfo(name, dtype, shape, k) for (name, dtype, shape, _), k in zip(self.table, changes, strict=True)
        )

    def by_name(self) -> dict[str, Entry]:
        """The table by tensor name."""
        return self.table.derived(_by_name)

    @property
    def codec(self) -> Codec:
        return CODECS[self.header.codec]

    @property
    def spans(self) -> Iterator[Span]:
        """All spans, in order."""
        return (span for block in self.blocks for span in block.spans)

    def opened(self, joined: Joined | None = None) -> Iterator[tuple[Segments, Units]]:
        """Of each span that was read, in order, the segments and the units.

        joined: which spans of a block are opened as one; None for no such.
        Raises PatchFormatError for a span that no encoder wrote; so does `decode` of units.
        """
        for block in self.blocks:
            if any(span.number in self.payloads for span in block.spans):
                yield from self._opened(block, joined)

    def _opened(self, block: Block, joined: Joined | None) -> Iterator[tuple[Segments, Units]]:
        with translate(FormatError, to=PatchFormatError):
            runs: list[list[Span]] = []
            for span in block.spans:
                read = span.number in self.payloads and bool(runs) and runs[-1][-1].number in self.payloads
                if read and joined is not None and joined(runs[-1], span):
                    runs[-1].append(span)
                else:
                    runs.append([span])
            sizes = [sum(len(span.segments) for span in run) for run in runs]
            opened = self.codec.open(block.shared, block.segments.specs(), sizes)
        for run, size, units in zip(runs, sizes, opened, strict=True):
            if run[0].number not in self.payloads:
                continue
            coded = [self.payloads[span.number] for span in run]
            with translate(FormatError, to=PatchFormatError):
                found = units(coded)
            start = run[0].segments.numbers.start
            yield self.segments[start : start + size], found._replace(decode=partial(_decode, found))

    def with_spans(self, payloads: Mapping[int, memoryview]) -> "Patch":
        """The same patch with these spans read. Raises PatchFormatError for one that its hash does not fit."""
        for span in self.spans:
            payload = payloads.get(span.number)
            if payload is not None and (len(payload) != span.nbytes or span_hash(payload) != span.hash):
                raise PatchFormatError(f"the patch is corrupt: the hash of span {span.number} does not match its bytes")
        return self._replace(payloads=dict(payloads))


def _by_name(table: Table) -> dict[str, Entry]:
    return {entry.name: entry for entry in table}


def _decode(units: Units, numbers: NDArray[np.int64], read: OldReader, old: OldBits | None) -> list[Decoded]:
    with translate(FormatError, to=PatchFormatError):
        return units.decode(numbers, read, old)


def check_version(what: str, value: int) -> None:
    """Raise ValueError unless value is a version: a whole number that fits 63 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what}: expected a whole number from 0 to 2^63 − 1, found {value!r}")


def check_versions(base: int, target: int) -> None:
    """Raise ValueError unless both are versions, and the target is the later one."""
    check_version("base", base)
    check_version("target", target)
    if target <= base:
        raise ValueError(f"target: expected a later version than base ({base}), found {target}")


# Writing


def check_table(table: Sequence[Entry], tied: Mapping[str, str]) -> None:
    """Raise ValueError or PatchFormatError for tensors that no patch can describe."""
    groups_of(read_table(memoryview(encode_table(table, tied)))[0])


def pack(
    header: PatchHeader, table: bytes, counts: NDArray[np.int64], blocks: Sequence[CodedBlock]
) -> tuple[bytes, int]:
    """Put a patch file together. counts: changes of each segment, in order. Returns it, and the bytes of its head."""
    index = encode_index(counts, blocks)
    head = b"".join([_SIZES.pack(len(table), len(index)), table, index, *(block.shared for block in blocks)])
    metadata = {key: str(value) for key, value in msgspec.structs.asdict(header).items()}
    metadata["blake3"] = _hash(metadata, head)
    payload = [coded for block in blocks for _, coded in block.spans]
    sizes = (len(head), sum(map(len, payload)))
    described = ((name, "U8", (size,)) for name, size in zip(STREAMS, sizes, strict=True))
    container = safetensors_header.header_bytes(described, metadata)
    return b"".join([container, head, *payload]), len(container) + len(head)


def _hash(metadata: Mapping[str, str], head: bytes | memoryview) -> str:
    """BLAKE3 over the header's lines (key=value, sorted, without the hash) and the head."""
    lines = "".join(f"{k}={v}\n" for k, v in sorted(metadata.items()) if k != "blake3")
    return blake3(lines.encode() + head).hexdigest()[:HASH_DIGITS]


# Reading


def unpack(data: bytes | bytearray | memoryview, source: str | None = None) -> Patch:
    """Parse a patch and prove all its hashes. Nothing is decoded and nothing of the model's size is allocated.

    source: where the bytes come from, for the error. Raises PatchFormatError, and VersionSkewError for a newer format.
    """
    view = memoryview(data).cast("B")
    with translate(FormatError, to=partial(PatchFormatError, source=source)):
        patch = _unpack(view, source, None)
        payloads = {span.number: view[span.start : span.stop] for span in patch.spans}
        return patch.with_spans(payloads)


def unpack_head(data: bytes | bytearray | memoryview, nbytes: int, source: str | None = None) -> Patch:
    """Parse the head of a patch and prove its hash; no span is read yet.

    nbytes: of the whole file. Raises as `unpack`.
    """
    with translate(FormatError, to=partial(PatchFormatError, source=source)):
        return _unpack(memoryview(data).cast("B"), source, nbytes)


def _unpack(view: memoryview, source: str | None, nbytes: int | None) -> Patch:
    """nbytes: of the file, of which view is the head; None if it is all of it."""
    header, head, start = _read_header(view, source, nbytes)
    table_stream, index_stream, shared = _divided(head)
    table, tied = read_table(table_stream)
    if tied and header.parts == 1 and (unknown := set(tied.values()) - {entry.name for entry in table}):
        raise PatchFormatError(f"table: tensors are tied to {sorted(unknown)[:8]}, which it does not have")
    segments = Segments(table)
    index = read_index(index_stream, header.blocks, header.spans, table, segments)
    end = len(view) if nbytes is None else nbytes
    spans = list(_cut_spans(index, segments, start, end))
    blocks = tuple(_cut_blocks(index, segments, spans, shared))
    return Patch(header, table, tied, segments, blocks, start, end, {})


def _read_header(view: memoryview, source: str | None, nbytes: int | None) -> tuple[PatchHeader, memoryview, int]:
    """The header, the head, and where the payload begins. The hash is proved before the header's values are used."""
    metadata, entries, offset = safetensors_header.parse(view, nbytes=nbytes)
    if metadata.get("format") != FORMAT:
        raise PatchFormatError(f"not a pulse-rl patch: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    start = offset + entries["head"].stop if "head" in entries else offset
    head = view[offset:start]
    if metadata.pop("blake3", None) != _hash(metadata, head):
        raise PatchFormatError("the patch is corrupt: its BLAKE3 hash does not match its bytes")
    version = metadata.get("format_version", "")
    if version.isascii() and version.isdigit() and len(version) < 10 and int(version) > FORMAT_VERSION:
        raise skew("the patch", int(version), FORMAT_VERSION, written_by=metadata.get("software"), source=source)
    if version != str(FORMAT_VERSION):
        raise PatchFormatError(f"patch format version: expected {FORMAT_VERSION}, found {printable(version)}")
    if [(n, e.dtype, len(e.shape)) for n, e in entries.items()] != [(name, "U8", 1) for name in STREAMS]:
        raise PatchFormatError(f"streams: expected {', '.join(STREAMS)}, found {', '.join(map(printable, entries))}")
    with translate(msgspec.ValidationError, to=lambda text: PatchFormatError(f"patch header: {text}")):
        header = convert(metadata, PatchHeader, strict=False)
    if header.codec not in CODECS:
        raise PatchFormatError(
            f"codec: expected one of {', '.join(CODECS)}, found {header.codec!r}: upgrade pulse-rl to read one "
            "that was added later"
        )
    if header.part >= header.parts:
        raise PatchFormatError(f"part: expected less than {header.parts}, found {header.part}")
    return header, head, start


def _divided(head: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """The table, the index, and what spans share."""
    if len(head) < _SIZES.size:
        raise PatchFormatError(f"head: expected at least {_SIZES.size} bytes, found {len(head)}")
    table, index = _SIZES.unpack_from(head)
    streams = head[_SIZES.size :]
    if table + index > len(streams):
        raise PatchFormatError(f"head: expected a table and an index of {table + index} bytes, found {len(streams)}")
    return streams[:table], streams[table : table + index], streams[table + index :]


def covered(table: Sequence[Entry]) -> tuple[int, int]:
    """Elements and bytes."""
    sizes = [(sum(box.size for box in entry.boxes), ITEMSIZES[entry.dtype]) for entry in table]
    return sum(size for size, _ in sizes), sum(size * itemsize for size, itemsize in sizes)


def _cut_spans(index: Index, segments: Segments, start: int, end: int) -> Iterator[Span]:
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


def _cut_blocks(index: Index, segments: Segments, spans: Sequence[Span], shared: memoryview) -> Iterator[Block]:
    """Divide the spans, and what they share, into blocks that cover both exactly."""
    decoded: NDArray[np.int64] = segments.counts * segments.change_nbytes()
    first = at = taken = 0
    for count, nbytes in index.blocks:
        members = tuple(spans[first : first + count])
        size = sum(len(span.segments) for span in members)
        if count == 0 or len(members) != count or at + nbytes > len(shared):
            raise PatchFormatError("index: a block reaches past the spans or what they share")
        if decoded[taken : taken + size].sum() > MAX_BLOCK_NBYTES:
            raise PatchFormatError(f"index: a block decodes to more than {MAX_BLOCK_NBYTES} bytes")
        yield Block(segments[taken : taken + size], members, shared[at : at + nbytes])
        first, at, taken = first + count, at + nbytes, taken + size
    if first != len(spans) or at != len(shared):
        raise PatchFormatError(f"index: the blocks cover {first} of {len(spans)} spans, or not all that they share")
