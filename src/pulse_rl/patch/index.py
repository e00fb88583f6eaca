"""The index of a patch: how its segments are divided into spans and these into blocks, and the changes of each segment.

Compressed 32-bit numbers: of each block how many spans it has and how many bytes they share, of each span how many
segments and bytes it has, of each segment how many changes; then the hash of each span. The numbers lie byte plane by
byte plane: in models with thousands of tensors most are below 256, so zstd makes a fifth fewer bytes in a tenth of the
time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.codecs.zstd import decompress
from pulse_rl.errors import PatchFormatError
from pulse_rl.patch.segments import Entry, Segments

LEVEL = 15  # of zstd: 19 takes three to ten times as long for 1 % less
MAX_SPANS = 1 << 20  # what is kept of them takes 0.5 GB; a patch of 10^12 elements has 30,000
HASH_NBYTES = 16  # of a block: the first half of its BLAKE3, for which finding another block takes 2^128 attempts


def span_hash(payload: bytes | memoryview) -> bytes:
    return blake3(payload).digest(HASH_NBYTES)


class CodedBlock(NamedTuple):
    """A block to be written: what its spans share, and of each span the number of its segments and its bytes."""

    shared: bytes
    spans: list[tuple[int, bytes]]


def encode_index(counts: NDArray[np.int64], blocks: Sequence[CodedBlock]) -> bytes:
    """The index stream. counts: changes of each segment, in order."""
    spans = [span for block in blocks for span in block.spans]
    numbers = [number for block in blocks for number in (len(block.spans), len(block.shared))]
    numbers += [number for size, payload in spans for number in (size, len(payload))]
    hashes = b"".join(span_hash(payload) for _, payload in spans)
    words = np.concatenate([np.array(numbers, "<u4"), counts.astype("<u4")])
    planes = words.view(np.uint8).reshape(-1, 4).T.tobytes()
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes + hashes)


class Index(NamedTuple):
    blocks: list[tuple[int, int]]  # spans of each, and bytes that they share
    spans: list[tuple[int, int]]  # segments and bytes of each
    hashes: list[bytes]  # of each span


def read_index(stream: memoryview, blocks: int, spans: int, table: Sequence[Entry], segments: Segments) -> Index:
    """The index, of the length that header and table imply. Sets the segments' changes: no more than elements.

    blocks, spans: how many the header names.
    """
    most = min(len(segments), MAX_SPANS)
    if not blocks <= spans <= most:
        raise PatchFormatError(f"index: expected at most {most} spans, found {spans} in {blocks} blocks")
    count = 2 * blocks + 2 * spans + len(segments)
    nbytes = 4 * count + HASH_NBYTES * spans
    words = decompress(stream, nbytes, "index")
    if len(words) != nbytes:
        raise PatchFormatError(f"index: expected {nbytes} bytes, found {len(words)}")
    planes = np.frombuffer(words, np.uint8, 4 * count).reshape(4, count)
    numbers = planes.T.copy().view("<u4").reshape(-1)
    counts = numbers[2 * blocks + 2 * spans :]
    sizes = segments.sizes()
    over = np.flatnonzero(counts > sizes)
    if len(over):
        name = table[segments.place(int(over[0]))[0]].name
        raise PatchFormatError(f"tensor {name!r}: {counts[over[0]]} changes in a segment of {sizes[over[0]]} elements")
    segments.counts = counts
    pairs = [(int(a), int(b)) for a, b in numbers[: 2 * blocks + 2 * spans].reshape(-1, 2).tolist()]
    hashes = [bytes(words[at : at + HASH_NBYTES]) for at in range(4 * count, nbytes, HASH_NBYTES)]
    return Index(pairs[:blocks], pairs[blocks:], hashes)
