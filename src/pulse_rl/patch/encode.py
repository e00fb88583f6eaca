"""From two states of weights to a patch: find the changes, code them, keep the digest.

Held at once are a group's changes up to a fixed budget (`scan`), one open block and the coded blocks: never a second
model. Changes are found once, whatever the number of codecs that code them.

A process that holds shares of the weights makes a part: it covers the pieces that the process owns. `find` codes it;
once the parts' deltas are added up, the digests are known, and `finish` puts the file together.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulse_rl.codecs.base import Codec, SegmentChanges, SegmentSpec, every_index
from pulse_rl.kernels.cpu.coding import Lies
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.index import CodedBlock
from pulse_rl.patch.overlay import Recorder, Section
from pulse_rl.patch.scan import Scan, rows_of
from pulse_rl.patch.segments import Segments, groups_of, spec_of
from pulse_rl.patch.table import encode_table, entries_of
from pulse_rl.patch.targets import device_for, lies_of
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.finite import not_finite

BLOCK_SEGMENTS = 1024  # after which a block is closed: what a codec learns of each takes memory
# A span is closed where another tile begins, so that a receiver of a share reads few bytes that it does not need: at
# least this many bytes of decoded changes after the span began, by `Group.boundary`; between groups and quadrants
# also if so many come after it. A span costs 20 to 60 bytes.
CLOSE_NBYTES = {1: 64 << 10, 2: 4 << 10}


@dataclass(frozen=True)
class EncodedPatch:
    """A patch and the time that it took to make."""

    data: bytes
    header: patch_format.PatchHeader
    head_nbytes: int  # of the file's head
    read_s: float  # reading and casting the new weights, seconds summed over threads
    diff_s: float  # finding and digesting changes, seconds summed over threads
    encode_s: float  # coding and compressing, wall time in seconds


@dataclass(frozen=True)
class Coded:
    """The changes of what this process owns, coded; not a file yet, as that names the digests of the whole weights."""

    codec: str
    table: bytes
    counts: NDArray[np.int64]  # changes of each segment
    blocks: list[CodedBlock]
    elements: int  # that it covers
    full_nbytes: int
    base: int  # the digest of these elements before, mod 2^64; 0 where it was not asked for
    delta: int  # what it gains, mod 2^64
    nonfinite: int  # how many elements become NaN or infinite, less those that were
    spoilt: str  # a tensor in which some become so; empty for none
    read_s: float
    diff_s: float
    encode_s: float

    @property
    def changes(self) -> int:
        """How many elements change."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(len(payload) for block in self.blocks for _, payload in block.spans)

    def finish(
        self, *, base: int, target: int, base_digest: int, target_digest: int, part: int = 0, parts: int = 1
    ) -> EncodedPatch:
        """Put the file together. Digests are those of the whole weights."""
        header = patch_format.PatchHeader(
            format=patch_format.FORMAT,
            format_version=patch_format.FORMAT_VERSION,
            codec=self.codec,
            base=base,
            target=target,
            base_digest=digests.to_hex(base_digest),
            target_digest=digests.to_hex(target_digest),
            elements=self.elements,
            changes=self.changes,
            full_nbytes=self.full_nbytes,
            blocks=len(self.blocks),
            spans=sum(len(block.spans) for block in self.blocks),
            part=part,
            parts=parts,
        )
        data, head_nbytes = patch_format.pack(header, self.table, self.counts, self.blocks)
        return EncodedPatch(data, header, head_nbytes, self.read_s, self.diff_s, self.encode_s)


def encode(
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    *,
    base: int,
    target: int,
    codecs: Sequence[Codec],
    base_digest: int | None = None,
    tied: Mapping[str, str] | None = None,
) -> list[EncodedPatch]:
    """Make the patch from old to new, of whole weights, once with each codec.

    old, new: the same tensors in canonical order. base_digest: the digest of old if it is known; otherwise it is
    computed in the same pass. tied: further names → the name in new that stands for them. Reads the new weights once.
    """
    patches = []
    for coded in find(old, new, codecs=codecs, digest_old=base_digest is None, tied=tied):
        before = coded.base if base_digest is None else base_digest
        patches.append(coded.finish(base=base, target=target, base_digest=before, target_digest=before + coded.delta))
    return patches


