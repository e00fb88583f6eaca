"""The patch file: its layout and its limits, written and read.

A patch is a valid safetensors file. Its `__metadata__` is the header; its three U8 tensors are
  table    zstd(JSON): the tensors of the model, and which further names are tied to them
  index    zstd(u32 …): for each block its segments and bytes, then for each segment its changes
  payload  the blocks, one after another, each coded by the codec that the header names
`docs/format.md` is the full description. Input is treated as hostile: the hash is checked first, sizes are checked
before memory is allocated, and the index must account for every byte. Blocks are decoded in `apply`, not here.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, overload

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs.base import Codec, Piece, Read, SegmentSpec, segment_spec
from pulse_rl.codecs.choose import CODECS
from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import Count, Digest, decode_json
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import FormatError, PatchFormatError, printable, skew, translate
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import TensorSpec
from pulse_rl.weights.segments import SEGMENT

FORMAT = "pulse-rl/patch"
FORMAT_VERSION = 1
STREAMS = ("table", "index", "payload")
MAX_TABLE_NBYTES = 16 << 20  # 160,000 tensors of ordinary names; in memory it takes up to 17 times as much
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 41
MAX_BLOCK_NBYTES = 64 << 20  # of a block's decoded indices and values; the writer closes blocks far earlier
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


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, str, tuple[int, ...]]]  # name, dtype, shape
    tied: dict[str, str]  # further name → the name in `tensors` that stands for it


class PatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `__metadata__` of a patch but its hash. In the file every value is a string."""

    format: str
    format_version: int
    codec: str
    base: Count
    target: Count
    base_digest: Digest
    target_digest: Digest
    elements: Count
    changes: Count
    full_nbytes: Count
    segment: Count
    blocks: Count


class Segment(NamedTuple):
    """The elements [start, stop) of one tensor, which are coded on their own, and how many of them change."""

    tensor: int  # position in the table
    start: int
    stop: int
    spec: SegmentSpec


class Segments(Sequence[Segment]):
    """Consecutive segments of a patch, each made on access, as a few bytes can name millions of them."""

    def __init__(
        self,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        starts: list[int],  # the number of each tensor's first segment, and the number of all segments
        counts: NDArray[np.uint32],  # changes of each segment
        numbers: range,  # of the segments in this sequence
    ) -> None:
        self._tensors, self._starts, self._counts, self._numbers = tensors, starts, counts, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Segment: ...
    @overload
    def __getitem__(self, place: slice) -> "Segments": ...
    def __getitem__(self, place: int | slice) -> "Segment | Segments":
        if isinstance(place, slice):
            return Segments(self._tensors, self._starts, self._counts, self._numbers[place])
        number = self._numbers[place]
        tensor = bisect_right(self._starts, number) - 1  # the last that starts here: those before it are empty
        _, dtype, shape = self._tensors[tensor]
        start = (number - self._starts[tensor]) * SEGMENT
        stop = min(start + SEGMENT, math.prod(shape))
        return Segment(tensor, start, stop, segment_spec(dtype, shape, start, stop, int(self._counts[number])))


class Block(NamedTuple):
    """Consecutive segments and the bytes that code their changes."""

    segments: Sequence[Segment]
    payload: memoryview


class Patch(NamedTuple):
    """A parsed patch: header, table and index are checked and the hash is proved, but nothing is decoded."""

    header: PatchHeader
    tensors: tuple[TensorInfo, ...]  # in canonical order
    tied: dict[str, str]  # further name → the name in `tensors` that stands for it
    blocks: list[Block]
    nbytes: int  # of the file

    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def codec(self) -> Codec:
        return CODECS[self.header.codec]

    def pieces(self) -> Iterator[tuple[Sequence[Segment], Piece]]:
        """The runs of segments that can be decoded alone, in order.

        Raises PatchFormatError for a block that no encoder wrote; so does a piece's `decode`.
        """
        for block in self.blocks:
            with translate(FormatError, to=PatchFormatError):
                pieces = self.codec.open(block.payload, [segment.spec for segment in block.segments])
            at = 0
            for piece in pieces:
                decode = partial(_decode, piece.decode)
                yield block.segments[at : at + piece.segments], Piece(piece.segments, decode)
                at += piece.segments


