"""The paper's codec: gaps between changes, absolute new values, zstd level 1.

A span is `u32 n | zstd frame of n bytes: gap words | zstd frame: values`, and spans share nothing. The two streams are
compressed separately, because interleaving them costs 0.4 bits per change. Source: arXiv 2602.03839, with flat 16-bit
gaps instead of row and column gaps (they are as small on real patches, and need no loop over rows).
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import zstandard

from pulse_rl.codecs.base import Run, SegmentSpec, Units, consecutive, cut_runs, every_index, split_values
from pulse_rl.codecs.zstd import decompress
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

    def is_dense(self, spec: SegmentSpec) -> bool:
        return spec.changed * (GAP_NBYTES + spec.itemsize) >= spec.size * spec.itemsize

    def encode(self, runs: Sequence[Run], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        return b"", [self._encode(members) for members in cut_runs(runs, spans)]

    def _encode(self, runs: Sequence[Run]) -> bytes:
        words = np.empty(3 * sum(len(run.replaced) for run in runs), np.uint16)
        used, values = 0, list[bytes]()
        for run in runs:
            at = 0
            dense = np.flatnonzero(run.counts * (GAP_NBYTES + run.itemsize) >= run.sizes * run.itemsize)  # `is_dense`
            for number in [*dense.tolist(), len(run.sizes)]:
                sparse = run.at(at, number)
                used += cpu.gap_encode(sparse.changes.indices, sparse.edges, words[used:])
                values.append(sparse.changes.values.tobytes())
                if number < len(run.sizes):
                    values.append(run.every(number).tobytes())
                at = number + 1
        compress = zstandard.ZstdCompressor(level=LEVEL).compress
        gaps = compress(words[:used].tobytes())
        return struct.pack("<I", len(gaps)) + gaps + compress(b"".join(values))

    def open(
        self, shared: memoryview, specs: Sequence[SegmentSpec], spans: Sequence[int]
    ) -> list[Callable[[memoryview], Units]]:
        if len(shared):
            raise FormatError(f"gap block: expected that its spans share nothing, found {len(shared)} bytes")
        return [partial(self._units, members) for members in consecutive(specs, spans)]

    def _units(self, specs: Sequence[SegmentSpec], payload: memoryview) -> Units:
        return Units([len(specs)], lambda numbers, reads, memory: self._decode(payload, specs))

    def _decode(self, payload: memoryview, specs: Sequence[SegmentSpec]) -> list[Changes]:
        if len(payload) < 4:
            raise FormatError(f"gap block: expected at least 4 bytes, found {len(payload)}")
        (split,) = struct.unpack_from("<I", payload)
        dense = [self.is_dense(spec) for spec in specs]
        sparse = [spec for spec, whole in zip(specs, dense, strict=True) if not whole]
        sizes, changed = np.array([(s.size, s.changed) for s in sparse], np.int64).reshape(-1, 2).T.copy()
        indices = np.empty(int(changed.sum()), np.uint32)
        coded = decompress(payload[4 : 4 + split], 3 * GAP_NBYTES * len(indices), "gaps")
        if len(coded) % GAP_NBYTES:
            raise FormatError(f"gaps: expected whole words of {GAP_NBYTES} bytes, found {len(coded)} bytes")
        words = np.frombuffer(coded, np.uint16)
        counts = [spec.size if whole else spec.changed for spec, whole in zip(specs, dense, strict=True)]
        limit = sum(spec.itemsize * count for spec, count in zip(specs, counts, strict=True))
        values = split_values(memoryview(decompress(payload[4 + split :], limit, "values")), counts, specs)
        used = cpu.gap_decode(words, sizes, changed, indices)
        if used < 0:
            spec = sparse[-1 - used]
            raise FormatError(
                f"gaps: expected {spec.changed} changes below {spec.size}, found fewer, or one out of range"
            )
        if used != len(words):
            raise FormatError(f"gaps: expected {used} words, found {len(words)}")
        changes, at = [], 0
        for count, whole, new in zip(counts, dense, values, strict=True):
            if whole:
                changes.append(Changes(every_index(count), new))
            else:
                changes.append(Changes(indices[at : at + count], new))
                at += count
        return changes
