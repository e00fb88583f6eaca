"""The paper's codec: gaps between changes, absolute new values, zstd level 1.

A span is a list of frames, each `u32 n | zstd frame of n bytes`: the low bytes of the gap words, their high bytes, then
the first bytes of all values, the second bytes, and so on. Bytes of one significance are alike: apart they take a tenth
less than together, and a third of the time. Spans share nothing. Source: arXiv 2602.03839, with flat 16-bit gaps in
place of row and column gaps (they are as small on real patches, and need no loop over rows).
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulse_rl.codecs.base import Decoded, Run, Specs, Units, cut
from pulse_rl.codecs.zstd import decompress
from pulse_rl.dtypes import UINTS, UIntArray
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
        used, values = 0, list[UIntArray]()
        for run in runs:
            at = 0
            for number in [*np.flatnonzero(self.is_dense(run.specs)).tolist(), run.segments]:
                sparse = run.at(at, number)
                used += cpu.gap_encode(sparse.changes.indices, sparse.edges, words[used:])
                values.append(sparse.changes.values)
                if number < run.segments:
                    values.append(run.every(number))
                at = number + 1
        compress = zstandard.ZstdCompressor(level=LEVEL).compress
        frames = [compress(plane) for plane in (*_planes([words[:used]]), *_planes(values))]
        return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)

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
        dense = list(map(self.is_dense, specs))
        counts = [np.where(whole, each.sizes, each.changed) for each, whole in zip(specs, dense, strict=True)]
        sizes, changed, whole = (np.concatenate(each) for each in ([s.sizes for s in specs], counts, dense))
        frames = _frames(payload, GAP_NBYTES + max(each.itemsize for each in specs))
        most = 3 * int(changed[~whole].sum())  # words
        planes = [decompress(frame, most, "gaps") for frame in frames[:GAP_NBYTES]]
        if len({*map(len, planes)}) > 1:
            raise FormatError(f"gaps: expected {len(planes[0])} high bytes, as low ones, found {len(planes[1])}")
        (words,) = _values(planes, [(GAP_NBYTES, len(planes[0]))])
        planes = []
        widths = [(each.itemsize, int(count.sum())) for each, count in zip(specs, counts, strict=True)]
        for place, frame in enumerate(frames[GAP_NBYTES:]):
            size = sum(count for width, count in widths if width > place)
            planes.append(decompress(frame, size, "values"))
            if len(planes[-1]) != size:
                raise FormatError(f"values: expected {size} bytes, found {len(planes[-1])}")
        indices = np.empty(int(changed.sum()), np.uint32)
        used = cpu.gap_decode(words, sizes, changed, whole, indices)
        if used < 0:
            count, size = changed[-1 - used], sizes[-1 - used]
            raise FormatError(f"gaps: expected {count} changes below {size}, found fewer, or one out of range")
        if used != len(words):
            raise FormatError(f"gaps: expected {used} words, found {len(words)}")
        found, at = list[Decoded](), 0
        for count, new in zip(counts, _values(planes, widths), strict=True):
            found.append(Decoded(count, Changes(indices[at : at + len(new)], new)))
            at += len(new)
        return found


def index_nbytes(span: memoryview) -> int:
    """How many bytes of a span say where the changes are."""
    return sum(len(frame) + 4 for frame in _frames(span)[:GAP_NBYTES])


def _frames(span: memoryview, count: int | None = None) -> list[memoryview]:
    """The frames of a span. count: how many there should be."""
    found = list[memoryview]()
    while len(span) and (count is None or len(found) < count):
        nbytes = int.from_bytes(span[:4], "little")
        if len(span) < 4 + nbytes:
            raise FormatError(f"gap block: expected a frame of {nbytes} bytes, found {max(0, len(span) - 4)}")
        found.append(span[4 : 4 + nbytes])
        span = span[4 + nbytes :]
    if count is not None and (len(found) < count or len(span)):
        raise FormatError(f"gap block: expected {count} frames, found {len(found)} and {len(span)} bytes")
    return found


def _planes(several: Sequence[UIntArray]) -> Iterator[bytes]:
    """The first bytes of all values, their second bytes, and so on: of as many bytes as the widest have."""
    apart = [values.view(np.uint8).reshape(len(values), -1) for values in several if len(values)]
    for place in range(max((values.itemsize for values in several), default=0)):
        yield b"".join(values[:, place].tobytes() for values in apart if place < values.shape[1])


def _values(planes: Sequence[bytes], widths: Sequence[tuple[int, int]]) -> Iterator[UIntArray]:
    """The inverse. widths: of the values one after another, and how many are of each."""
    at = [0] * len(planes)
    for width, count in widths:
        values = np.empty((count, width), np.uint8)
        for place in range(width):
            values[:, place] = np.frombuffer(planes[place], np.uint8, count, at[place])
            at[place] += count
        yield values.view(UINTS[width]).reshape(count)
