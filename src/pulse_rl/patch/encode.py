"""From two states of weights to a patch: find the changes, code them, keep the digest.

Works segment by segment on threads. Held at once are one segment's changes a thread, one open block and the coded
blocks: never a second model. Changes are found once, whatever the number of codecs that code them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from pulse_rl.codecs.base import Codec, Part, every_index, segment_spec
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map
from pulse_rl.patch import format as patch_format
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import Changes, find_changes
from pulse_rl.weights.segments import SEGMENT, segments

BLOCK_SEGMENTS = 1024  # after which a block is closed: what a codec learns of each takes memory


@dataclass(frozen=True)
class EncodedPatch:
    """A patch and the time that it took to make."""

    data: bytes
    header: patch_format.PatchHeader
    read_s: float  # reading and casting the new weights, seconds summed over threads
    diff_s: float  # finding and digesting changes, seconds summed over threads
    encode_s: float  # coding and compressing, wall time in seconds


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
    """Make the patch from old to new, once with each codec.

    old, new: the same tensors in canonical order. base_digest: the digest of old if it is known; otherwise it is
    computed in the same pass. tied: further names → the name in new that stands for them. Reads the new weights once.
    """
    codings = [_Coding(codec) for codec in codecs]
    counts: list[int] = []  # changes of each segment
    delta, read_s, diff_s = 0, 0.0, 0.0
    digest = digests.state_digest(_empty(old)) if base_digest is None else base_digest
    find = partial(_find, codecs=codecs, digest_old=base_digest is None)
    for found in ordered_map(find, _tasks(old, new)):
        counts.append(found.parts[0].spec.changed)
        digest += found.base
        delta += found.delta
        read_s += found.read_s
        diff_s += found.diff_s
        for coding, part in zip(codings, found.parts, strict=True):
            coding.add(part)
    table = patch_format.encode_table(new, tied or {})
    patches = []
    for coding in codings:
        coding.close()
        header = patch_format.PatchHeader(
            format=patch_format.FORMAT,
            format_version=patch_format.FORMAT_VERSION,
            codec=coding.codec.name,
            base=base,
            target=target,
            base_digest=digests.to_hex(digest),
            target_digest=digests.to_hex(digest + delta),
            elements=sum(bits.size for bits in new.values()),
            changes=sum(counts),
            full_nbytes=sum(bits.size * bits.itemsize for bits in new.values()),
            segment=SEGMENT,
            blocks=len(coding.blocks),
        )
        data = patch_format.pack(header, table, counts, coding.blocks)
        patches.append(EncodedPatch(data, header, read_s, diff_s, coding.encode_s))
    return patches


class _Task(NamedTuple):
    """One segment of a tensor in both states."""

    seed: int  # of the tensor's digest
    old: Bits
    new: Bits
    start: int
    stop: int


class _Found(NamedTuple):
    parts: tuple[Part, ...]  # for each codec: they differ only where a codec codes the segment dense
    base: int  # this segment's share of the old digest; 0 where that is known already
    delta: int  # new digest minus old digest
    read_s: float
    diff_s: float


def _empty(tensors: Mapping[str, Bits]) -> dict[str, Bits]:
    """The tensors without elements: they have no segment and count in the digest all the same."""
    return {name: bits for name, bits in tensors.items() if bits.size == 0}


def _tasks(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> Iterator[_Task]:
    for name, bits in new.items():
        seed = digests.seed(name, bits.dtype, bits.shape)
        for start, stop in segments(bits.size):
            yield _Task(seed, old[name], bits, start, stop)


def _find(task: _Task, *, codecs: Sequence[Codec], digest_old: bool) -> _Found:
    """Find one segment's changes and what they do to the digest."""
    seed, old, new, start, stop = task
    clock = time.perf_counter()
    after = new.read(start, stop)
    read_s = time.perf_counter() - clock
    before = old.read(start, stop)
    changes = find_changes(before, after)
    replaced = np.empty_like(changes.values)
    cpu.gather(before, changes.indices, replaced)
    delta = cpu.digest_delta(seed, start, changes.indices, replaced, changes.values)
    base = cpu.digest_range(seed, start, before) if digest_old else 0
    spec = segment_spec(new.dtype, new.shape, start, stop, len(changes.indices))
    sparse = Part(spec, changes, partial(old.read, start, stop))
    parts = tuple(
        sparse._replace(changes=Changes(every_index(spec.size), after.copy())) if codec.is_dense(spec) else sparse
        for codec in codecs
    )
    return _Found(parts, base, delta, read_s, time.perf_counter() - clock - read_s)


class _Coding:
    """The blocks of one codec: segments are added to the open block, which is coded when it is full."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.blocks: list[tuple[int, bytes]] = []  # segments, coded bytes
        self.encode_s = 0.0
        self._parts: list[Part] = []  # of the open block
        self._nbytes = 0  # of the decoded changes in it

    def add(self, part: Part) -> None:
        self._parts.append(part)
        self._nbytes += part.spec.decoded_nbytes
        if self._nbytes >= self.codec.block_nbytes or len(self._parts) == BLOCK_SEGMENTS:
            self.close()

    def close(self) -> None:
        if self._parts:
            clock = time.perf_counter()
            self.blocks.append((len(self._parts), self.codec.encode(self._parts)))
            self.encode_s += time.perf_counter() - clock
            self._parts, self._nbytes = [], 0
