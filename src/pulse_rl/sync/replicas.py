"""Replicas, the same elements on several ranks, and copies of tied tensors: both must have equal bits.

The digest, as `shares` counts it, proves replicas too. Here is what finds those that differ, and names them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.errors import ExchangeError, IntegrityError, shown
from pulse_rl.group.ranks import Ranks
from pulse_rl.sync.share_plan import MAX_NBYTES
from pulse_rl.sync.shares import Share, bits_of_pieces
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, differ
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import Piece, Pieces, pieces_of


def replica_digests(share: Share, rank: int) -> dict[str, int]:
    """The digest of what this rank and others hold, for each set of such ranks, as "0,2".

    Raises IntegrityError if this rank holds a part twice, with different bits.
    """
    if not share.plan.parts:  # of one process, which holds each tensor whole
        return {}
    for name, tensor in share.held.items():
        for one, other in pairwise(pieces_of(tensor)):  # sorted, so the copies of a part follow each other
            if one.box == other.box and one.bits.storage != other.bits.storage and differ(one.bits, other.bits):
                raise IntegrityError(
                    f"tensor {name!r}: rank {rank} holds the elements {list(one.box.sizes)} at "
                    f"{list(one.box.offset)} twice, with different bits: expected equal copies; give this part "
                    "once, or copy one to the other",
                    name=name,
                    ranks=(rank,),
                )
    return {holders: digests.state_digest(layout) for holders, layout in _replicated(share, rank).items()}


def unequal_replicas(ranks: Ranks, share: Share, found: Sequence[Mapping[str, int]]) -> ExchangeError | None:
    """The error that names tensors whose copies differ between two ranks; None if all are equal. Then no collective.

    found: of each rank, its `replica_digests`.
    """
    differing = _differing(found)
    if differing is None:
        return None
    first, rank, holders = differing

    def here() -> bytes:
        return msgspec.json.encode(_by_tensor(share, ranks.rank, holders) if ranks.rank in (first, rank) else {})

    said = ranks.gather("compare replicas by tensor", here, MAX_NBYTES)
    one, other = (decode_json(said[at], dict[str, int], "replicas") for at in (first, rank))
    names = [name for name in one if one[name] != other.get(name)]
    where = f" of {shown(names)}" if names else ""
    numbers = [ranks.numbers[one] for one in (first, rank)]
    all_of_them = ",".join(str(ranks.numbers[int(holder)]) for holder in holders.split(","))
    return ExchangeError(
        f"ranks {numbers[0]} and {numbers[1]} hold replicas of the same weights, with different bits{where}: expected "
        f"equal ones on ranks {all_of_them}",
        ranks=numbers,
    )


def unequal_copies(ranks: Ranks, held: Layout, tied: Mapping[str, str]) -> list[str]:
    """The copies of tied tensors whose bits are not those of the tensors that they are tied to. A collective.

    held: as of `Share`. tied: the copies → these tensors, alike on all ranks. Whole tensors of one process are compared
    bit for bit; else the digests of all ranks' pieces, each replica too.
    """

    if not tied:
        return []

    def terms() -> list[int]:  # of each copy 0 if it is equal here; else what this rank adds to their difference
        return [_difference(owner, held.get(alias), held.get(owner)) for alias, owner in tied.items()]

    found = ranks.share("compare tied tensors", terms, list[int], alike=True)
    return [alias for alias, *added in zip(tied, *found, strict=True) if sum(added) & digests.MASK]


def _difference(name: str, one: Bits | None, other: Bits | None) -> int:
    if one is None or other is None or isinstance(one, Pieces) or isinstance(other, Pieces):
        a, b = (digests.state_digest({name: bits}) if bits is not None else 0 for bits in (one, other))
        return (a - b) & digests.MASK
    return int(differ(one, other))


def _differing(found: Sequence[Mapping[str, int]]) -> tuple[int, int, str] | None:
    """Two ranks whose replicas differ, and all ranks that hold these."""
    for rank, sets in enumerate(found):
        for holders, digest in sets.items():
            first = int(holders.split(",")[0])
            if found[first].get(holders) != digest:
                return first, rank, holders
    return None


def _by_tensor(share: Share, rank: int, holders: str) -> dict[str, int]:
    """The digest of each tensor of what this rank and others hold. holders: these ranks, as "0,2"."""
    layout = _replicated(share, rank)[holders]
    return {name: digests.state_digest({name: bits}) for name, bits in layout.items()}


def _replicated(share: Share, rank: int) -> dict[str, dict[str, Bits]]:
    """What this rank and others hold, for each set of such ranks."""
    sets: dict[tuple[int, ...], dict[str, list[Piece]]] = {}
    for name, parts in share.plan.parts.items():
        here = {piece.box: piece for piece in pieces_of(share.held[name])} if name in share.held else {}
        for part in parts if here else ():
            holders = tuple(dict.fromkeys(part.holders))
            if len(holders) > 1 and rank in holders:
                sets.setdefault(holders, {}).setdefault(name, []).append(here[part.box]._replace(times=1))
    return {
        ",".join(map(str, holders)): {name: bits_of_pieces(share.held[name], pieces) for name, pieces in names.items()}
        for holders, names in sets.items()
    }
