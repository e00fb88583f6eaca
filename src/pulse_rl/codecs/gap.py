"""The paper's codec: gaps between changes, absolute new values, zstd level 1.

A span is `u32 n | zstd frame of n bytes: gap words | zstd frame: values`, and spans share nothing. The two streams are
compressed separately, because interleaving them costs 0.4 bits per change. Source: arXiv 2602.03839, with flat 16-bit
gaps instead of row and column gaps (they are as small on real patches, and need no loop over rows).
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulse_rl.codecs.base import Decoded, Run, Specs, Units, cut
from pulse_rl.codecs.zstd import decompress
from pulse_rl.dtypes import UINTS
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.weights.changes import Changes

LEVEL = 1
GAP_NBYTES = 2


class GapCodec:
    """Flat u16 gaps with an escape, absolute values, zstd-1."""

    name = "gap"
    conditional = False
    block_nbytes = 1 << 20

    def is_dense(self, specs: Specs) -> NDArray[np.bool_]:
        return specs.changed * (GAP_NBYTES + specs.itemsize) >= specs.sizes * specs.itemsize

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        return b"", [self._encode(members) for members in cut(runs, spans)]

    def _encode(self, runs: Sequence[Run]) -> bytes:
        words = np.empty(3 * sum(len(run.replaced) for run in runs), np.uint16)
        used, values = 0, list[bytes]()
        for run in runs:
            at = 0
            for number in [*np.flatnonzero(self.is_dense(run.specs)).tolist(), run.segments]:
                sparse = run.at(at, number)
                used += cpu.gap_encode(sparse.changes.indices, sparse.edges, words[used:])
                values.append(sparse.changes.values.tobytes())
                if number < run.segments:
                    values.append(run.every(number).tobytes())
                at = number + 1
        compress = zstandard.ZstdCompressor(level=LEVEL).compress
        gaps = compress(words[:used].tobytes())
        return struct.pack("<I", len(gaps)) + gaps + compress(b"".join(values))

    def open(
        self, shared: memoryview, specs: Sequence[Specs], spans: Sequence[int]
    ) -> list[Callable[[memoryview], Units]]:
        if len(shared):
            raise FormatError(f"gap block: expected that its spans share nothing, found {len(shared)} bytes")
        return [partial(self._units, members) for members in cut(specs, spans)]

    def _units(self, specs: Sequence[Specs], payload: memoryview) -> Units:
        size = sum(each.segments for each in specs)
        return Units(np.array([size]), lambda numbers, read, old: self._decode(payload, specs))

    def _decode(self, payload: memoryview, specs: Sequence[Specs]) -> list[Decoded]:
        if len(payload) < 4:
            raise FormatError(f"gap block: expected at least 4 bytes, found {len(payload)}")
        (split,) = struct.unpack_from("<I", payload)
        dense = list(map(self.is_dense, specs))
        counts = [np.where(whole, each.sizes, each.changed) for each, whole in zip(specs, dense, strict=True)]
        sizes, changed, whole = (np.concatenate(each) for each in ([s.sizes for s in specs], counts, dense))
        indices = np.empty(int(changed.sum()), np.uint32)
        words = decompress(payload[4 : 4 + split], 3 * GAP_NBYTES * int(changed[~whole].sum()), "gaps")
        if len(words) % GAP_NBYTES:
            raise FormatError(f"gaps: expected whole words of {GAP_NBYTES} bytes, found {len(words)} bytes")
        limit = sum(each.itemsize * int(count.sum()) for each, count in zip(specs, counts, strict=True))
        values = decompress(payload[4 + split :], limit, "values")
        if len(values) != limit:
            raise FormatError(f"values: expected {limit} bytes, found {len(values)}")
        used = cpu.gap_decode(np.frombuffer(words, np.uint16), sizes, changed, whole, indices)
        if used < 0:
            count, size = changed[-1 - used], sizes[-1 - used]
            raise FormatError(f"gaps: expected {count} changes below {size}, found fewer, or one out of range")
        if GAP_NBYTES * used != len(words):
            raise FormatError(f"gaps: expected {used} words, found {len(words) // GAP_NBYTES}")
        return list(_cut(specs, counts, indices, values))


def _cut(
    specs: Sequence[Specs], counts: Sequence[NDArray[np.int64]], indices: NDArray[np.uint32], values: bytes
) -> Iterator[Decoded]:
    """Divide indices, and the bytes of values, among segments."""
    at = nbytes = 0
    for each, count in zip(specs, counts, strict=True):
        size = int(count.sum())
        new = np.frombuffer(values, UINTS[each.itemsize], size, nbytes)
        if not new.flags.aligned:
            new = new.copy()
        yield Decoded(count, Changes(indices[at : at + size], new))
        at, nbytes = at + size, nbytes + new.nbytes
