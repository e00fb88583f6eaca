"""A history whose patches are put in parts, as several publishing ranks put them, by one process."""

from collections.abc import Callable
from typing import Any

from blake3 import blake3
from msgspec.structs import replace

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.history.history import commit, seal
from pulse_rl.history.manifest import FORMAT, Manifest, PatchRef, part_name, parts_name, trail_name
from pulse_rl.history.patches import describe, list_parts
from pulse_rl.history.trail import Trail, link_of
from pulse_rl.log.objects import ObjectRef, new_token
from pulse_rl.patch.encode import find
from pulse_rl.store.base import Store
from pulse_rl.weights import digests
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import Piece, Pieces

Cut = Callable[[str, tuple[int, ...]], list[Box | None]]  # the box of each publishing rank, of a tensor


def even(ranks: int, dim: int = 0) -> Cut:
    """Every tensor cut along one dimension into ranges of about one size; the later ranks may get nothing."""

    def cut(name: str, shape: tuple[int, ...]) -> list[Box | None]:
        if not shape:
            return [Box((), ()), *[None] * (ranks - 1)]
        along = min(dim, len(shape) - 1)
        edges = [rank * shape[along] // ranks for rank in range(ranks + 1)]
        found: list[Box | None] = []
        for start, stop in zip(edges, edges[1:], strict=False):
            offset = tuple(start if d == along else 0 for d in range(len(shape)))
            found.append(Box(offset, tuple(stop - start if d == along else n for d, n in enumerate(shape))))
        return found

    return cut


def cut_layout(weights: Layout, rank: int, cut: Cut) -> Layout:
    """What one rank holds of whole weights: views of the same memory."""
    held = {}
    for name, bits in weights.items():
        box = cut(name, bits.shape)[rank]
        pieces = [Piece(box, bits.view(box.slices(whole(bits.shape))))] if box is not None and box.size else []
        held[name] = Pieces(bits.dtype, tuple(bits.shape), pieces)
    return Layout(held, weights.tied)


def publish_parts(store: Store, old: Any, new: Any, cut: Cut, ranks: int, *, codec: str = "context") -> Manifest:
    """Commit the next version of a history, its patch in parts. old: the weights of the newest version."""
    history = pulse.History(store)
    base = history.head()
    assert base is not None
    before, after = layout(old), layout(new)
    coded = [
        find(
            cut_layout(before, rank, cut), cut_layout(after, rank, cut), codecs=[CODECS[codec]], tied=after.tied
        ).code()[0]
        for rank in range(ranks)
    ]
    base_digest = int(base.digest, 16)
    assert digests.state_digest(before) == base_digest
    target_digest = base_digest + sum(part.found.delta for part in coded)
    assert (target_digest - digests.state_digest(after)) % (1 << 64) == 0
    sequence, version, token = base.sequence + 1, base.version + 1, new_token()
    listed = parts_name(sequence, token)
    parts = []
    for rank, part in enumerate(coded):
        made = part.finish(
            base=base.version,
            target=version,
            base_digest=base_digest,
            target_digest=target_digest,
            part=rank,
            parts=ranks,
        )
        parts.append(describe(part_name(listed, rank), made))
        store.put(parts[-1].name, made.data)
    data, ref = list_parts(listed, parts)
    store.put(listed, data)
    patch = PatchRef(
        ref.name,
        ref.nbytes,
        ref.blake3,
        ref.head_nbytes,
        ref.head_blake3,
        ref.parts,
        ref.parts_nbytes,
        base=base.version,
        codec=codec,
        changes=sum(part.found.changes for part in coded),
    )
    manifest = Manifest(
        format=FORMAT.name,
        format_version=FORMAT.version,
        sequence=sequence,
        version=version,
        digest=digests.to_hex(target_digest),
        elements=base.elements,
        full_nbytes=base.full_nbytes,
        tied=base.tied,
        patch=patch,
        anchor=(),
        anchor_sequence=base.anchor_sequence,
        anchor_number=base.anchor_number,
        trail=None,
        publisher=base.publisher,
        created=0.0,
        history=base.history,
        software=base.software,
    )
    known = history.trail(base) or Trail(base.sequence)
    link = link_of(manifest)
    assert link is not None
    trail = known.extended(sequence, [link]).encode()
    stored = ObjectRef(trail_name(sequence, token), len(trail), blake3(trail).hexdigest())
    store.put(stored.name, trail)
    manifest = replace(manifest, trail=stored)
    commit(history, manifest, seal(history, manifest))
    return manifest
