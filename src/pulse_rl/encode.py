"""From two states of weights to a patch: find the changes, code them, keep the digest.

Works segment by segment on threads. What is held is one segment's changes a thread, one open block, and the
coded blocks: never a second model.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pulse_rl import digests, patchfile
from pulse_rl.bits import Bits
from pulse_rl.changes import Changes, find_changes
from pulse_rl.codecs.base import Codec, SegmentSpec, every_index
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map

BLOCK_NBYTES = 1 << 20  # a block is closed once its decoded changes take this much memory


@dataclass(frozen=True)
class EncodedPatch:
    """A patch and what it took to make it."""

    data: bytes
    header: patchfile.PatchHeader
    read_s: float  # reading and casting the new weights, seconds of work summed over threads
    diff_s: float  # finding changes and digesting, likewise
    encode_s: float  # coding and compressing, likewise


class _Found(NamedTuple):
    spec: SegmentSpec
    changes: Changes
    base: int  # this segment's share of the base digest (0 where the base digest is given)
    delta: int  # target digest minus base digest
    read_s: float
    diff_s: float


def encode(
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    *,
    base: int,
    target: int,
    codec: Codec,
    base_digest: int | None = None,
    tied: Mapping[str, str] | None = None,
) -> EncodedPatch:
    """Make the patch from old to new.

    old, new: the same tensors in canonical order. base_digest: the digest of old if it is known; otherwise
    it is computed on the way. Reads each side once.
    """
    total = 0 if base_digest is None else base_digest
    if base_digest is None:
        total = digests.state_digest({name: bits for name, bits in old.items() if bits.size == 0})
    work = [
        (digests.seed(name, bits.dtype, bits.shape), old[name], bits, start, stop)
        for name, bits in new.items()
        for start, stop in digests.segments(bits.size)
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
        spec = SegmentSpec(stop - start, after.itemsize, len(changes.indices))
        if codec.is_dense(spec):
            changes = Changes(every_index(spec.size), fresh.copy())
        return _Found(spec, changes, share, delta, read_s, time.perf_counter() - clock - read_s)

    counts: list[int] = []
    delta, read_s, diff_s = 0, 0.0, 0.0

    def gather_blocks() -> Iterator[tuple[list[SegmentSpec], list[Changes]]]:
        nonlocal total, delta, read_s, diff_s
        specs: list[SegmentSpec] = []
        parts: list[Changes] = []
        held = 0
        for found in ordered_map(find, work):
            counts.append(found.spec.changed)
            total += found.base
            delta += found.delta
            read_s += found.read_s
            diff_s += found.diff_s
            specs.append(found.spec)
            parts.append(found.changes)
            held += found.spec.changed * (4 + found.spec.itemsize)
            if held >= BLOCK_NBYTES:
                yield specs, parts
                specs, parts, held = [], [], 0
        if specs:
            yield specs, parts

    def code(block: tuple[Sequence[SegmentSpec], Sequence[Changes]]) -> tuple[int, bytes, float]:
        specs, parts = block
        clock = time.perf_counter()
        payload = codec.encode(specs, parts)
        return len(specs), payload, time.perf_counter() - clock

    coded = list(map(code, gather_blocks()))
    header = patchfile.PatchHeader(
        format=patchfile.FORMAT,
        format_version=patchfile.FORMAT_VERSION,
        codec=codec.name,
        base=base,
        target=target,
        base_digest=digests.to_hex(total),
        target_digest=digests.to_hex(total + delta),
        elements=sum(bits.size for bits in new.values()),
        changes=sum(counts),
        full_nbytes=sum(bits.size * bits.itemsize for bits in new.values()),
        segment=digests.SEGMENT,
        blocks=len(coded),
    )
    table = patchfile.encode_table(new, tied or {})
    data = patchfile.pack(header, table, counts, [(size, payload) for size, payload, _ in coded])
    return EncodedPatch(data, header, read_s, diff_s, sum(seconds for _, _, seconds in coded))
