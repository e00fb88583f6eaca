"""The plain codec: u32 indices and values as they are, no compression. It is read, and not offered to write with.

A block is all sparse segments' indices (relative to their segment), then all values.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pulse_rl.codecs.base import SegmentChanges, SegmentSpec, Units, consecutive, every_index, split_values
from pulse_rl.errors import FormatError
from pulse_rl.weights.changes import Changes

INDEX_NBYTES = 4


class RawCodec:
    """Indices and values as they are."""

    name = "raw"
    conditional = False
    block_nbytes = 1 << 20

    def is_dense(self, spec: SegmentSpec) -> bool:
        return spec.changed * (INDEX_NBYTES + spec.itemsize) >= spec.size * spec.itemsize

    def encode(self, segments: Sequence[SegmentChanges], spans: Sequence[int]) -> tuple[bytes, list[bytes]]:
        return b"", [self._encode(members) for members in consecutive(segments, spans)]

    def _encode(self, parts: Sequence[SegmentChanges]) -> bytes:
        indices = [part.changes.indices.tobytes() for part in parts if not self.is_dense(part.spec)]
        return b"".join(indices + [part.changes.values.tobytes() for part in parts])

    def open(
        self, shared: memoryview, specs: Sequence[SegmentSpec], spans: Sequence[int]
    ) -> list[Callable[[memoryview], Units]]:
        if len(shared):
            raise FormatError(f"raw block: expected that its spans share nothing, found {len(shared)} bytes")
        return [partial(self._units, members) for members in consecutive(specs, spans)]

    def _units(self, specs: Sequence[SegmentSpec], payload: memoryview) -> Units:
        return Units([len(specs)], lambda numbers, reads, memory: self._decode(payload, specs))

    def split(self, block: memoryview) -> tuple[memoryview, memoryview]:
        return block[:0], block

    def _decode(self, payload: memoryview, specs: Sequence[SegmentSpec]) -> list[Changes]:
        split = INDEX_NBYTES * sum(spec.changed for spec in specs if not self.is_dense(spec))
        if len(payload) < split:
            raise FormatError(f"raw indices: expected {split} bytes, found {len(payload)}")
        indices = np.frombuffer(payload[:split], np.uint8).copy().view(np.uint32)
        counts = [spec.size if self.is_dense(spec) else spec.changed for spec in specs]
        values = split_values(payload[split:], counts, specs)
        changes, at = [], 0
        for spec, new in zip(specs, values, strict=True):
            if self.is_dense(spec):
                changes.append(Changes(every_index(spec.size), new))
                continue
            mine = indices[at : at + spec.changed]
            if spec.changed and (int(mine[-1]) >= spec.size or not np.all(mine[1:] > mine[:-1])):
                raise FormatError(f"raw indices: expected ascending indices below {spec.size}, found others")
            changes.append(Changes(mine, new))
            at += spec.changed
        return changes
