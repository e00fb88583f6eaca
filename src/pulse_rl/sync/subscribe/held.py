"""What one rank holds of the weights of a call: its pieces, who owns them, and strips of its neighbours'.

Where a version ties tensors that the live weights hold separately, the further ones are copies of the first: they are
written like it, and counted such that the digest proves them equal.

A patch is decoded tile by tile, by some codecs from the old bits of a whole tile. Where a rank holds only a part of a
tile, it keeps a copy of the rest: its *halo*, pieces that no digest counts. Patches write to them too, so
they stay what the neighbours hold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import zstandard

from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import decode_json
from pulse_rl.dtypes import ITEMSIZES
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.patches import Fetched
from pulse_rl.parallel import sliced
from pulse_rl.patch.live import Copies
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.sync.shares import Share, share_of, whole_share
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.box_sets import BoxSet
from pulse_rl.weights.boxes import Box, Shape, tiles, whole
from pulse_rl.weights.layout import HasLayout, Layout
from pulse_rl.weights.memory import LiveWeights
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of

ROUND_NBYTES = 32 << 20  # of strips that one rank receives at a time
MAX_NBYTES = 64 << 20  # of what one rank says that it needs, as JSON

Halo = Mapping[str, list[Piece]]  # by tensor
_Needs: TypeAlias = dict[str, list[tuple[Shape, Shape]]]  # offset and sizes of each box, by tensor


class HeldWeights:
    """The weights of one call.

    plan: of the last call, which stands if every rank still holds the same. halo: of the last call, if it is still up
    to date. prints: every rank's `layout_fingerprint` of the live weights, where they were exchanged already. known:
    the names of the history's tensors, where they were looked up.
    """

    def __init__(
        self,
        live: LiveWeights,
        ranks: Ranks,
        plan: SharePlan | None,
        halo: Halo,
        prints: Sequence[bytes] | None = None,
        known: Collection[str] | None = None,
    ) -> None:
        self.live = live
        self.ranks = ranks
        self.altered: str | None = None  # what was wrong with them when the call began
        self._prints = prints
        self.halo: dict[str, list[Piece]] = dict(halo)
        self.known = known
        self._plan = plan
        self._tied: Mapping[str, str] | None = None  # of the version whose names are used
        self._weights: Layout | None = None

    @property
    def shared(self) -> bool:
        """Whether the weights are in shards, or those of several ranks."""
        return self.ranks.size > 1 or self.live.layout.sharded

    @cached_property
    def agreed(self) -> Share:
        """What this rank holds and owns, under its own names. The first use is a collective; raises as `share_of`."""
        if not self.shared:
            return whole_share(self.live.layout)
        found = share_of(self.ranks, self.live.layout, self._plan, self._prints)
        if self._plan is not None and found.plan.fingerprint != self._plan.fingerprint:
            self.drop_halo()
        return found

    @cached_property
    def share(self) -> Share:
        """The same under the names of the version that `tie` was called with last."""
        return self.agreed if self._tied is None else self.agreed.called(self.known, self._tied)

    @property
    def plan(self) -> SharePlan:
        return self.share.plan

    @property
    def tensors(self) -> Mapping[str, HasLayout]:
        """The tensors of the whole model by every name."""
        return self.plan.all_names

    def tie(self, tied: Mapping[str, str]) -> None:
        """Use the names of a version. tied: its further names → the name that stands for them."""
        if self._tied != tied:
            self._tied, self._weights = dict(tied), None
            for cached in ("share", "memory"):
                self.__dict__.pop(cached, None)

    @property
    def weights(self) -> Layout:
        """What this rank holds, under the names of the version, with its halo."""
        if self._weights is None:
            self._weights = with_pieces(self.memory, self.halo)
        return self._weights

    @cached_property
    def memory(self) -> Layout:
        """The live memory alone, without the halo, tied tensors as `Share.counted` says."""
        return self.share.counted(self._tied or {}) if self.shared else self.share.held

    def wanted(self) -> Layout:
        """What this rank needs of a version: each box that it holds once, which counts as all its copies do."""
        found: dict[str, Bits] = {}
        for name, tensor in self.memory.items():
            pieces: dict[Box, Piece] = {}
            for piece in pieces_of(tensor):
                times = pieces[piece.box].times if piece.box in pieces else 0
                pieces[piece.box] = piece._replace(times=times + piece.times)
            found[name] = Pieces(tensor.dtype, tensor.shape, list(pieces.values()))
        return Layout(found)

    def add(self, more: Halo) -> None:
        """Add strips to the halo."""
        for name, pieces in more.items():
            self.halo[name] = [*self.halo.get(name, ()), *pieces]
        self._weights = None

    def drop_halo(self) -> None:
        """Forget all strips, as they are not up to date."""
        self.halo, self._weights = {}, None

    @property
    def halo_nbytes(self) -> int:
        """Memory of the halo."""
        return sum(piece.bits.size * piece.bits.itemsize for pieces in self.halo.values() for piece in pieces)


def with_pieces(weights: Layout, more: Mapping[str, Iterable[Piece]]) -> Layout:
    """The same weights with more pieces."""
    if not more:
        return weights
    found: dict[str, Bits] = dict(weights)
    for name, pieces in more.items():
        tensor = found[name]
        found[name] = Pieces(tensor.dtype, tensor.shape, [*pieces_of(tensor), *pieces])
    return Layout(found, weights.tied)


def missing_strips(fetched: Fetched, weights: Layout) -> dict[str, list[Box]]:
    """What a rank does not hold of the tiles of a patch that it holds in part, by tensor.

    Of tiles that do not change, too: a later patch may change them. Empty for patches that are decoded without old
    bits.
    """
    found: dict[str, list[Box]] = {}
    for part in fetched.parts:
        for name, _, shape, boxes in part.table if part.codec.conditional else ():
            tensor = weights.get(name)
            if isinstance(tensor, Pieces) and tensor.pieces:
                strips = _strips(shape, boxes, tuple(dict.fromkeys(piece.box for piece in tensor.pieces)))
                if strips:
                    found.setdefault(name, []).extend(strips)
    return found


@lru_cache(maxsize=4096)  # a model has few different shapes
def _strips(shape: Shape, boxes: tuple[Box, ...], held: tuple[Box, ...]) -> tuple[Box, ...]:
    if whole(shape) in held:
        return ()
    found, here = [], BoxSet(held)
    for box in boxes:
        for tile in tiles(shape, box):
            touching = here.touching(tile.box)
            left = [tile.box] if touching else []
            for number in touching:
                left = [rest for part in left for rest in part.without(held[number])]
            found += left
    return tuple(found)


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
    names = sorted({name for wish in wishes for name in wish})
    most = [
        ITEMSIZES[plan.tensors[name].dtype] * max(sum(box.size for box in wish.get(name, ())) for wish in wishes)
        for name in names
    ]
    found: dict[str, list[Piece]] = {}
    first = {name: copies[0] for name, copies in held.items()}
    for some in sliced(np.array(most, np.int64), ROUND_NBYTES):
        boxes = [[(name, box) for name in names[some] for box in wish.get(name, ())] for wish in wishes]
        for name, box, array in plan.bring("bring strips", ranks, boxes, first):
            piece = Piece(box, HostBits(plan.tensors[name].dtype, array), times=0)
            found.setdefault(name, []).append(piece)
    return found
