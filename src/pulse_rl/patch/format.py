"""The patch file: its layout and its limits, written and read.

A patch is a valid safetensors file. Its `__metadata__` is the header; its three U8 tensors are
  table    zstd(JSON): the tensors of the model, and which further names are tied to them
  index    zstd(u32 …): for each block its segments and bytes, then for each segment its changes
  payload  the blocks, one after another, each coded by the codec that the header names
`docs/format.md` is the full description. Everything read is treated as hostile: the payload hash is checked
first, sizes are checked before memory is taken, and the index must account for every byte.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple, overload

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.checkpoint import header as safetensors_header
from pulse_rl.codecs.base import Codec, Piece, SegmentSpec, segment_spec
from pulse_rl.codecs.choose import CODECS
from pulse_rl.codecs.zstd import decompress
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import PatchFormatError
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.segments import SEGMENT

FORMAT = "pulse-rl/patch"
FORMAT_VERSION = 1
MAX_TABLE_NBYTES = 16 << 20  # 160,000 tensors of ordinary names; in memory it takes up to 17 times as much
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 41
MAX_BLOCK_NBYTES = 64 << 20  # of a block's decoded indices and values; the writer closes blocks far earlier
TABLE_LEVEL = 19  # the table is a few KB and the same in every patch of a run: spend time, not bytes


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a patch."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    changes: int = 0  # elements of it that change


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, str, tuple[int, ...]]]
    tied: dict[str, str]


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class PatchHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `__metadata__` of a patch, in which every value is a string."""

    format: str
    format_version: int
    codec: str
    base: _Count
    target: _Count
    base_digest: _Digest
    target_digest: _Digest
    elements: _Count
    changes: _Count
    full_nbytes: _Count
    segment: _Count
    blocks: _Count


class Segment(NamedTuple):
    """A run of elements [start, stop) of one tensor, and how many of them change."""

    tensor: int  # place in the table
    start: int
    stop: int
    spec: SegmentSpec


