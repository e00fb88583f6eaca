"""Anchors: θ and momentum after a round, as newcomers start from them.

Of each fragment one object: a zstd frame of its θ and then its momentum, float32 and little-endian. Where trainers send
sparsely the momentum is mostly zeros. An anchor counts from when its document is put, after all its objects.
"""

from contextlib import suppress
from typing import NamedTuple

import numpy as np
import zstandard
from blake3 import blake3

from pulse_rl.codecs.zstd import decompress
from pulse_rl.errors import FormatError, IntegrityError, StoreError, translate
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.meeting import names
from pulse_rl.loco.meeting.documents import Anchor, Part
from pulse_rl.log.objects import fetch
from pulse_rl.store.base import Store
from pulse_rl.weights import digests


class Values(NamedTuple):
    """What an anchor holds."""

    theta: list[F32]  # of each segment
    momentum: list[F32]


def write(store: Store, masters: Masters, run: str, round: int, life: str) -> Anchor:
    """Put the objects of an anchor; returns its document, which is not put yet."""
    parts = []
    for number, fragment in enumerate(masters.fragments):
        segments = [masters.segments[each] for each in fragment]
        raw = np.concatenate([*(one.shared for one in segments), *(one.momentum for one in segments)]).tobytes()
        data = zstandard.ZstdCompressor(1).compress(raw)
        store.put(names.anchor_part_name(round, life, number), data)
        parts.append(Part(len(data), blake3(data).hexdigest()))
    return Anchor(
        run=run,
        round=round,
        theta=digests.to_hex(masters.digest()),
        momentum=digests.to_hex(masters.digest_of([segment.momentum for segment in masters.segments])),
        life=life,
        parts=tuple(parts),
    )


def delete(store: Store, anchor: Anchor) -> None:
    """Delete the objects of an anchor that does not count; what fails is left to a later pruning."""
    with suppress(StoreError):
        for number in range(len(anchor.parts)):
            store.delete(names.anchor_part_name(anchor.round, anchor.life, number))


def read(store: Store, masters: Masters, anchor: Anchor) -> Values:
    """Read and check all of an anchor; changes nothing. Raises IntegrityError and StoreError."""
    where = f"{names.anchor_name(anchor.round)} in {store.url}"
    if len(anchor.parts) != len(masters.fragments):
        raise IntegrityError(
            f"{where}: expected {len(masters.fragments)} fragments, as this model has, found {len(anchor.parts)}",
            name=names.anchor_name(anchor.round),
        )
    values = Values([], [])
    for number, (fragment, part) in enumerate(zip(masters.fragments, anchor.parts, strict=True)):
        sizes = [masters.segments[each].size for each in fragment]
        name = names.anchor_part_name(anchor.round, anchor.life, number)
        nbytes = 8 * sum(sizes)
        data = fetch(store, part.ref(name), nbytes + (nbytes >> 8) + 1024)
        raw = _decompressed(data, nbytes, name)
        found = np.split(np.frombuffer(raw, "<f4").astype(np.float32, copy=False), np.cumsum(sizes * 2)[:-1])
        values.theta.extend(found[: len(sizes)])
        values.momentum.extend(found[len(sizes) :])
    digest, momentum = (digests.to_hex(masters.digest_of(each)) for each in values)
    if (digest, momentum) != (anchor.theta, anchor.momentum):
        raise IntegrityError(
            f"{where}: expected θ and momentum of the digests {anchor.theta} and {anchor.momentum}, found {digest} and "
            f"{momentum}",
            name=names.anchor_name(anchor.round),
            expected=anchor.theta,
            found=digest,
        )
    return values


def _decompressed(data: bytearray, nbytes: int, name: str) -> bytes:
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=name)):
        raw = decompress(memoryview(data), nbytes, name)
    if len(raw) != nbytes:
        raise IntegrityError(f"{name}: expected {nbytes} bytes, found {len(raw)}", name=name)
    return raw
