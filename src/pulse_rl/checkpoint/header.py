"""The safetensors layout, read and written without a copy.

The `safetensors` package cannot write a file as a stream, nor read BF16 bytes without torch. So the few lines of the
layout are here: `u64 n | JSON header of n bytes | data`, all little-endian. Input is treated as hostile: sizes are
checked before allocation, and the tensors must cover the data exactly, without holes or overlaps. The tests compare
both directions with the `safetensors` package. Files are opened in `files` and written in `shards`.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import CheckpointFormatError, FormatError, translate

MAX_HEADER_NBYTES = 100_000_000  # the same limit as in the safetensors package
MAX_NAME_NBYTES = 1024
MAX_DIMENSIONS = 64
MAX_DIMENSION = (1 << 63) - 1
BROKEN = "broken safetensors header"


class HeaderEntry(NamedTuple):
    """One tensor of a file: bytes [start, stop) of the data section."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file's header says."""

    metadata: dict[str, str]
    entries: dict[str, HeaderEntry]  # by tensor name, in the file's order
    offset: int  # where the data section starts in the file, bytes


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse(data: memoryview, source: str | None = None, nbytes: int | None = None) -> Header:
    """Read and check the header of a file.

    source: where the bytes come from, for the error. nbytes: of the file, where data is only its beginning. Raises
    CheckpointFormatError for anything malformed.
    """
    with translate(FormatError, to=partial(CheckpointFormatError, source=source)):
        length = _header_length(data)
        metadata, entries = _decode(data[8 : 8 + length])
        _check_coverage(entries, (len(data) if nbytes is None else nbytes) - 8 - length)
        return Header(metadata, entries, 8 + length)


def _header_length(data: memoryview) -> int:
    if len(data) < 8:
        raise CheckpointFormatError(f"not a safetensors file: expected at least 8 bytes, found {len(data)}")
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_NBYTES:
        raise CheckpointFormatError(
            f"not a safetensors file: expected a header of at most {MAX_HEADER_NBYTES} bytes, "
            f"the first 8 bytes announce {length} bytes"
        )
    if length > len(data) - 8:
        raise CheckpointFormatError(
            f"not a safetensors file, or truncated: expected a header of {length} bytes, found {len(data) - 8}"
        )
    return int(length)


def _decode(text: memoryview) -> tuple[dict[str, str], dict[str, HeaderEntry]]:
    """The metadata and the tensors that the JSON of a header lists."""
    raw = decode_json(text, dict[str, msgspec.Raw], BROKEN)
    metadata = decode_json(raw.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str], BROKEN)
    parsed = {name: decode_json(entry, _RawEntry, f"{BROKEN}: tensor {name!r}") for name, entry in raw.items()}
    entries = {
        name: HeaderEntry(entry.dtype, tuple(entry.shape), *entry.data_offsets) for name, entry in parsed.items()
    }
    # JSON lets a name appear twice, and two readers could take different entries: refuse it.
    with translate(RecursionError, to=lambda text: CheckpointFormatError(f"{BROKEN}: {text}")):
        json.loads(str(text, "utf-8"), object_pairs_hook=_unique)
    return metadata, entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointFormatError(f"{BROKEN}: expected every name once, found {len(pairs) - len(found)} repeated")
    return found


def _check_coverage(entries: dict[str, HeaderEntry], data_nbytes: int) -> None:
    """Check that the tensors are of supported types and cover the data section exactly."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        itemsize = ITEMSIZES.get(entry.dtype)
        if itemsize is None:
            raise CheckpointFormatError(f"tensor {name!r}: dtype {entry.dtype} is not supported")
        # Both limits are checked before the product, whose cost grows with the square of the number of dimensions.
        if len(entry.shape) > MAX_DIMENSIONS:
            raise CheckpointFormatError(
                f"tensor {name!r}: expected at most {MAX_DIMENSIONS} dimensions, found {len(entry.shape)}"
            )
        if any(not 0 <= size <= MAX_DIMENSION for size in entry.shape):
            raise CheckpointFormatError(f"tensor {name!r}: expected dimensions from 0 to 2^63 − 1, found others")
        nbytes = math.prod(entry.shape) * itemsize
        if entry.start != at or entry.stop - entry.start != nbytes:
            raise CheckpointFormatError(
                f"tensor {name!r}: expected bytes {at} to {at + nbytes}, found {entry.start} to {entry.stop}"
            )
        # An empty tensor may have other dimensions of any size, which no array can have.
        if math.prod(size or 1 for size in entry.shape) * itemsize > MAX_DIMENSION:
            raise CheckpointFormatError(f"tensor {name!r}: shape {list(entry.shape)} is larger than any array can be")
        at = entry.stop
    if at != data_nbytes:
        raise CheckpointFormatError(
            f"truncated or padded: the header lists {at} bytes of data, the file holds {data_nbytes}"
        )


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for names of tensors that readers refuse."""
    for name in names:
        try:
            nbytes = len(name.encode())
        except UnicodeEncodeError:
            raise ValueError(f"tensor names: expected text that UTF-8 can hold, found {name[:64]!r}") from None
        if not 1 <= nbytes <= MAX_NAME_NBYTES:
            raise ValueError(
                f"tensor names: expected 1 to {MAX_NAME_NBYTES} bytes of UTF-8, found {nbytes}: {name[:64]!r}"
            )


def check_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
    """Raise CheckpointFormatError if the header of a file with these tensors (name, dtype, shape) cannot be read."""
    data = memoryview(header_bytes(tensors))
    length = _header_length(data)
    _, entries = _decode(data[8 : 8 + length])
    _check_coverage(entries, sum(math.prod(shape) * ITEMSIZES[dtype] for _, dtype, shape in tensors))


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """The length and the JSON header of a file that holds these tensors (name, dtype, shape) in this order.

    Padded with spaces so that the data section starts at a multiple of 8 bytes.
    """
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        stop = at + math.prod(shape) * ITEMSIZES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = msgspec.json.encode(document)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
