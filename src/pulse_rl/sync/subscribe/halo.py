"""Strips of tensors, fetched from the ranks that own them: what a rank needs to decode tiles that it holds in part."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np
import zstandard

from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES, UINTS
from pulse_rl.group.ranks import Ranks
from pulse_rl.patch.live import Copies
from pulse_rl.sync.shares import SharePlan
from pulse_rl.weights.bits import HostBits
from pulse_rl.weights.boxes import Box, Shape
from pulse_rl.weights.pieces import Piece, place_view

ROUND_NBYTES = 32 << 20  # that one rank receives at a time
MAX_NBYTES = 64 << 20  # of what one rank says that it needs, as JSON

_Needs: TypeAlias = dict[str, list[tuple[Shape, Shape]]]  # offset and sizes of each box, by tensor


def fetch_strips(
    ranks: Ranks, plan: SharePlan, needed: Mapping[str, list[Box]], held: Mapping[str, Copies]
) -> dict[str, list[Piece]]:
    """Bring each rank the boxes that it needs. A collective.

    needed: by this rank, by tensor. held: what it holds, from which it sends what it owns. Returns the boxes as pieces
    that no digest counts.
    """
    rows = {name: [(box.offset, box.sizes) for box in boxes] for name, boxes in needed.items()}
    packed = zstandard.ZstdCompressor(3).compress(msgspec.json.encode(rows))
    gathered = ranks.gather("find which strips are needed", lambda: packed, MAX_NBYTES)
    wishes = [
        {name: [Box(*row) for row in found] for name, found in decode_json(data, _Needs, "strips").items()}
        for data in (decompress(one, MAX_NBYTES, "strips") for one in gathered)
    ]
    found: dict[str, list[Piece]] = {}
    for names, limit in _rounds(plan, wishes):
        outgoing = partial(_outgoing, ranks.rank, plan, wishes, names, held)
        incoming = ranks.exchange("bring strips", outgoing, limit)
        taken = [0] * len(incoming)
        for name in names:
            dtype = UINTS[ITEMSIZES[plan.tensors[name].dtype]]
            for box in wishes[ranks.rank].get(name, ()):
                array = np.empty(box.sizes, dtype)
                for common, owner in plan.owners(name, box):
                    nbytes = common.size * dtype.itemsize
                    data = incoming[owner][taken[owner] : taken[owner] + nbytes]
                    taken[owner] += nbytes
                    array[common.slices(box)] = np.frombuffer(data, dtype).reshape(common.sizes)
                piece = Piece(box, HostBits(plan.tensors[name].dtype, array), times=0)
                found.setdefault(name, []).append(piece)
    return found


def _rounds(plan: SharePlan, wishes: list[dict[str, list[Box]]]) -> Iterator[tuple[list[str], int]]:
    """The tensors that are sent together, as many as a rank may receive at a time, and the most bytes that one gets."""
    names: list[str] = []
    waiting = [0] * len(wishes)
    for name in sorted({name for wish in wishes for name in wish}):
        itemsize = ITEMSIZES[plan.tensors[name].dtype]
        more = [sum(box.size for box in wish.get(name, ())) * itemsize for wish in wishes]
        if names and max(a + b for a, b in zip(waiting, more, strict=True)) > ROUND_NBYTES:
            yield names, max(waiting)
            names, waiting = [], [0] * len(wishes)
        names.append(name)
        waiting = [a + b for a, b in zip(waiting, more, strict=True)]
    if names:
        yield names, max(waiting)


def _outgoing(
    rank: int, plan: SharePlan, wishes: list[dict[str, list[Box]]], names: list[str], held: Mapping[str, Copies]
) -> list[bytes]:
    """What this rank owns of what each one needs of some tensors."""
    return [b"".join(_owned(rank, plan, wish, names, held)) for wish in wishes]


def _owned(
    rank: int, plan: SharePlan, wish: Mapping[str, list[Box]], names: list[str], held: Mapping[str, Copies]
) -> Iterator[bytes]:
    """What this rank owns of what another one needs."""
    for name in names:
        for box in wish.get(name, ()):
            for common, owner in plan.owners(name, box):
                if owner == rank:
                    view = place_view(held[name][0], common)
                    yield view.read(0, view.size).tobytes()
