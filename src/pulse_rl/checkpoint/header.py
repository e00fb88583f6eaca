"""The safetensors layout, read and written without a copy.

The `safetensors` package cannot stream a file out, nor give BF16 bytes without torch, so the few lines of
the layout are here: `u64 n | JSON header of n bytes | data`, all little-endian. What is read is treated as
hostile: caps before allocation, and the data must be covered exactly, without holes or overlaps. The tests
compare both directions with the `safetensors` package.
"""

import json
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.errors import PatchFormatError

MAX_HEADER_NBYTES = 100_000_000  # the same cap as the safetensors package has
MAX_NAME_NBYTES = 1024
MAX_DIMENSIONS = 64
MAX_DIMENSION = (1 << 63) - 1


class Entry(NamedTuple):
    """One tensor of a container: bytes [start, stop) of the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    metadata: dict[str, str]
    entries: dict[str, Entry]
    offset: int  # where the data section starts in the file, bytes


class _RawEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse(data: memoryview) -> Header:
    """Read and check the header of a whole container. Raises PatchFormatError for anything malformed."""
    if len(data) < 8:
        raise PatchFormatError(f"not a safetensors file: expected at least 8 bytes, found {len(data)}")
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_NBYTES:
        raise PatchFormatError(
            f"not a safetensors file: its first 8 bytes say that the header should have {length} bytes, "
            f"expected at most {MAX_HEADER_NBYTES}"
        )
    if length > len(data) - 8:
        raise PatchFormatError(
            f"not a safetensors file, or truncated: the header should have {length} bytes, found {len(data) - 8}"
        )
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        parsed = {name: msgspec.json.decode(entry, type=_RawEntry) for name, entry in raw.items()}
        # Two readers could take different ones of two entries of one name: there must not be two.
        json.loads(str(data[8 : 8 + length], "utf-8"), object_pairs_hook=_each_once)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PatchFormatError(f"broken safetensors header: {error}") from None
    entries = {name: Entry(entry.dtype, tuple(entry.shape), *entry.data_offsets) for name, entry in parsed.items()}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        itemsize = ITEMSIZES.get(entry.dtype)
        if itemsize is None:
            raise PatchFormatError(f"tensor {name!r}: dtype {entry.dtype} is not supported")
        # Both caps come before the product: it grows with the square of the number of dimensions.
        if len(entry.shape) > MAX_DIMENSIONS:
            raise PatchFormatError(
                f"tensor {name!r}: expected at most {MAX_DIMENSIONS} dimensions, found {len(entry.shape)}"
            )
        if any(not 0 <= size <= MAX_DIMENSION for size in entry.shape):
            raise PatchFormatError(f"tensor {name!r}: expected dimensions from 0 to 2^63 − 1, found others")
        nbytes = math.prod(entry.shape) * itemsize
        if entry.start != at or entry.stop - entry.start != nbytes:
            raise PatchFormatError(
                f"tensor {name!r}: expected bytes {at} to {at + nbytes}, found {entry.start} to {entry.stop}"
            )
        at = entry.stop
    if at != len(data) - 8 - length:
        raise PatchFormatError(
            f"truncated or padded: the header names {at} bytes of data, found {len(data) - 8 - length}"
        )
    return Header(metadata, entries, 8 + length)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise PatchFormatError(f"broken safetensors header: {len(pairs) - len(found)} names stand in it twice")
    return found


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """The length and the JSON header for tensors (name, dtype, shape) that follow each other in this order.

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