def _decode(decode: Callable[[Sequence[Read]], list[Changes]], reads: Sequence[Read]) -> list[Changes]:
    with translate(FormatError, to=PatchFormatError):
        return decode(reads)


def decoded_nbytes(segments: Sequence[Segment]) -> int:
    """Memory that the decoded changes of these segments may take, bytes."""
    return sum(segment.spec.decoded_nbytes for segment in segments)


def check_version(what: str, value: int) -> None:
    """Raise ValueError unless value is a version: a whole number that fits 63 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what}: expected a whole number from 0 to 2^63 − 1, found {value!r}")


# Writing


def encode_table(tensors: Mapping[str, Bits], tied: Mapping[str, str]) -> bytes:
    """The table stream of these tensors, in canonical order. Raises ValueError for a name that readers refuse."""
    safetensors_header.check_names([*tensors, *tied])
    table = _Table([(name, bits.dtype, bits.shape) for name, bits in tensors.items()], dict(sorted(tied.items())))
    encoded = msgspec.json.encode(table)
    if len(encoded) > MAX_TABLE_NBYTES:
        raise ValueError(
            f"tensor names: expected a table of at most {MAX_TABLE_NBYTES} bytes, found {len(encoded)}: "
            "too many tensors"
        )
    return _compressed(encoded)


def check_table(tensors: Mapping[str, Bits], tied: Mapping[str, str]) -> None:
    """Raise ValueError or PatchFormatError for tensors that no patch can describe."""
    _read_table(memoryview(encode_table(tensors, tied)))


@lru_cache(maxsize=2)
def _compressed(table: bytes) -> bytes:
    """Kept from patch to patch, because a run's tables are equal and take a few ms to compress."""
    return zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(table)


def pack(header: PatchHeader, table: bytes, counts: Sequence[int], blocks: Sequence[tuple[int, bytes]]) -> bytes:
    """Put a patch file together.

    counts: changes of each segment, in order. blocks: (number of segments, coded bytes) of each block.
    """
    numbers = [number for size, payload in blocks for number in (size, len(payload))] + list(counts)
    index = zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(np.array(numbers, "<u4").tobytes())
    payload = [coded for _, coded in blocks]
    metadata = {key: str(value) for key, value in msgspec.structs.asdict(header).items()}
    data = [table, index, *payload]
    metadata["blake3"] = _hash(metadata, data)
    sizes = (len(table), len(index), sum(map(len, payload)))
    described = ((name, "U8", (size,)) for name, size in zip(STREAMS, sizes, strict=True))
    return b"".join([safetensors_header.header_bytes(described, metadata), *data])


def _hash(metadata: Mapping[str, str], data: Sequence[bytes | memoryview]) -> str:
    """BLAKE3 over the header's lines (key=value, sorted, without the hash) and the data section."""
    hasher = blake3("".join(f"{k}={v}\n" for k, v in sorted(metadata.items()) if k != "blake3").encode())
    for part in data:
        hasher.update(part)
    return hasher.hexdigest()


# Reading


def unpack(data: bytes | bytearray | memoryview, source: str | None = None) -> Patch:
    """Parse a patch and prove its hash. No block is decoded and nothing of the model's size is allocated.

    source: where the bytes come from, for the error. Raises PatchFormatError, and VersionSkewError for a newer format.
    """
    view = memoryview(data).cast("B")
    with translate(FormatError, to=partial(PatchFormatError, source=source)):
        header, streams = _read_header(view, source)
        table = _read_table(streams["table"])
        grid = _grid(table)
        index = _read_index(streams["index"], header, table, grid)
        _check_totals(header, grid, index)
        cut = Segments(table.tensors, grid.starts.tolist(), index.counts, range(grid.segments))
        blocks = list(_cut_blocks(index.blocks, cut, index.counts * grid.change_nbytes(), streams["payload"]))
        changes = grid.per_tensor(index.counts).tolist()
        tensors = tuple(TensorInfo(*entry, changes=k) for entry, k in zip(table.tensors, changes, strict=True))
        return Patch(header, tensors, table.tied, blocks, len(view))


