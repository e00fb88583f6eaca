"""What one rank holds of the weights of a call: its pieces, who owns them, and strips of its neighbours'.

Where a version ties tensors that the live weights hold separately, the further ones are copies of the first: they are
written like it, and counted such that the digest proves them equal.

A patch is decoded tile by tile, by some codecs from the old bits of a whole tile. Where a rank holds only a part of a
tile, it keeps a copy of the rest: its *halo*, pieces that no digest counts. Patches write to them too, so
they stay what the neighbours hold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from msgspec.structs import replace

from pulse_rl.group.ranks import Ranks
from pulse_rl.history.patches import Fetched
from pulse_rl.sync.shares import Share, SharePlan, share_of, whole_share
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.box_sets import BoxSet
from pulse_rl.weights.boxes import Box, Shape, tiles, whole
from pulse_rl.weights.layout import HasLayout, Layout
from pulse_rl.weights.memory import LiveWeights
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of

Halo = Mapping[str, list[Piece]]  # by tensor


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
        self._prints = prints
        self.halo: dict[str, list[Piece]] = dict(halo)
        self.known = known
        self._plan = plan
        self._tied: Mapping[str, str] | None = None  # of the version whose names are used
        self._weights: Layout | None = None
        self.added = 0  # how often strips were added

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
        return self.plan.all_names()

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
        """The live memory alone, without the halo.

        The n further tensors that are tied to one are its copies: it is counted n + 1 times, and each of them −1 times.
        """
        held, specs = self.share.held, self.plan.tensors
        further: dict[str, list[str]] = {}
        for alias, owner in (self._tied or {}).items() if self.shared else ():
            if alias in specs and owner in specs and specs[alias] == replace(specs[owner], name=alias):
                further.setdefault(owner, []).append(alias)
        if not further:
            return held
        found = dict(held)
        for owner, aliases in further.items():
            tensors = [(owner, len(aliases) + 1), *((alias, -1) for alias in aliases)]
            here = [(found.pop(name), copies) for name, copies in tensors if name in found]
            if here:
                pieces = [one._replace(times=copies * one.times) for bits, copies in here for one in pieces_of(bits)]
                found[owner] = _pieces_like(here[0][0], pieces)
        return Layout(sorted(found.items()), held.tied)

    def add(self, more: Halo) -> None:
        """Add strips to the halo."""
        if more:
            add_pieces(self.halo, more)
            self._weights = None
            self.added += 1

    def drop_halo(self) -> None:
        """Forget all strips, as they are not up to date."""
        self.halo, self._weights = {}, None

    @property
    def halo_nbytes(self) -> int:
        """Memory of the halo."""
        return nbytes_of(self.halo)


def add_pieces(halo: dict[str, list[Piece]], more: Halo) -> None:
    """Add pieces to a halo."""
    for name, pieces in more.items():
        halo[name] = [*halo.get(name, ()), *pieces]


def nbytes_of(halo: Halo) -> int:
    """Memory of these pieces."""
    return sum(piece.bits.size * piece.bits.itemsize for pieces in halo.values() for piece in pieces)


def with_pieces(weights: Layout, more: Mapping[str, Iterable[Piece]]) -> Layout:
    """The same weights with more pieces."""
    if not more:
        return weights
    found: dict[str, Bits] = dict(weights)
    for name, pieces in more.items():
        found[name] = _pieces_like(found[name], [*pieces_of(found[name]), *pieces])
    return Layout(found, weights.tied)


def _pieces_like(tensor: Bits, pieces: list[Piece]) -> Pieces:
    return Pieces(tensor.dtype, tensor.itemsize, tuple(tensor.shape), pieces)


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
