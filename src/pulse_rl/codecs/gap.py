"""The paper's codec: gaps between changes, absolute new values, zstd level 1.

A span is a list of frames, each `u32 n | zstd frame of n bytes`: the low bytes of the gap words, their high bytes, then
the first bytes of all values, the second bytes, and so on. Bytes of one significance are alike: apart they take a tenth
less than together, and a third of the time. Spans of a block have as many frames each, and share nothing. Source: arXiv
2602.03839, with flat 16-bit gaps in place of row and column gaps (they are as small on real patches, and need no loop
over rows).
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
        width = _widest([run.specs for run in runs])
        return b"", [self._encode(members, width) for members in cut(runs, spans)]

    def _encode(self, runs: Sequence[Run], width: int) -> bytes:
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
        frames = [compress(plane) for plane in (*_planes([words[:used]], GAP_NBYTES), *_planes(values, width))]
        return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)

    def open(
        self, shared: memoryview, specs: Sequence[Specs], spans: Sequence[int]
    ) -> list[Callable[[Sequence[memoryview]], Units]]:
        if len(shared):
            raise FormatError(f"gap block: expected that its spans share nothing, found {len(shared)} bytes")
        frames = GAP_NBYTES + _widest(specs)
        return [partial(self._units, members, frames) for members in cut(specs, spans)]

    def _units(self, specs: Sequence[Specs], frames: int, payloads: Sequence[memoryview]) -> Units:
        size = sum(each.segments for each in specs)
        return Units(np.array([size]), lambda numbers, read, old: self._decode(payloads, frames, specs))

    def _decode(self, payloads: Sequence[memoryview], frames: int, specs: Sequence[Specs]) -> list[Decoded]:
        dense = list(map(self.is_dense, specs))
        counts = [np.where(whole, each.sizes, each.changed) for each, whole in zip(specs, dense, strict=True)]
        sizes, changed, whole = (np.concatenate(each) for each in ([s.sizes for s in specs], counts, dense))
        found = list(map(_frames, payloads))
        for each in found:
            if len(each) != frames:
                raise FormatError(f"gap block: expected {frames} frames, found {len(each)}")
        streams = list(zip(*found, strict=True))
        most = 3 * int(changed[~whole].sum())  # words
        low, high = (_plane(streams[place], most, "gaps") for place in range(GAP_NBYTES))
        if len(low) != len(high):
            raise FormatError(f"gaps: expected {len(low)} high bytes, as low ones, found {len(high)}")
        planes = list[UIntArray]()
        widths = [(each.itemsize, int(count.sum())) for each, count in zip(specs, counts, strict=True)]
        for place in range(frames - GAP_NBYTES):
            size = sum(count for width, count in widths if width > place)
            planes.append(_plane(streams[GAP_NBYTES + place], size, "values"))
            if len(planes[-1]) != size:
                raise FormatError(f"values: expected {size} bytes, found {len(planes[-1])}")
        indices = np.empty(int(changed.sum()), np.uint32)
        used = cpu.gap_decode(low, high, sizes, changed, whole, indices)
        if used < 0:
            count, size = changed[-1 - used], sizes[-1 - used]
            raise FormatError(f"gaps: expected {count} changes below {size}, found fewer, or one out of range")
        if used != len(low):
            raise FormatError(f"gaps: expected {used} words, found {len(low)}")
        decoded, at = list[Decoded](), 0
        for count, new in zip(counts, _values(planes, widths), strict=True):
            decoded.append(Decoded(count, Changes(indices[at : at + len(new)], new)))
            at += len(new)
        return decoded


def index_nbytes(span: memoryview) -> int:
    """How many bytes of a span say where the changes are."""
    return sum(len(frame) + 4 for frame in _frames(span)[:GAP_NBYTES])


def _widest(specs: Sequence[Specs]) -> int:
    return max((each.itemsize for each in specs), default=0)


def _frames(span: memoryview) -> list[memoryview]:
    found = list[memoryview]()
    while len(span):
        nbytes = int.from_bytes(span[:4], "little")
        if len(span) < 4 + nbytes:
            raise FormatError(f"gap block: expected a frame of {nbytes} bytes, found {max(0, len(span) - 4)}")
        found.append(span[4 : 4 + nbytes])
        span = span[4 + nbytes :]
    return found


def _plane(frames: Sequence[memoryview], most: int, what: str) -> UIntArray:
    """The bytes of one significance, of all spans."""
    found = list[bytes]()
    for frame in frames:
        found.append(decompress(frame, most, what))
        most -= len(found[-1])
    return np.frombuffer(b"".join(found), np.uint8)


def _planes(several: Sequence[UIntArray], width: int) -> Iterator[bytes]:
    """The first bytes of all values, their second bytes, and so on: of as many bytes as the widest have."""
    apart = [values.view(np.uint8).reshape(len(values), -1) for values in several if len(values)]
    for place in range(width):
        yield b"".join(values[:, place].tobytes() for values in apart if place < values.shape[1])


def _values(planes: Sequence[UIntArray], widths: Sequence[tuple[int, int]]) -> Iterator[UIntArray]:
    """The inverse. widths: of the values one after another, and how many are of each."""
    at = [0] * len(planes)
    for width, count in widths:
        values = np.empty((count, width), np.uint8)
        for place in range(width):
            values[:, place] = planes[place][at[place] : at[place] + count]
            at[place] += count
        yield values.view(UINTS[width]).reshape(count)