def _read_header(view: memoryview, source: str | None) -> tuple[PatchHeader, dict[str, memoryview]]:
    """The header, and the streams by name. The hash is proved before the header's values are looked at.

    Every version of the format has this hash, so a patch of a newer format is not taken for a damaged one.
    """
    metadata, entries, offset = safetensors_header.parse(view)
    if metadata.get("format") != FORMAT:
        raise PatchFormatError(f"not a pulse-rl patch: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    if _hash(metadata, [view[offset:]]) != metadata.pop("blake3", None):
        raise PatchFormatError("the patch is corrupt: its BLAKE3 hash does not match its bytes")
    version = metadata.get("format_version", "")
    if version.isascii() and version.isdigit() and len(version) < 10 and int(version) > FORMAT_VERSION:
        raise skew("the patch", int(version), FORMAT_VERSION, written_by=metadata.get("software"), source=source)
    if version != str(FORMAT_VERSION):
        raise PatchFormatError(f"patch format version: expected {FORMAT_VERSION}, found {printable(version)}")
    with translate(msgspec.ValidationError, to=lambda text: PatchFormatError(f"patch header: {text}")):
        header = msgspec.convert(metadata, PatchHeader, strict=False)
    if header.codec not in CODECS:
        raise PatchFormatError(
            f"codec: expected one of {', '.join(CODECS)}, found {header.codec!r}: upgrade pulse-rl to read one "
            "that was added later"
        )
    if header.segment != SEGMENT:
        raise PatchFormatError(f"segment: expected {SEGMENT} elements, found {header.segment}")
    if [(n, e.dtype, len(e.shape)) for n, e in entries.items()] != [(name, "U8", 1) for name in STREAMS]:
        raise PatchFormatError(f"streams: expected {', '.join(STREAMS)}, found {', '.join(entries)}")
    return header, {name: view[offset + entry.start : offset + entry.stop] for name, entry in entries.items()}


def _read_table(stream: memoryview) -> _Table:
    """The tensors and their ties, checked: names in canonical order, supported dtypes, sizes within the limits."""
    table = decode_json(decompress(stream, MAX_TABLE_NBYTES, "table"), _Table, "broken table")
    if len(table.tensors) > MAX_TENSORS:
        raise PatchFormatError(f"table: expected at most {MAX_TENSORS} tensors, found {len(table.tensors)}")
    names = [name for name, _, _ in table.tensors]
    if any(a >= b for a, b in zip(names, names[1:], strict=False)):
        raise PatchFormatError("table: expected names in ascending order, each once")
    for name in [*names, *table.tied]:
        if not name or len(name.encode()) > safetensors_header.MAX_NAME_NBYTES:
            raise PatchFormatError(f"table: expected names of 1 to {safetensors_header.MAX_NAME_NBYTES} bytes")
    total = 0
    for name, dtype, shape in table.tensors:
        if (
            dtype not in ITEMSIZES
            or len(shape) > safetensors_header.MAX_DIMENSIONS
            or any(not 0 <= n <= MAX_ELEMENTS for n in shape)
        ):
            raise PatchFormatError(f"table: tensor {name!r} has an impossible dtype or shape: {dtype} {shape}")
        total += math.prod(shape)
        if total > MAX_ELEMENTS:
            raise PatchFormatError(f"table: expected at most {MAX_ELEMENTS} elements, found more")
    known = set(names)
    for alias, owner in table.tied.items():
        if owner not in known or alias in known:
            raise PatchFormatError(f"table: {alias!r} is tied to {owner!r}, which does not stand for it")
    return table


class _Grid(NamedTuple):
    """How the tensors of a table divide into segments."""

    sizes: NDArray[np.int64]  # (tensors,), elements
    itemsizes: NDArray[np.int64]  # (tensors,), bytes an element
    starts: NDArray[np.int64]  # (tensors + 1,), the number of each tensor's first segment, then of all segments

    @property
    def segments(self) -> int:
        """How many there are."""
        return int(self.starts[-1])

    def segment_sizes(self) -> NDArray[np.int64]:
        """Elements of each segment: SEGMENT, but for the last of each tensor."""
        sizes = np.full(self.segments, SEGMENT, np.int64)
        filled = self.sizes > 0
        sizes[self.starts[1:][filled] - 1] = (self.sizes[filled] - 1) % SEGMENT + 1
        return sizes

    def change_nbytes(self) -> NDArray[np.int64]:
        """Memory of one decoded change of each segment, bytes: an index and a value."""
        return np.repeat(4 + self.itemsizes, np.diff(self.starts))

    def per_tensor(self, counts: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The sum over each tensor's segments, (tensors,)."""
        sums = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        changes: NDArray[np.int64] = sums[self.starts[1:]] - sums[self.starts[:-1]]
        return changes


def _grid(table: _Table) -> _Grid:
    sizes = np.array([math.prod(shape) for _, _, shape in table.tensors], np.int64)
    itemsizes = np.array([ITEMSIZES[dtype] for _, dtype, _ in table.tensors], np.int64)
    return _Grid(sizes, itemsizes, np.concatenate([[0], np.cumsum(-(-sizes // SEGMENT))]))


class _Index(NamedTuple):
    blocks: list[tuple[int, int]]  # segments and bytes of each block
    counts: NDArray[np.uint32]  # (segments,), changes of each


def _read_index(stream: memoryview, header: PatchHeader, table: _Table, grid: _Grid) -> _Index:
    """The index, of the length that header and table imply, with no more changes in a segment than elements."""
    if header.blocks > grid.segments:
        raise PatchFormatError(f"blocks: expected at most {grid.segments}, found {header.blocks}")
    nbytes = 4 * (2 * header.blocks + grid.segments)
    words = decompress(stream, nbytes, "index")
    if len(words) != nbytes:
        raise PatchFormatError(f"index: expected {nbytes} bytes, found {len(words)}")
    numbers = np.frombuffer(words, "<u4")
    blocks, counts = numbers[: 2 * header.blocks].tolist(), numbers[2 * header.blocks :]
    sizes = grid.segment_sizes()
    over = np.flatnonzero(counts > sizes)
    if len(over):
        name = table.tensors[int(np.searchsorted(grid.starts, over[0], "right")) - 1][0]
        raise PatchFormatError(f"tensor {name!r}: {counts[over[0]]} changes in a segment of {sizes[over[0]]} elements")
    return _Index(list(zip(blocks[::2], blocks[1::2], strict=True)), counts)


def _check_totals(header: PatchHeader, grid: _Grid, index: _Index) -> None:
    totals = (
        ("elements", header.elements, int(grid.sizes.sum())),
        ("changes", header.changes, int(index.counts.sum(dtype=np.int64))),
        ("full_nbytes", header.full_nbytes, int(grid.sizes @ grid.itemsizes)),
    )
    for what, declared, actual in totals:
        if declared != actual:
            raise PatchFormatError(f"{what}: the header says {declared}, the streams hold {actual}")


def _cut_blocks(
    sizes: Sequence[tuple[int, int]],
    cut: Segments,
    decoded: NDArray[np.int64],  # memory of each segment's decoded changes, bytes
    payload: memoryview,
) -> Iterator[Block]:
    """Divide the segments and the payload into blocks, which must cover both exactly."""
    at = taken = 0
    for segment_count, nbytes in sizes:
        if segment_count == 0 or taken + segment_count > len(cut) or at + nbytes > len(payload):
            raise PatchFormatError("index: a block reaches past the segments or the payload")
        if decoded[taken : taken + segment_count].sum() > MAX_BLOCK_NBYTES:
            raise PatchFormatError(f"index: a block decodes to more than {MAX_BLOCK_NBYTES} bytes")
        yield Block(cut[taken : taken + segment_count], payload[at : at + nbytes])
        taken += segment_count
        at += nbytes
    if taken != len(cut) or at != len(payload):
        raise PatchFormatError(
            f"index: the blocks cover {taken} of {len(cut)} segments and {at} of {len(payload)} bytes"
        )
