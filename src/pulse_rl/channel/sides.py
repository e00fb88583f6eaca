"""The two sides of a channel: which rank holds and owns what, among the senders and among the receivers.

Senders hold one model together. Receivers are *engines*, each of which holds one model together: a receiver that holds
everything is an engine alone, others are put together in the order of their ranks. So every engine proves all that it
holds, and the owners of its pieces count each element once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pulse_rl.group.ranks import Ranks
from pulse_rl.sync.shares import Share, SharePlan, share_by, share_of
from pulse_rl.weights.layout import Layout


@dataclass(frozen=True)
class Standing:
    """What a rank knows of its side."""

    rank: int  # of this process
    side: tuple[int, ...]  # the ranks that hold the weights together with it
    share: Share

    def again(self, tensors: Layout) -> "Standing":
        """The same for tensors that are cut as before, in memory that may be another."""
        return replace(self, share=share_by(self.share.plan, self.side.index(self.rank), tensors))

    def replicas(self) -> dict[str, int]:
        """As `Share.replicas`, by the ranks of the wire instead of their places in the side."""
        found = self.share.replicas(self.side.index(self.rank))
        return {
            ",".join(str(self.side[int(place)]) for place in holders.split(",")): digest
            for holders, digest in found.items()
        }

    def replica_digests(self, holders: str) -> dict[str, int]:
        """As `Share.replica_digests`. holders: ranks of the wire."""
        places = ",".join(str(self.side.index(int(rank))) for rank in holders.split(","))
        return self.share.replica_digests(self.side.index(self.rank), places)


def agree(ranks: Ranks, tensors: Layout, sources: Sequence[int], sharded: Sequence[bool]) -> Standing:
    """Agree who owns what on the side of this rank. A collective of that side: work of a step of all.

    tensors: what this rank holds. sharded: of each rank, whether it holds parts of tensors.
    """
    sends = ranks.rank in sources
    side = tuple(rank for rank in range(ranks.size) if (rank in sources) == sends)
    if not sends:
        if any(sharded[rank] for rank in side):
            everyone = _share(ranks, side, tensors).plan
            side = next(engine for engine in engines_of(everyone, side) if ranks.rank in engine)
        else:
            side = (ranks.rank,)
    return Standing(ranks.rank, side, _share(ranks, side, tensors))


def _share(ranks: Ranks, side: Sequence[int], tensors: Layout) -> Share:
    members = ranks.among(side)
    with members.collective():
        return share_of(members, tensors)


def engines_of(plan: SharePlan, receivers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Put receivers together into engines, each of which holds everything.

    plan: of all receivers, by their place among them. Those that are left over belong to the last engine.
    """
    parts = [part for found in plan.parts.values() for part in found]
    held: dict[int, set[int]] = {place: set() for place in range(len(receivers))}
    for number, part in enumerate(parts):
        for place in part.holders:
            held[place].add(number)
    engines: list[list[int]] = []
    missing: set[int] = set()
    for place, rank in enumerate(receivers):
        if not missing:
            missing = set(range(len(parts)))
            engines.append([])
        engines[-1].append(rank)
        missing -= held[place]
    if missing and len(engines) > 1:
        engines[-2] += engines.pop()
    return tuple(map(tuple, engines))
