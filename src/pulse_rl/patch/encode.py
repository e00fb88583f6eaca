"""From two states of weights to a patch: find the changes, code them, keep the digest.

Works segment by segment on threads. What is held is one segment's changes a thread, one open block, and the
coded blocks: never a second model. Changes are found once, whatever the number of codecs that code them.
"""

import time
from collections.abc import Mapping, Sequence
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
    """A patch and what it took to make it."""

    data: bytes
    header: patch_format.PatchHeader
    read_s: float  # reading and casting the new weights, seconds of work summed over threads
    diff_s: float  # finding changes and digesting, likewise
    encode_s: float  # coding and compressing, wall time


class _Found(NamedTuple):
    parts: tuple[Part, ...]  # for each codec: the same but for segments that it takes dense
    base: int  # this segment's share of the base digest (0 where the base digest is given)
    delta: int  # target digest minus base digest
    read_s: float
    diff_s: float


class _Coding:
    """The blocks of one codec, as they are closed."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.blocks: list[tuple[int, bytes]] = []  # segments, coded bytes
        self.encode_s = 0.0
        self._parts: list[Part] = []
        self._held = 0  # bytes of the decoded changes in the open block

    def add(self, part: Part) -> None:
        self._parts.append(part)
        self._held += part.spec.decoded_nbytes
        if self._held >= self.codec.block_nbytes or len(self._parts) == BLOCK_SEGMENTS:
            self.close()

    def close(self) -> None:
        if self._parts:
            clock = time.perf_counter()
            self.blocks.append((len(self._parts), self.codec.encode(self._parts)))
            self.encode_s += time.perf_counter() - clock
            self._parts, self._held = [], 0


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

    old, new: the same tensors in canonical order. base_digest: the digest of old if it is known; otherwise
    it is computed on the way. Reads the new weights once.
    """
    total = 0 if base_digest is None else base_digest
    if base_digest is None:
        total = digests.state_digest({name: bits for name, bits in old.items() if bits.size == 0})
    work = [
        (digests.seed(name, bits.dtype, bits.shape), old[name], bits, start, stop)
        for name, bits in new.items()
        for start, stop in segments(bits.size)
    ]

    def find(item: tuple[int, Bits, Bits, int, int]) -> _Found:
        seed, before, after, start, stop = item
        clock = time.perf_counter()
        fresh = after.read(start, stop)
        read_s = time.perf_counter() - clock
        stale = before.read(start, stop)
        changes = find_changes(stale, fresh)
        replaced = np.empty_like(changes.values)
        cpu.gather(stale, changes.indices, replaced)
        delta = cpu.digest_delta(seed, start, changes.indices, replaced, changes.values)
        share = cpu.digest_range(seed, start, stale) if base_digest is None else 0
        spec = segment_spec(after.dtype, after.shape, start, stop, len(changes.indices))
        sparse = Part(spec, changes, partial(before.read, start, stop))
        parts = tuple(
            sparse._replace(changes=Changes(every_index(spec.size), fresh.copy())) if codec.is_dense(spec) else sparse
            for codec in codecs
        )
        return _Found(parts, share, delta, read_s, time.perf_counter() - clock - read_s)

    codings = [_Coding(codec) for codec in codecs]
    counts: list[int] = []
    delta, read_s, diff_s = 0, 0.0, 0.0
    for found in ordered_map(find, work):
        counts.append(found.parts[0].spec.changed)
        total += found.base
        delta += found.delta
        read_s += found.read_s
        diff_s += found.diff_s
        for coding, part in zip(codings, found.parts, strict=True):
            coding.add(part)
    table = patch_format.encode_table(new, tied or {})
    elements = sum(bits.size for bits in new.values())
    full_nbytes = sum(bits.size * bits.itemsize for bits in new.values())
    changed = sum(counts)
    patches = []
    for coding in codings:
        coding.close()
        header = patch_format.PatchHeader(
            format=patch_format.FORMAT,
            format_version=patch_format.FORMAT_VERSION,
            codec=coding.codec.name,
            base=base,
            target=target,
            base_digest=digests.to_hex(total),
            target_digest=digests.to_hex(total + delta),
            elements=elements,
            changes=changed,
            full_nbytes=full_nbytes,
            segment=SEGMENT,
            blocks=len(coding.blocks),
        )
        data = patch_format.pack(header, table, counts, coding.blocks)
        patches.append(EncodedPatch(data, header, read_s, diff_s, coding.encode_s))
    return patches