def find(
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    *,
    codecs: Sequence[Codec],
    digest_old: bool = False,
    tied: Mapping[str, str] | None = None,
    recorder: Recorder | None = None,
) -> list[Coded]:
    """Find and code the changes of the pieces that this process owns, once with each codec.

    old, new: the same tensors in canonical order, old in the same pieces as new or larger ones. digest_old: whether to
    add up the digest of old too. tied: further names → the name that stands for them. recorder: gets the old bits of
    all that changes. Reads the new weights once.
    """
    codings = [_Coding(codec) for codec in codecs]
    table = entries_of(new)
    scan = Scan(old, new, digest_old)
    counts: list[NDArray[np.int64]] = []
    groups = groups_of(table)
    nonfinite, spoilt = 0, ""
    lying: Iterator[Lies | None] = repeat(None)
    device: Device = HOST
    if any(codec.conditional for codec in codecs):
        device = device_for(old.values())
        lying = lies_of(Segments(table, groups), {name: [bits] for name, bits in old.items()}, device)
    for group in groups:
        entries = [table[number] for number in group.tensors]
        sections = [Section(tuple([entry.name for entry in entries]), group.places)]
        tensors = [(entry, old[entry.name], new[entry.name]) for entry in entries]
        parts = ((tile, *tensor) for tile in range(len(group.places)) for tensor in tensors)
        last, done = -1, 0  # the tile that came last; the segments
        for edges, (indices, values), replaced in scan.find(group, entries):
            changed = np.diff(edges)
            counts.append(changed)
            marked = not_finite(values, entries[0].dtype)
            nonfinite -= int(np.count_nonzero(not_finite(replaced, entries[0].dtype)))
            if marked.any():
                nonfinite += int(np.count_nonzero(marked))
                at = done + int(np.searchsorted(edges, np.argmax(marked), "right")) - 1
                spoilt = spoilt or entries[at % len(entries)].name
            done += len(changed)
            if recorder is not None:
                recorder.add(sections, changed, Changes(indices, replaced))
                sections = []
            cuts = edges.tolist()
            for a, b, (tile, entry, before, after), lies in zip(cuts, cuts[1:], parts, lying, strict=False):
                boundary = 0
                if tile != last:
                    last, boundary, place = tile, group.boundary(tile), group.places[tile]
                    dtype, size, _, stride, phase = spec_of(entry, place, 0)  # of all tensors of the group
                spec = SegmentSpec(dtype, size, b - a, stride, phase)
                changes, read = Changes(indices[a:b], values[a:b]), partial(rows_of, before, place)
                segment = SegmentChanges(spec, changes, read, replaced[a:b], lies, device)
                for coding in codings:
                    dense = coding.codec.is_dense(spec)
                    coding.add(_dense(segment, after, place) if dense else segment, boundary)
    stream = encode_table(table, tied or {})
    sizes = [(sum(box.size for box in entry.boxes), new[entry.name].itemsize) for entry in table]
    elements, nbytes = sum(n for n, _ in sizes), sum(n * itemsize for n, itemsize in sizes)
    base = scan.base + (digests.empty_digest(old) if digest_old else 0)
    coded, all_counts = [], np.concatenate(counts or [np.empty(0, np.int64)])
    for coding in codings:
        coding.close()
        coded.append(
            Coded(
                coding.codec.name,
                stream,
                all_counts,
                coding.blocks,
                elements,
                nbytes,
                base & digests.MASK,
                scan.delta & digests.MASK,
                nonfinite,
                spoilt,
                scan.read_s,
                scan.diff_s,
                coding.encode_s,
            )
        )
    return coded


def _dense(segment: SegmentChanges, new: Bits, place: Box) -> SegmentChanges:
    """The same segment with all its elements."""
    changes = Changes(every_index(segment.spec.size), rows_of(new, place).flatten())
    return segment._replace(changes=changes)


class _End(NamedTuple):
    """How much of a span comes before a place where it may be closed."""

    segments: int
    nbytes: int  # of decoded changes


class _Coding:
    """The blocks of one codec: segments are added to the open block, which is coded when it is full."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.blocks: list[CodedBlock] = []
        self.encode_s = 0.0
        self._open: list[SegmentChanges] = []  # of the open block
        self._nbytes = 0  # of the decoded changes in it
        self._spans: list[int] = [0]  # segments of each span of it
        self._span_nbytes = 0  # of the decoded changes in the last one
        self._end: _End | None = None  # where the last span may still be closed

    def add(self, changes: SegmentChanges, boundary: int) -> None:
        """Add a segment. boundary: how much of an end comes before it."""
        if boundary and self._span_nbytes >= CLOSE_NBYTES[boundary]:
            self._close_span(_End(self._spans[-1], self._span_nbytes))
        elif boundary == 2 and self._span_nbytes:
            self._end = _End(self._spans[-1], self._span_nbytes)
        self._open.append(changes)
        self._spans[-1] += 1
        self._nbytes += changes.spec.decoded_nbytes
        self._span_nbytes += changes.spec.decoded_nbytes
        # Norms, which all receivers need, would otherwise make them read the first tiles of the matrices after them.
        if self._end is not None and self._span_nbytes - self._end.nbytes >= CLOSE_NBYTES[2]:
            self._close_span(self._end)
        if self._nbytes >= self.codec.block_nbytes or len(self._open) == BLOCK_SEGMENTS:
            self.close()

    def _close_span(self, end: "_End") -> None:
        self._spans[-1:] = [end.segments, self._spans[-1] - end.segments]
        self._span_nbytes -= end.nbytes
        self._end = None

    def close(self) -> None:
        if self._open:
            clock = time.perf_counter()
            shared, spans = self.codec.encode(self._open, self._spans)
            self.blocks.append(CodedBlock(shared, list(zip(self._spans, spans, strict=True))))
            self.encode_s += time.perf_counter() - clock
            self._open, self._nbytes = [], 0
            self._spans, self._span_nbytes, self._end = [0], 0, None