class Segments(Sequence[Segment]):
    """Consecutive segments of a patch, each made when it is asked for: a few bytes can name millions of them."""

    def __init__(
        self,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        starts: list[int],  # the number of each tensor's first segment, and how many there are
        counts: NDArray[np.uint32],  # changes of each segment
        numbers: range,  # of the segments that are in here
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
        tensor = bisect_right(self._starts, number) - 1  # the last one that starts here: the others are empty
        _, dtype, shape = self._tensors[tensor]
        start = (number - self._starts[tensor]) * SEGMENT
        stop = min(start + SEGMENT, math.prod(shape))
        return Segment(tensor, start, stop, segment_spec(dtype, shape, start, stop, int(self._counts[number])))


class Block(NamedTuple):
    """Consecutive segments and the bytes that code their changes."""

    segments: Sequence[Segment]
    payload: memoryview


class Patch(NamedTuple):
    """A parsed patch: header and table are checked, the payload is hash-proved but not yet decoded."""

    header: PatchHeader
    tensors: tuple[TensorInfo, ...]
    tied: dict[str, str]
    blocks: list[Block]
    nbytes: int

    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def codec(self) -> Codec:
        return CODECS[self.header.codec]

    def pieces(self) -> Iterator[tuple[Sequence[Segment], Piece]]:
        """What can be decoded alone, in order. Raises PatchFormatError for a block that no encoder wrote."""
        for block in self.blocks:
            at = 0
            for piece in self.codec.open(block.payload, [segment.spec for segment in block.segments]):
                yield block.segments[at : at + piece.segments], piece
                at += piece.segments


def check_version(what: str, value: int) -> None:
    """Raise ValueError unless value is a version: a whole number that fits 63 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what}: expected a whole number from 0 to 2^63 − 1, found {value!r}")


def encode_table(tensors: Mapping[str, Bits], tied: Mapping[str, str]) -> bytes:
    """The table stream of these tensors, in canonical order. Raises ValueError for a name no reader accepts."""
    for name in [*tensors, *tied]:
        if not 1 <= len(name.encode()) <= safetensors_header.MAX_NAME_NBYTES:
            raise ValueError(
                f"tensor names: expected 1 to {safetensors_header.MAX_NAME_NBYTES} bytes of UTF-8, "
                f"found {len(name.encode())}: {name[:64]!r}"
            )
    table = _Table([(name, bits.dtype, bits.shape) for name, bits in tensors.items()], dict(sorted(tied.items())))
    return _compressed(msgspec.json.encode(table))


@lru_cache(maxsize=2)
def _compressed(table: bytes) -> bytes:
    """The same in every patch of a run, and a few ms to make: kept."""
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
    streams = (("table", len(table)), ("index", len(index)), ("payload", sum(map(len, payload))))
    head = safetensors_header.header_bytes(((name, "U8", (size,)) for name, size in streams), metadata)
    return b"".join([head, *data])


def _hash(metadata: Mapping[str, str], data: Sequence[bytes | memoryview]) -> str:
    """BLAKE3 over the header's lines (key=value, sorted, without the hash) and the data section."""
    hasher = blake3("".join(f"{k}={v}\n" for k, v in sorted(metadata.items()) if k != "blake3").encode())
    for part in data:
        hasher.update(part)
    return hasher.hexdigest()


def unpack(data: bytes | bytearray | memoryview) -> Patch:
    """Parse a patch and prove its hash. No block is decoded and nothing of the model's size is allocated.

    Raises PatchFormatError, saying what was expected and what was found.
    """
    view = memoryview(data).cast("B")
    metadata, entries, offset = safetensors_header.parse(view)
    if metadata.get("format") != FORMAT:
        raise PatchFormatError(f"not a pulse-rl patch: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise PatchFormatError(
            f"patch format version: expected {FORMAT_VERSION}, found {metadata.get('format_version')}; "
            "upgrade pulse-rl to read it"
        )
    found = _hash(metadata, [view[offset:]])
    if found != metadata.pop("blake3", None):
        raise PatchFormatError("the patch is corrupt: its BLAKE3 hash does not match its bytes")
    try:
        header = msgspec.convert(metadata, PatchHeader, strict=False)
    except msgspec.ValidationError as error:
        raise PatchFormatError(f"patch header: {error}") from None
    if header.codec not in CODECS:
        raise PatchFormatError(f"codec: expected one of {', '.join(CODECS)}, found {header.codec!r}")
    if header.segment != SEGMENT:
        raise PatchFormatError(f"segment: expected {SEGMENT} elements, found {header.segment}")
    if [(n, e.dtype, len(e.shape)) for n, e in entries.items()] != [
        (name, "U8", 1) for name in ("table", "index", "payload")
    ]:
        raise PatchFormatError(f"streams: expected table, index and payload, found {', '.join(entries)}")

    def stream(name: str) -> memoryview:
        return view[offset + entries[name].start : offset + entries[name].stop]

    shapes, tied = _read_table(stream("table"))
    sizes = np.array([math.prod(shape) for _, _, shape in shapes], np.int64)
    itemsizes = np.array([ITEMSIZES[dtype] for _, dtype, _ in shapes], np.int64)
    starts = np.concatenate([[0], np.cumsum(-(-sizes // SEGMENT))])  # the number of each tensor's first segment
    total = int(starts[-1])
    words = 2 * header.blocks + total
    if header.blocks > total:
        raise PatchFormatError(f"blocks: expected at most {total}, found {header.blocks}")
    numbers = decompress(stream("index"), 4 * words, "index")
    if len(numbers) != 4 * words:
        raise PatchFormatError(f"index: expected {4 * words} bytes, found {len(numbers)}")
    index = np.frombuffer(numbers, "<u4")
    counts = index[2 * header.blocks :]
    limits = np.full(total, SEGMENT, np.int64)
    limits[starts[1:][sizes > 0] - 1] = (sizes[sizes > 0] - 1) % SEGMENT + 1
    over = np.flatnonzero(counts > limits)
    if len(over):
        name = shapes[int(np.searchsorted(starts, over[0], "right")) - 1][0]
        raise PatchFormatError(f"tensor {name!r}: {counts[over[0]]} changes in a segment of {limits[over[0]]} elements")
    reached = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    changes = (reached[starts[1:]] - reached[starts[:-1]]).tolist()
    decoded = counts * np.repeat(4 + itemsizes, np.diff(starts))
    cut = Segments(shapes, starts.tolist(), counts, range(total))
    blocks = list(_cut_blocks(index[: 2 * header.blocks].tolist(), cut, decoded, stream("payload")))
    tensors = tuple(TensorInfo(*entry, changes=k) for entry, k in zip(shapes, changes, strict=True))
    patch = Patch(header, tensors, tied, blocks, len(view))
    totals = (
        ("elements", header.elements, int(sizes.sum())),
        ("changes", header.changes, sum(changes)),
        ("full_nbytes", header.full_nbytes, int(sizes @ itemsizes)),
    )
    for what, declared, actual in totals:
        if declared != actual:
            raise PatchFormatError(f"{what}: the header says {declared}, the streams hold {actual}")
    return patch


def _read_table(stream: memoryview) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]]:
    try:
        table = msgspec.json.decode(decompress(stream, MAX_TABLE_NBYTES, "table"), type=_Table)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PatchFormatError(f"broken table: {error}") from None
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
        if dtype not in ITEMSIZES or len(shape) > 64 or any(not 0 <= n <= MAX_ELEMENTS for n in shape):
            raise PatchFormatError(f"table: tensor {name!r} has an impossible dtype or shape: {dtype} {shape}")
        total += math.prod(shape)
        if total > MAX_ELEMENTS:
            raise PatchFormatError(f"table: more than {MAX_ELEMENTS} elements in all")
    known = set(names)
    for alias, owner in table.tied.items():
        if owner not in known or alias in known:
            raise PatchFormatError(f"table: {alias!r} is tied to {owner!r}, which does not stand for it")
    return table.tensors, table.tied


def _cut_blocks(
    sizes: list[int],
    cut: "Segments",
    decoded: NDArray[np.int64],  # bytes of each segment
    payload: memoryview,
) -> Iterator[Block]:
    at = taken = 0
    for segment_count, nbytes in zip(sizes[::2], sizes[1::2], strict=True):
        if segment_count == 0 or taken + segment_count > len(cut) or at + nbytes > len(payload):
            raise PatchFormatError("index: a block reaches past the segments or the payload")
        part = cut[taken : taken + segment_count]
        if decoded[taken : taken + segment_count].sum() > MAX_BLOCK_NBYTES:
            raise PatchFormatError(f"index: a block decodes to more than {MAX_BLOCK_NBYTES} bytes")
        yield Block(part, payload[at : at + nbytes])
        taken += segment_count
        at += nbytes
    if taken != len(cut) or at != len(payload):
        raise PatchFormatError(
            f"index: the blocks cover {taken} of {len(cut)} segments and {at} of {len(payload)} bytes"
        )


def decoded_nbytes(part: Sequence[Segment]) -> int:
    """Memory that the decoded changes of these segments may take, bytes."""
    return sum(segment.spec.decoded_nbytes for segment in part)
